"""`fissile bench` against a real gRPC server with scripted answers, and against a fake engine."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner, Result
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from google.protobuf.duration_pb2 import Duration

from common.cli.bench import target as target_module
from common.cli.bench.command import Benchmark, bench, measure
from common.cli.bench.figures import Setting
from common.cli.bench.load import ClosedLoop, Extent, Load, OpenLoop
from common.cli.bench.machine import CpuMeter
from common.cli.bench.plan import Plan
from common.cli.bench.records import INTERRUPTED, WRONG_TOKEN_COUNT, Record
from common.cli.bench.service import Terms
from common.cli.bench.target import OnProgress, RouterTarget
from common.cli.bench.workload import RandomWorkload, Work
from common.cli.core.client import NO_CREDENTIALS
from common.cli.core.console import Console
from common.cli.core.errors import CommandError
from common.errors import EngineError
from common.params.options.types import Lengths, Numbers, Objectives
from tests.scripted_router import PartialRouter
from worker.cli.offline import OfflineRun

Respond = Callable[["Script", Any, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


def answer(request: Any, tokens: int, *, said: int | None = None, prompt: int | None = None, step: float = 0.0) -> Any:
    """Messages of one token each; the last one has the usage that `said` and `prompt` report."""
    for i in range(tokens):
        time.sleep(step)
        part = pb.GenerateResponse(token_ids=[i])
        if i == tokens - 1:
            part.finish.usage.completion_tokens = tokens if said is None else said
            part.finish.usage.prompt_tokens = len(request.token_ids.ids) if prompt is None else prompt
            part.finish.usage.cached_tokens = 3
            part.finish.worker_id, part.finish.attempts = "w", 2
            part.finish.timings.queue.CopyFrom(Duration(nanos=4_000_000))
        yield part


def well(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    return answer(request, request.sampling_params.max_tokens, step=0.002)


def one_short(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    return answer(request, request.sampling_params.max_tokens - 1)


def miscounted(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    return answer(request, request.sampling_params.max_tokens, said=1)


def another_prompt(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    return answer(request, request.sampling_params.max_tokens, prompt=1)


def no_finish(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    yield pb.GenerateResponse(token_ids=range(request.sampling_params.max_tokens))


def every_other_fails(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    # Decides by the request's own seed, because the order of concurrent requests differs between runs.
    if request.sampling_params.seed % 2:
        yield pb.GenerateResponse(token_ids=[1])
        context.abort(grpc.StatusCode.ABORTED, "worker w was lost after 1 tokens")
    yield from answer(request, request.sampling_params.max_tokens)


def gone(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")


def gone_after_three(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
    return well(script, request, context) if len(script.requests) <= 3 else gone(script, request, context)


class Script(PartialRouter):
    """A router with scripted answers that records its requests."""

    def __init__(self) -> None:
        self.respond: Respond = well
        self.requests: list[Any] = []
        self.keys: set[str] = set()

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        if request.model not in ("", "m"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"model {request.model!r} is not served here")
        return pb.GetModelResponse(model=pb.Model(name="m", max_model_len=400, vocab_size=100))

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.keys |= {str(value) for name, value in context.invocation_metadata() if name == "authorization"}
        return self.respond(self, request, context)

    def Chat(self, request: pb.ChatRequest, context: grpc.ServicerContext) -> Iterator[pb.ChatResponse]:
        self.requests.append(request)
        for part in answer(request, request.sampling_params.max_tokens, prompt=5):
            yield pb.ChatResponse(token_ids=part.token_ids, finish=part.finish)


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[Script, str]]:
    script, server = Script(), grpc.server(ThreadPoolExecutor(16))
    add_InferenceServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield script, f"127.0.0.1:{port}"
    server.stop(0).wait()


class Bench:
    """Runs `fissile bench serve` in this process."""

    def __init__(self, script: Script, address: str) -> None:
        self.script = script
        self.address = address

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(bench, ["serve", "--address", self.address, *arguments], standalone_mode=False)

    def measure(self, *arguments: str) -> dict[str, Any]:
        result = self.run("--json", "-", *arguments)
        made: dict[str, Any] = json.loads(result.stdout)
        return made


@pytest.fixture
def serve(router: tuple[Script, str]) -> Bench:
    script, address = router
    script.respond, script.requests, script.keys = well, [], set()
    return Bench(script, address)


SMALL = ("--concurrency", "4", "--requests", "8", "--output-len", "5", "--warmup", "0")


def test_closed_loop_is_measured(serve: Bench) -> None:
    made = serve.measure(*SMALL, "--api-key", "sesame")
    (row,) = made["rows"]
    assert (row["ok"], row["failed"], row["output_tokens"], row["max_in_flight"]) == (8, 0, 40, 4)
    assert row["input_tokens"] == sum(len(request.token_ids.ids) for request in serve.script.requests)
    assert (row["cached_tokens"], row["workers"], row["retried"]) == (24, {"w": 8}, 8)
    assert row["queue_ms"]["p50"] == 4.0
    assert row["itl_ms"]["count"] == 32
    assert row["ttft_ms"]["p50"] >= 2.0
    # Tokens are sent at least 2 ms apart. A delayed client reads several at once, later, but none before its time.
    assert row["ttft_ms"]["mean"] + 4 * row["tpot_ms"]["mean"] >= 10.0
    assert row["output_tokens_per_s"] == pytest.approx(40 / row["duration_s"], rel=1e-3)
    assert serve.script.keys == {"Bearer sesame"}
    assert "sesame" not in json.dumps(made)
    assert made["model"]["name"] == "m"


def test_bench_requests_match_options(serve: Bench) -> None:
    serve.run(*SMALL, "--input-len", "4:6", "--prefix-len", "7", "--temperature", "0.5", "--top-k", "3", "--seed", "9")
    params = [request.sampling_params for request in serve.script.requests]
    assert {(each.max_tokens, each.ignore_eos, each.temperature, each.top_k) for each in params} == {(5, True, 0.5, 3)}
    assert {each.seed for each in params} == set(range(9, 17))
    assert not any(each.HasField("top_p") for each in params)
    prompts = [tuple(request.token_ids.ids) for request in serve.script.requests]
    assert {len(prompt) for prompt in prompts} == {11, 12, 13}
    assert len({prompt[:7] for prompt in prompts}) == 1
    assert len({prompt[7:] for prompt in prompts}) == 8


def test_each_bench_row_has_warm_up_and_distinct_prompts(serve: Bench) -> None:
    made = serve.measure("--concurrency", "1,2", "--requests", "3", "--repeat", "2", "--output-len", "1")
    assert [(row["setting"]["concurrency"], row["repeat"]) for row in made["rows"]] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert [row["ok"] for row in made["rows"]] == [3] * 4
    prompts = [tuple(request.token_ids.ids) for request in serve.script.requests]
    assert len(prompts) == len(set(prompts)) == 4 * (2 + 3)
    # Warm-ups and rows alternate, each with its own cache salt.
    salts = [salt for salt, _ in itertools.groupby(request.cache_salt for request in serve.script.requests)]
    assert len(salts) == len(set(salts)) == 8
    assert [(each["setting"]["concurrency"], each["repeats"]) for each in made["overviews"]] == [(1, 2), (2, 2)]


def test_bench_runs_use_distinct_cache_salts(serve: Bench) -> None:
    for _ in range(2):
        serve.run(*SMALL)
    first, second = serve.script.requests[:8], serve.script.requests[8:]
    prompts = [{tuple(request.token_ids.ids) for request in requests} for requests in (first, second)]
    assert prompts[0] == prompts[1]
    salts = [{request.cache_salt for request in requests} for requests in (first, second)]
    assert [len(each) for each in salts] == [1, 1]
    assert salts[0] != salts[1]


def test_open_loop_sends_regardless_of_answers(serve: Bench) -> None:
    """Answers take 50 ms at 100 requests/s, so about five requests are in flight."""
    made = serve.measure(
        "--rate", "100", "--burstiness", "inf", "--requests", "20", "--output-len", "25", "--warmup", "0"
    )
    (row,) = made["rows"]
    assert (row["ok"], row["setting"]) == (20, {"concurrency": None, "rate": 100.0, "burstiness": "inf"})
    assert row["max_in_flight"] >= 4
    assert row["duration_s"] >= 0.2 + 0.05
    assert row["send_lag_ms"]["count"] == 20


def test_duration_ends_a_row(serve: Bench) -> None:
    began = time.monotonic()
    made = serve.measure("--concurrency", "2", "--duration", "100ms", "--output-len", "5", "--warmup", "0")
    # The row's own duration ends with its last answer, which may arrive shortly before the limit.
    assert time.monotonic() - began >= 0.1
    (row,) = made["rows"]
    assert row["ok"] == len(serve.script.requests) >= 2
    assert made["options"]["requests"] == [None]


@pytest.mark.parametrize(
    ("respond", "failed", "status", "message"),
    [
        (one_short, 8, WRONG_TOKEN_COUNT, "4 tokens came, 5 were asked for"),
        (miscounted, 8, WRONG_TOKEN_COUNT, "5 tokens came, the service counted 1"),
        (another_prompt, 8, WRONG_TOKEN_COUNT, "the service counted 1 prompt tokens, 7 were sent"),
        (no_finish, 8, WRONG_TOKEN_COUNT, "5 tokens came, the service counted 0"),
        (every_other_fails, 4, "ABORTED", "worker w was lost after 1 tokens"),
    ],
)
def test_failed_bench_requests_are_reported_and_excluded(
    serve: Bench, tmp_path: Path, respond: Respond, failed: int, status: str, message: str
) -> None:
    serve.script.respond, file = respond, tmp_path / "out.json"
    result = serve.run(*SMALL, "--input-len", "7", "--json", str(file))
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == 1
    assert str(result.exception) == f"{failed} of 8 requests failed: {failed} {status}: {message}"
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["ok"], row["output_tokens"]) == (8 - failed, (8 - failed) * 5)
    assert row["failures"] == [{"status": status, "count": failed, "first_message": message}]
    assert result.stdout.startswith("LOAD")


@pytest.mark.parametrize(("concurrency", "respond"), [(1, gone_after_three), (4, gone)])
def test_bench_stops_early_when_service_is_unavailable(serve: Bench, concurrency: int, respond: Respond) -> None:
    """Stops after 100 failures in a row and the requests in flight with the last; a late answer would restart the
    count."""
    serve.script.respond = respond
    result = serve.run("--concurrency", str(concurrency), "--duration", "600s", "--output-len", "2", "--warmup", "0")
    assert isinstance(result.exception, CommandError)
    told = re.fullmatch(r"(\d+) of \d+ requests failed: \1 UNAVAILABLE: no worker", str(result.exception))
    assert told is not None
    assert 100 <= int(told[1]) < 100 + concurrency


def test_bench_sends_data_set_in_order(serve: Bench, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(
        '{"prompt": "Once", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "hi"}]}\n{"token_ids": [4, 2]}'
    )
    made = serve.measure("--dataset", str(file), "--concurrency", "1", "--requests", "4", "--warmup", "0")
    assert (made["rows"][0]["ok"], made["rows"][0]["output_tokens"]) == (4, 3 + 64 + 64 + 3)
    text, chat, ids, again = serve.script.requests
    assert (text.text, chat.messages[0].content, list(ids.token_ids.ids)) == ("Once", "hi", [4, 2])
    assert again.text == "Once"
    assert (made["options"]["dataset"], made["options"]["input_len"]) == (str(file), None)


DOCUMENTED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
# Objects with free field names: workers, metrics, engine options.
OPEN_ENDED = ("rows[].workers", "options.sampling", "options.slo_ms", "environment.versions")


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all values in a JSON value; a summary or spread is one value."""
    if isinstance(value, dict) and path not in OPEN_ENDED and not {"p99", "median"} & value.keys():
        for name, each in value.items():
            yield from paths(each, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from paths(value[0], f"{path}[]")
    else:
        yield path


def test_bench_json_fields_equal_documented_fields(serve: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only offline runs have draft counts.
    counts = itertools.count(1)
    monkeypatch.setattr(RouterTarget, "draft_counts", lambda _self: [(next(counts), 1)])
    serve.script.respond = every_other_fails
    made = serve.measure(*SMALL, "--slo", "ttft=1s")
    text = (Path(__file__).resolve().parents[5] / "docs" / "how-to" / "bench.md").read_text(encoding="utf-8")
    documented = {name for name in DOCUMENTED.findall(text) if not name.startswith("options.engine")}
    assert set(paths(made)) == documented
    assert f'"{made["schema"]}"' in text
    assert f"version {made['version']}" in text


def test_bench_shows_progress_on_terminal(
    serve: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of a run and later: answers of the second row wait for that line after their first token."""
    monkeypatch.setattr(target_module, "PROGRESS_EVERY_S", 0.01)
    goes_on, spin = threading.Event(), Console.spin

    def spin_and_note(console: Console, text: str) -> None:
        spin(console, text)
        if re.fullmatch(r"c=2, 2 of 2: 0 done, 2 in flight, 2 tokens", text):
            goes_on.set()

    def waits(script: Script, request: Any, context: grpc.ServicerContext) -> Any:
        for number, part in enumerate(answer(request, request.sampling_params.max_tokens)):
            assert number == 0 or len(script.requests) <= 4 or goes_on.wait(60)
            yield part

    monkeypatch.setattr(Console, "spin", spin_and_note)
    serve.script.respond = waits
    target = RouterTarget(serve.address, NO_CREDENTIALS, Terms())
    wanted = plan(concurrency=(2,), requests=4, warmup=0, repeat=2, output_len=Lengths(3, 3))
    try:
        measured = Benchmark(wanted, target, wanted.workload("m", 100, 400), Console(terminal=True))
        measured.run()
    finally:
        target.close()
    assert [row.ok for row in measured.rows] == [4, 4]
    shown = capsys.readouterr().err
    assert "c=2, 1 of 2: 0 done, 2 in flight, 0 tokens" in shown
    assert "c=2, 2 of 2: 0 done, 2 in flight, 2 tokens" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1", "--rate", "2"], "--concurrency is a closed loop and --rate an open one"),
        (["--burstiness", "2"], "--burstiness is of an open loop"),
        (["--rate", "2", "--burstiness", "-1"], "burstiness is -1.0; valid: a number above 0"),
        (["--duration", "0s"], "duration is 0.0 s; valid: above 0"),
        (["--temperature", "-1"], "sampling_params.temperature is -1.0"),
        (["--dataset", "x", "--input-len", "3"], "--input-len is of random prompts"),
        (["--dataset", "x", "--prefix-len", "3"], "--prefix-len is of random prompts"),
        (["--json", "/nowhere/out"], "--json /nowhere/out cannot be written"),
        (["--dataset", "/nowhere"], "--dataset /nowhere cannot be read: No such file"),
        (["--input-len", "300:350"], "come to 414 tokens; valid: at most 400, the length of m"),
        (["--model", "other"], "NOT_FOUND: model 'other' is not served here"),
    ],
)
def test_bench_refuses_unmeasurable_load_before_first_request(serve: Bench, arguments: list[str], message: str) -> None:
    result = serve.run(*arguments)
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)
    assert (result.stdout, serve.script.requests) == ("", [])


def test_bench_without_router_says_how_to_start_one() -> None:
    with pytest.raises(
        CommandError, match=r"no router can be reached at 127\.0\.0\.1:1 .*`fissile serve` starts one"
    ) as no:
        RouterTarget("127.0.0.1:1", NO_CREDENTIALS, Terms())
    assert no.value.exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "'1,x' is not a list of whole numbers above 0; use for example 1,8,32"),
        (["--concurrency", "1.5"], "not a list of whole numbers"),
        (["--concurrency", "0"], "not a list of whole numbers above 0"),
        (["--concurrency", "1,1"], "names a number twice"),
        (["--rate", "inf"], "'inf' is not a list of numbers above 0"),
        (["--input-len", "9:3"], "is not a range of lengths; use LOW:HIGH"),
        (["--slo", "ttft=200ms,speed=1s"], "'speed=1s' is not an objective; use ttft, tpot, itl, latency"),
        (["--slo", "ttft=fast"], "'fast' is not a duration"),
        (["--duration", "1d"], "'1d' is not a duration"),
        (["--requests", "0"], "'--requests'"),
    ],
)
def test_bench_refuses_invalid_option_value(serve: Bench, arguments: list[str], message: str) -> None:
    result = serve.run(*arguments)
    assert isinstance(result.exception, click.UsageError)
    assert message in result.exception.format_message()


def test_lists_of_an_option() -> None:
    assert Numbers(int).convert("1,8,32", None, None) == (1, 8, 32)
    assert Numbers(float).convert("0.5", None, None) == (0.5,)
    assert Objectives().convert("ttft=200ms, tpot=0.05", None, None) == {"ttft": 0.2, "tpot": 0.05}


def plan(**given: Any) -> Plan:
    absent = dict.fromkeys(
        ("concurrency", "rate", "burstiness", "duration", "requests", "input_len", "prefix_len", "dataset", "slo"),
    )
    others = {"warmup": 2, "repeat": 1, "output_len": Lengths(64, 64), "seed": 0, "ignore_eos": True}
    sampling = dict.fromkeys(("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"))
    return Plan.of(**{**absent, **others, **sampling, "temperature": 0.0, "json_file": None, "details": None, **given})


def test_how_many_requests_a_row_has() -> None:
    closed, opened = plan(), plan(rate=(0.1, 4.0))
    assert [closed.requests_of(setting) for setting in closed.settings] == [10, 32, 128]
    assert [opened.requests_of(setting) for setting in opened.settings] == [10, 120]
    assert [plan(requests=7).requests_of(setting) for setting in closed.settings] == [7] * 3
    assert [plan(duration=1.0).requests_of(setting) for setting in closed.settings] == [None] * 3
    assert opened.settings == (Setting(rate=0.1, burstiness=1.0), Setting(rate=4.0, burstiness=1.0))
    assert plan(rate=(1.0,), burstiness=math.inf).settings[0].burstiness == math.inf


class Rows:
    """A target that answers `runs` runs and calls `last` in the next one."""

    mode = "rows"

    def __init__(self, runs: int, last: Callable[[], None], status: str = "OK") -> None:
        self.model: dict[str, Any] = {"name": "m", "vocab_size": 10, "max_model_len": 400}
        self.meter = CpuMeter()
        self.closed = False
        self._left, self._last, self._status = runs, last, status

    def run(self, load: Load, work_of: Callable[[int], Work], on_progress: OnProgress) -> list[Record]:
        if self._left == 0:
            self._last()
            return []
        self._left -= 1
        return [Record(0, 0.0, 0.0, ended=1.0, status=self._status, message="no\nluck")]

    def stop(self) -> None:
        pass

    def draft_counts(self) -> list[tuple[int, int]]:
        return []

    def close(self) -> None:
        self.closed = True


def fail() -> None:
    raise CommandError("the engine failed: rank 1 has ended", 1)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_rows_before_failure_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    target = Rows(2, fail)
    with pytest.raises(CommandError, match="rank 1 has ended"):
        measure(plan(concurrency=(1, 2, 4), warmup=0, json_file=str(file)), target, {})
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [["c=1", "1"], ["c=2", "1"]]
    assert [row["ok"] for row in json.loads(file.read_text())["rows"]] == [1, 1]
    assert target.closed


def test_ctrl_c_reports_failures_and_drops_empty_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert measure(plan(concurrency=(1, 2), warmup=0), Rows(1, interrupt, "ABORTED"), {}) == 130
    told = capsys.readouterr()
    assert "c=2" not in told.out
    assert "warning: 1 of 1 requests failed: 1 ABORTED: no luck\ninterrupted: " in told.err


def test_failures_of_a_warm_up_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    measure(plan(concurrency=(2,)), Rows(1, lambda: None, "ABORTED"), {})
    said = "warning: c=2: 1 of 1 requests of the warm-up failed: 1 ABORTED: no luck\n"
    assert said in capsys.readouterr().err


def test_long_prompts_are_made_during_row() -> None:
    asked: list[int] = []

    class Long(RandomWorkload):
        def work(self, round_: int, index: int) -> Work:
            asked.append(index)
            return Work(1, token_ids=range(1 << 20))

    work_of = Benchmark(plan(), Rows(0, fail), Long(0, 10, Lengths(1, 1), Lengths(1, 1)))._prepared(0, 100)
    assert asked == [0, 1]
    work_of(1), work_of(7)
    assert asked == [0, 1, 7]


def test_load_stopped_before_start_sends_no_request(serve: Bench) -> None:
    target = RouterTarget(serve.address, NO_CREDENTIALS, Terms())
    try:
        target.stop()
        records = target.run(ClosedLoop(2, Extent(4)), lambda i: Work(1, token_ids=[1]), lambda records, running: None)
    finally:
        target.close()
    assert (records, serve.script.requests) == ([], [])


class Steps:
    """A fake engine: each step takes 1 s of a fake clock and gives every request one token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.live: dict[str, list[Any]] = {}
        self.most = 0
        self.aborted: list[str] = []

    def add_request(
        self, prompt: Any, sampling_params: dict[str, Any], *, request_id: str, stream_callback: Callable[[Any], None]
    ) -> str:
        if len(prompt) == 13:
            raise EngineError("no luck")
        self.live[request_id] = [prompt, sampling_params["max_tokens"], 0, stream_callback]
        return request_id

    def step(self) -> list[dict[str, Any]]:
        self.now += 1.0
        self.most = max(self.most, len(self.live))
        ended = []
        for request_id, request in list(self.live.items()):
            request[2] += 1
            request[3](SimpleNamespace(output_tokens=[1]))
            if request[2] == request[1]:
                del self.live[request_id]
                ended.append(
                    {"request_id": request_id, "num_tokens_input": len(request[0]), "num_tokens_output": request[2]}
                )
        return ended

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.live.pop(request_id, None) is not None

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def offline_run(engine: Steps, load: ClosedLoop | OpenLoop, work: Callable[[int], Work], **others: Any) -> OfflineRun:
    return OfflineRun(load, work, engine, Terms(), "t", clock=lambda: engine.now, sleep=engine.sleep, **others)


def test_offline_bench_keeps_concurrency() -> None:
    engine = Steps()
    records = offline_run(engine, ClosedLoop(2, Extent(4)), lambda i: Work(3, token_ids=[1] * (i + 1))).run()
    assert engine.most == 2
    assert [(r.sent, r.ended, r.ttft, r.tpot, r.input_tokens) for r in records] == [
        (0.0, 3.0, 1.0, 1.0, 1),
        (0.0, 3.0, 1.0, 1.0, 2),
        (3.0, 6.0, 1.0, 1.0, 3),
        (3.0, 6.0, 1.0, 1.0, 4),
    ]


def test_offline_arrival_within_step_keeps_intended_time() -> None:
    engine = Steps()
    records = offline_run(engine, OpenLoop(iter([0.25] * 9), Extent(3)), lambda i: Work(2, token_ids=[1])).run()
    assert [(r.intended, r.sent, r.ttft) for r in records] == [(0.25, 0.25, 1.0), (0.5, 1.25, 1.75), (0.75, 1.25, 1.5)]


def test_request_refused_by_engine_counts_as_failed() -> None:
    engine = Steps()
    records = offline_run(engine, ClosedLoop(1, Extent(3)), lambda i: Work(1, token_ids=[1] * (12 + i))).run()
    assert [record.status for record in records] == ["OK", "INTERNAL", "OK"]
    assert records[1].message == "no luck"


def test_stopped_offline_run_aborts_requests_in_flight() -> None:
    engine = Steps()

    def stop() -> None:
        if engine.now == 2.0:
            run.stop()

    run = offline_run(engine, ClosedLoop(2, Extent(9)), lambda i: Work(2 + i, token_ids=[1]), on_step=stop)
    records = run.run()
    assert [record.status for record in records] == ["OK", INTERRUPTED]
    assert engine.aborted == ["t-1"]
    assert not engine.has_unfinished()


def test_stop_ends_a_long_pause() -> None:
    engine = Steps()

    def stop() -> None:
        run.stop()

    run = offline_run(engine, OpenLoop(iter([100.0] * 9), Extent(3)), lambda i: Work(1), on_step=stop)
    assert run.run() == []
    assert engine.now <= 0.2
