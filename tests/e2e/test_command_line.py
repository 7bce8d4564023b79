"""`fissile serve` and its clients as a person uses them: what they print, what they return, what is left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.rpc.api_keys import Role, new_key
from tests.certificates import LOOPBACK, Authority
from tests.checkpoints import make_checkpoint
from tests.e2e.service import free_port, small_pool

ROOT = Path(__file__).resolve().parents[2]
BUF = ROOT / "build" / "buf" / "node_modules" / ".bin" / "buf"
TIMEOUT_S = 240.0
FIGURES = re.compile(
    r"TTFT [\d.]+ ms, [\d.]+ ms per token, (\d+) tokens from \d+ \(\d+ cached\), \w+, request [0-9a-f]{32}"
)


class Serve:
    """A running `fissile serve`. Its processes, children too, carry a mark in their environment."""

    def __init__(self, *arguments: str, port: int | None = None, **environment: str) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.mark = f"FISSILE_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "common.cli.main", "serve", "--port", str(self.port), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **small_pool(arguments), **environment, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.errors: list[str] = []
        self.output: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,))
            for lines, stream in ((self.errors, self.process.stderr), (self.output, self.process.stdout))
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.everything()
            assert time.monotonic() < end, self.everything()
            time.sleep(0.02)

    def wait_for_line(self, text: str, count: int = 1) -> None:
        self.wait_for(lambda: sum(text in line for line in self.errors) >= count)

    def wait(self) -> int:
        """Waits for its end. Returns the exit code."""
        code = self.process.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join(60)
        return code

    def everything(self) -> str:
        return "".join([*self.output, *self.errors])

    def processes(self) -> dict[int, str]:
        """Process ids and command lines of all that carry the mark and have not ended."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def worker_pid(self) -> int:
        (pid,) = [pid for pid, command in self.processes().items() if " -m worker " in command]
        return pid

    def kill_worker(self) -> None:
        self.wait_for(lambda: any(" -m worker " in command for command in self.processes().values()))
        os.kill(self.worker_pid(), signal.SIGKILL)

    def assert_nothing_left(self) -> None:
        end = time.monotonic() + 60
        while self.processes() and time.monotonic() < end:
            time.sleep(0.02)
        assert self.processes() == {}

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@pytest.fixture
def serve() -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*arguments: str, port: int | None = None, **environment: str) -> Serve:
        started.append(Serve(*arguments, port=port, **environment))
        return started[-1]

    yield start
    for each in started:
        each.clean_up()


