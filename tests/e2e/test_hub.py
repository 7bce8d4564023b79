"""Every way to run a model takes its name on the Hub; the hub is a fake one on loopback."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.e2e.service import free_port
from tests.fake_dns import wait_until
from tests.fake_hub import FakeHub, FakeRepo, digest, fake_hub

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "unit" / "worker" / "config" / "recorded_tokenizers.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with fake_hub() as served:
        served.repos["org/tiny"] = FakeRepo({"main": {path.name: path.read_bytes() for path in folder.iterdir()}})
        served.repos["org/gated"] = FakeRepo({"main": {"config.json": b"{}", "a.safetensors": b""}}, gated=True)
        yield served


def start(hub: FakeHub, home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "common.cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fissile(hub: FakeHub, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(hub, home, *arguments, **environment)
    try:
        out, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


@pytest.mark.slow
def test_offline_answers_as_from_the_folder(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", "5", "--ignore-eos", "--temperature", "0", "--json", "hello")
    answers = [fissile(hub, tmp_path, "generate", "--offline", model, *options) for model in ("org/tiny", str(folder))]
    tokens = [json.loads(answer.stdout)["token_ids"] for answer in answers]
    assert len(tokens[0]) == 5
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_serve_downloads_once_for_its_workers(hub: FakeHub, tmp_path: Path) -> None:
    port = str(free_port())
    options = ("--workers", "2", "--once", "--simulate", "instant", "--port", port)
    done = fissile(hub, tmp_path, "serve", "--model", "org/tiny", *options)
    assert done.returncode == 0, done.stderr
    assert "model           tiny from" in done.stderr + done.stdout
    # Simulated workers need no weights.
    assert "tokenizer.json" in hub.downloaded()
    assert "model.safetensors" not in hub.downloaded()
    assert sum(line.endswith("tokenizer.json") and line.startswith("GET") for line in hub.requested) == 1


@pytest.mark.slow
def test_model_with_sentence_pieces_alone_is_served(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if "token" not in path.name}
    recorded = json.loads(RECORDED.read_text("utf-8"))
    files["tokenizer.model"] = base64.b64decode(recorded["files"]["bpe"])
    hub.repos["org/pieces"] = FakeRepo({"main": files})
    done = fissile(
        hub, tmp_path, "serve", "org/pieces", "--once", "--port", str(free_port()), "--prompt", "hello world"
    )
    assert done.returncode == 0, done.stderr
    ids = recorded["ids"]["bpe"][recorded["texts"].index("hello")]
    answer = fissile(hub, tmp_path, "generate", "--offline", "org/pieces", "--max-tokens", "3", "--json", "hello")
    # One more: the token that begins a text.
    assert json.loads(answer.stdout)["num_tokens_input"] == len(ids) + 1


@pytest.mark.parametrize("command", slow_but({"serve"}, ["worker", "serve"]))
def test_hub_refusal_is_one_line(hub: FakeHub, tmp_path: Path, command: str) -> None:
    done = fissile(hub, tmp_path, command, "--model", "org/gated", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: org/gated is gated: accept its terms on ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_unknown_kv_cache_dtype_is_refused(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    done = fissile(hub, tmp_path, "worker", "--model", str(folder), "--port", "0", "--kv-cache-dtype", "fp4")
    assert done.returncode == 2
    assert "kv_cache_dtype is 'fp4'; valid: auto, bfloat16, float16, fp8" in done.stderr


def test_pull_list_and_rm_name_the_commit(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/other"] = FakeRepo(
        {"main": {"config.json": b'{"architectures": ["GPT2LMHeadModel"]}', "model.safetensors": b"", "a.bin": b"b"}}
    )
    commit = hub.repos["org/tiny"].commit("main")
    assert commit is not None
    pulled = fissile(hub, tmp_path, "pull", "org/tiny")
    name, folder = pulled.stdout.splitlines()
    assert (pulled.returncode, name) == (0, f"org/tiny@{commit}")
    assert (Path(folder) / "model.safetensors").is_file()
    assert fissile(hub, tmp_path, "pull", "org/other", "--include", "*.bin").returncode == 0
    assert "a.bin" in hub.downloaded()
    # Without the network, by the commit.
    assert fissile(hub, tmp_path, "pull", name, HF_HUB_OFFLINE="1").stdout == pulled.stdout
    listed = json.loads(fissile(hub, tmp_path, "list", "--json").stdout)
    assert [(row["name"], row["architecture"], row["revision"] == commit) for row in listed] == [
        ("org/other", "GPT2LMHeadModel", False),
        ("org/tiny", "Qwen3ForCausalLM", True),
    ]
    assert "GPT2LMHeadModel" in listed[0]["served"]
    assert listed[1]["served"] == "yes"
    removed = json.loads(fissile(hub, tmp_path, "rm", name, "--json").stdout)
    assert removed["removed"] == [commit]
    assert removed["freed_bytes"] == listed[1]["size"]
    rows = fissile(hub, tmp_path, "list").stdout.splitlines()
    assert rows[0].split() == ["MODEL", "REVISION", "SIZE", "ARCHITECTURE", "SERVED"]
    assert [row.split()[0] for row in rows[1:]] == ["org/other"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pull", "org/gone"], "org/gone is neither a path here nor a model on "),
        (
            ["pull", "./tiny"],
            "'./tiny' cannot be a name on the Hub; valid: org/name, org/name:Q4_K_M, org/name@revision",
        ),
        (["pull", "org/tiny@a", "--revision", "b"], "--revision b and org/tiny@a: name one revision"),
        (["pull", "org/tiny:a", "--file", "b"], "--file b and org/tiny:a: name one file"),
        (["rm", "org/tiny"], "org/tiny is not in the cache; `fissile list` shows what is"),
        (["serve", "org/tiny", "--model", "a"], "org/tiny and --model a: name one model"),
    ],
)
def test_hub_command_that_cannot_be_done_is_one_line(
    hub: FakeHub, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = fissile(hub, tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {said}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "arguments", "wanted"),
    [
        pytest.param(signal.SIGINT, ("pull",), ("config.json", "model.safetensors"), id="weights"),
        pytest.param(signal.SIGTERM, ("serve", "--simulate", "instant"), ("config.json",), id="configuration"),
    ],
)
def test_signal_ends_a_download_at_once(
    hub: FakeHub, tmp_path: Path, number: int, arguments: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    hub.held = threading.Event()
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    hub.repos["org/held"] = FakeRepo({"main": files})
    with start(hub, tmp_path, *arguments, "org/held") as process:
        try:
            wait_until(lambda: len(list(tmp_path.rglob("*.incomplete"))) == len(wanted))
            process.send_signal(number)
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
            hub.held.set()
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "error: the download was interrupted; the next one continues it"
    kept = {f"{digest(file, files[file])}.incomplete" for file in wanted}
    assert {path.name for path in tmp_path.rglob("*.incomplete")} == kept