def fissile(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.cli.main", *arguments],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def example(name: str, *arguments: str) -> str:
    """Output of a program in examples/."""
    command = [sys.executable, f"examples/{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that a simulated worker serves: a tokenizer and a config, no weights are read."""
    return str(make_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.mark.slow
def test_once_serves_streams_one_answer_and_ends(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated, "--once")
    assert run.wait() == 0, run.everything()
    errors = "".join(run.errors)
    for said in ("tiny from ", f"127.0.0.1:{run.port}", "prefix caching  on", "1024 tokens", "KV memory", "serves"):
        assert said in errors
    figures = FIGURES.search(errors)
    assert figures is not None, errors
    assert int(figures[1]) >= 1
    assert "".join(run.output).strip()
    run.assert_nothing_left()


@pytest.mark.slow
def test_bench_reports_draft_acceptance(serve: Callable[..., Serve]) -> None:
    run = serve("--speculate", "--once")
    assert run.wait() == 0, run.everything()
    share = r"(\d+ of \d+ drafts accepted \(\d+%\)|no draft verified)"
    line = rf"speculation: {share}, [\d.]+ times the speed without drafts, and the same answer"
    assert re.search(line, "".join(run.errors)), run.everything()
    run.assert_nothing_left()


def test_serve_list_generate_and_stop(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated, "--simulate", "fixed:2ms", "--workers", "2", "--no-ask", "--model-name", "mine")
    run.wait_for_line(f"serving on {run.address}")
    assert run.output == []
    at = ("--address", run.address)

    models = json.loads(fissile("models", *at, "--json").stdout)
    assert [model["name"] for model in models] == ["mine"]
    assert "CAPABILITY_CHAT" in models[0]["capabilities"]

    asked = fissile("generate", *at, "--max-tokens", "12", "--ignore-eos", "--trace", "hello")
    stages = [line.split() for line in asked.stderr.splitlines() if line.endswith("|")]
    assert {"prefill", "decode"} <= {stage[0] for stage in stages}, asked.stderr
    assert (asked.returncode, bool(asked.stdout.strip())) == (0, True), asked.stderr
    figures = FIGURES.search(asked.stderr)
    assert figures is not None
    assert figures[1] == "12"

    options = ("generate", *at, "--text", "--seed", "7", "--max-tokens", "9", "--ignore-eos", "--json")
    first, second = (json.loads(fissile(*options, text="Once upon a time\n").stdout) for _ in range(2))
    assert first["text"] == second["text"]
    assert (first["seed"], first["finish_reason"], first["usage"]["completion_tokens"]) == ("7", "length", 9)

    refused = fissile("generate", *at, "--model", "other", "--text", "hello")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: NOT_FOUND: ")
    assert refused.stderr.count("\n") == 1

    printed = example("python_client.py", run.address, "hello")
    assert printed.startswith("mine: ")
    assert re.search(r"FINISH_REASON_\w+, \d+ tokens, first one after [\d.]+ ms", printed)
    assert re.search(r"FINISH_REASON_\w+, \d+ tokens", example("library_client.py", run.address))
    assert len(re.findall(r"\(\d+ tokens\)|^trace [0-9a-f]{32}$", example("async_client.py", run.address), re.M)) == 4

    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.everything()
    assert "ended\n" in run.errors
    run.assert_nothing_left()


@pytest.mark.slow
def test_options_printed_by_protected_serve_reach_it(
    serve: Callable[..., Serve], simulated: str, tmp_path: Path
) -> None:
    ca = Authority(tmp_path)
    pair, keys = ca.issue("server", *LOOPBACK), tmp_path / "keys"
    key, kept = new_key("me", "", [Role.INFER])
    keys.write_text(kept.line())
    protection = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--api-keys", str(keys))
    run = serve(
        *("--model", simulated, "--simulate", "instant", "--http-port", "0", "--metrics-port", "0"), *protection
    )
    run.wait_for_line(f"models --address {run.address} --tls-ca FILE --api-key KEY")
    assert run.output == []
    called = fissile("models", "--address", run.address, "--tls-ca", str(ca.cert), "--api-key", key)
    assert (called.returncode, "tiny" in called.stdout) == (0, True), called.stderr
    healthy = fissile("health", "--address", run.address, "--tls-ca", str(ca.cert))
    assert healthy.stdout == f"readiness at {run.address}: SERVING\n", healthy.stderr
    (line,) = [line.strip() for line in run.errors if line.strip().startswith("curl ")]
    command = shlex.split(line.replace("FILE", str(ca.cert)).replace("KEY", key))
    url = next(word for word in command if word.startswith("https://")).removesuffix("/v1/chat/completions")
    run.wait_for(
        lambda: subprocess.run([*command[:4], f"{url}/version"], capture_output=True, check=False).returncode == 0
    )
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(asked.stdout)["usage"]["completion_tokens"] > 0, asked.stdout
    scraped = subprocess.run([*command[:4], f"{url}/metrics"], capture_output=True, text=True, check=True)
    assert "fissile_http_routers 1" in scraped.stdout
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.everything()
    refused = fissile("serve", "--model", simulated, "--once", *protection)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--once asks in plain text" in refused.stderr


def test_serve_refuses_a_facade_without_what_its_router_asks_for(tmp_path: Path, simulated: str) -> None:
    pair = Authority(tmp_path).issue("server", *LOOPBACK)
    options = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(pair.cert))
    refused = fissile("serve", "--model", simulated, "--simulate", "instant", *options, "--http-port", "0")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "--router-client-cert" in refused.stderr


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed: make setup brings it where npm is there")
def test_buf_curl_needs_no_protos(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated, "--simulate", "fixed:2ms", "--no-ask")
    run.wait_for_line(f"serving on {run.address}")
    base = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    url = f"http://{run.address}"
    methods = subprocess.run([*base, "--list-methods", url], capture_output=True, text=True, check=True).stdout
    assert {"fissile.v1.InferenceService/Chat", "grpc.health.v1.Health/Check"} <= set(methods.split())
    asked = json.dumps({"text": "hello", "sampling_params": {"max_tokens": 3, "ignore_eos": True}})
    command = [*base, "-d", asked, f"{url}/fissile.v1.InferenceService/Generate"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "FINISH_REASON_LENGTH" in answer


@pytest.mark.slow
def test_ctrl_c_lets_a_running_answer_finish(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated, "--simulate", "fixed:10ms", "--no-ask")
    run.wait_for_line(f"serving on {run.address}")
    command = ["generate", "--address", run.address, "--text", "--max-tokens", "200", "--ignore-eos", "hello"]
    asking = subprocess.Popen(
        [sys.executable, "-m", "common.cli.main", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None
    assert asking.stdout.read(1)
    run.process.send_signal(signal.SIGTERM)
    _, errors = asking.communicate(timeout=TIMEOUT_S)
    assert asking.returncode == 0, errors
    assert "200 tokens" in errors
    assert run.wait() == 0, run.everything()
    run.assert_nothing_left()


def test_ctrl_c_during_the_start_ends_it(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated)
    run.wait_for_line("KV memory")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.everything()
    run.assert_nothing_left()


@pytest.mark.slow
def test_serve_restarts_dead_worker_and_ends_after_three_deaths(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated, "--simulate", "fixed:2ms", "--no-ask")
    run.wait_for_line(f"serving on {run.address}")
    run.kill_worker()
    run.wait_for_line("worker-0 died (killed by SIGKILL); starting it again in 0.5 s")

    def answers() -> bool:
        asked = fissile("generate", "--address", run.address, "--text", "--max-tokens", "3", "hello")
        assert asked.returncode in (0, 1, 3), asked.stderr
        return asked.returncode == 0

    run.wait_for(answers)
    run.kill_worker()
    run.wait_for_line("worker-0 died (killed by SIGKILL); starting it again in 1 s")
    run.kill_worker()
    assert run.wait() == 1
    assert run.errors[-1] == "error: worker-0 died 3 times within a minute (killed by SIGKILL)\n"
    last = run.errors[run.errors.index("the last lines of worker-0:\n") + 1 :]
    assert any("worker" in line for line in last)
    run.assert_nothing_left()


@pytest.mark.slow
def test_no_child_survives_a_killed_serve(serve: Callable[..., Serve], simulated: str) -> None:
    run = serve("--model", simulated, "--simulate", "fixed:2ms", "--no-ask")
    run.wait_for_line(f"serving on {run.address}")
    assert len(run.processes()) == 3
    run.process.kill()
    run.wait()
    run.assert_nothing_left()


@pytest.mark.slow
def test_taken_port_ends_serve_with_one_line(serve: Callable[..., Serve], simulated: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        run = serve("--model", simulated, "--simulate", "fixed:2ms", port=port)
        assert run.wait() == 2
    assert run.errors[-1].startswith(f"error: port {port} on 127.0.0.1 is in use")
    assert sum("in use" in line for line in run.errors) == 1
    run.assert_nothing_left()


def change_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def spoil_tokenizer(folder: Path) -> None:
    """The worker served, and no client could ever be served."""
    (folder / "tokenizer.json").write_text("{}")


def spoil_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")


def without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        pytest.param(lambda folder: (folder / "config.json").write_text("{"), "config.json", marks=pytest.mark.slow),
        pytest.param(
            lambda folder: change_config(folder, architectures=["GPT2LMHeadModel"]),
            "GPT2LMHeadModel",
            marks=pytest.mark.slow,
        ),
        pytest.param(without_tokenizer, "tokenizer.json", marks=pytest.mark.long),
        pytest.param(spoil_tokenizer, "tokenizer.json cannot be read", marks=pytest.mark.slow),
        pytest.param(spoil_template, "chat template", marks=pytest.mark.long),
        pytest.param(without_weights, "safetensors", marks=pytest.mark.slow),
    ],
    ids=[
        "no config",
        "broken config",
        "unsupported architecture",
        "no tokenizer",
        "bad tokenizer",
        "bad template",
        "no weights",
    ],
)
def test_bad_model_ends_serve_with_one_line(
    serve: Callable[..., Serve], tmp_path: Path, spoil: Callable[[Path], object], named: str
) -> None:
    model = make_checkpoint(tmp_path / "model")
    spoil(model)
    run = serve("--model", str(model))
    assert run.wait() == 2, run.everything()
    assert run.errors[-1].startswith("error: ")
    assert named in run.errors[-1]
    assert sum(line.startswith("error: ") or "Traceback" in line for line in run.errors) == 1
    assert not any("died" in line for line in run.errors)
    run.assert_nothing_left()


@pytest.mark.slow
def test_missing_model_is_named(serve: Callable[..., Serve], tmp_path: Path) -> None:
    run = serve("--model", str(tmp_path / "nowhere"))
    assert run.wait() == 2
    assert str(tmp_path / "nowhere") in run.errors[-1]
    assert run.errors[-1].startswith("error: ")


@pytest.mark.slow
def test_model_without_chat_template_serves_generate_only(serve: Callable[..., Serve], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "plain", chat_template=False)
    run = serve("--model", str(folder), "--simulate", "fixed:2ms")
    # The first request finds out by itself that the model has no template.
    run.wait_for_line(f"serving on {run.address}")
    assert any(FIGURES.search(line) for line in run.errors)
    refused = fissile("generate", "--address", run.address, "--chat", "hello")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: FAILED_PRECONDITION: ")


@pytest.mark.slow
def test_offline_generate_with_logprobs_shows_them(simulated: str) -> None:
    options = ("--offline", simulated, "--max-tokens", "2", "--ignore-eos", "--temperature", "0")
    asked = ("--logprobs", "1", "--logprob-token-id", "5", "--prompt-logprobs", "0")
    shown = fissile("generate", *options, *asked, "hello").stderr
    found = json.loads(fissile("generate", *options, *asked, "--json", "hello").stdout)
    head, *answer = shown.partition(" answer token")[2].splitlines()[:3]
    assert head.split() == ["logprob", "rank", "most", "likely"]
    assert "prompt token" in shown
    assert [line.split()[:2] for line in answer] == [
        [str(one["token_id"]), f"{one['logprob']:.4f}"] for one in found["logprobs"]
    ]


@pytest.mark.slow
def test_offline_generates_without_a_router(simulated: str) -> None:
    options = ("generate", "--offline", simulated, "--max-tokens", "5", "--ignore-eos", "--temperature", "0")
    answer = fissile(*options, "--json", "hello")
    assert answer.returncode == 0, answer.stderr
    assert len(json.loads(answer.stdout)["token_ids"]) == 5
    refused = fissile("generate", "--offline", "/nowhere", "hello")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
