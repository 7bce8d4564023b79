"""One line for every request that ends, however it ends: the router in this process, scripted workers, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import LogCapture

from common.limits import MAX_REQUEST_ID_BYTES
from common.rpc.api_keys import Role, new_key
from common.rpc.auth import KeyAccess
from common.rpc.key_store import KeyStore
from common.telemetry import names
from common.telemetry.logs import current_request_id, current_trace_id
from router.api.answer_call import AnswerCall
from router.api.tenants import TenantPolicy
from router.scheduling.failover import FailoverOptions, FailoverPolicy
from router.security import RouterSecurity
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import (
    FILES,
    SMALL_WINDOW,
    Bench,
    bench,
    collect,
    draining_process,
    error_of,
    heeds,
    log_of,
    miss_deadline,
    request,
    until,
)
from tests.e2e.router_bench import running as running_streams
from tests.e2e.worker_bench import ENDLESS, options, running
from tests.e2e.worker_bench import request as direct
from tests.e2e.worker_client import make_model_folder
from tests.otlp_receiver import OtlpReceiver, ReceivedPoint
from worker.server import Worker

GENERATE = "fissile.v1.InferenceService/Generate"
TRACE = "0af7651916cd43dd8448eb211c80319c"
METADATA = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)
PHASES = ("queue_ms", "prefill_ms", "decode_ms")

Line = MutableMapping[str, Any]


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    """The lines of requests that have ended, in order."""
    capture = LogCapture()
    before = structlog.get_config()
    structlog.configure(processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0))
    yield capture.entries
    structlog.configure(**before)


def ended(lines: list[Line], *, level: str | None = None, **wanted: Any) -> list[Line]:
    """The lines of ended requests whose fields are these, of all levels but debug if no level is named."""
    return [
        line
        for line in lines
        if line["event"] == "request ended"
        and (line["log_level"] != "debug" if level is None else line["log_level"] == level)
        and all(line.get(name) == value for name, value in wanted.items())
    ]


async def line_of(lines: list[Line], **wanted: Any) -> Line:
    """The one line with these fields, once it is there."""
    await until(lambda: ended(lines, **wanted))
    (line,) = ended(lines, **wanted)
    return line


async def test_finished_request_line_has_every_field(lines: list[Line]) -> None:
    """One line has model, tenant, peer, tokens, times, attempts and exactness, and no content."""
    metadata = (*METADATA, ("x-fissile-tenant", "gold"))
    async with bench(FakeWorker(FILES, answer=short)) as b:
        await collect(b.stub.Generate(request("secret", request_id="r1"), metadata=metadata))
        line = await line_of(lines, request_id="r1")
    assert line["log_level"] == "info"
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert {name: line[name] for name in ("method", "status", "reason", "model", "tenant", "trace_id")} == {
        "method": GENERATE, "status": "OK", "reason": "stop", "model": "m", "tenant": "gold", "trace_id": TRACE,
    }  # fmt: skip
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "attempts", "exact", "worker_id")
    assert [line[name] for name in counts] == [6, 5, 3, 1, True, "w0"]
    assert sum(line[name] for name in PHASES) == pytest.approx(line["duration_ms"], abs=0.05)
    assert line["ttft_ms"] == pytest.approx(line["queue_ms"] + line["prefill_ms"], abs=0.05)
    assert line["tpot_ms"] >= 0
    assert "secret" not in str(line)
    assert "hello" not in str(line)


async def test_unfinished_request_line_counts_delivered_tokens(lines: list[Line]) -> None:
    """Requests are cancelled, or pass their deadline while they run or wait."""
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        cancelled = b.stub.Generate(request(request_id="cancelled", params={"max_tokens": 4000}))
        parts: list[Any] = [await cancelled.read(), await cancelled.read()]
        got = sum(len(part.token_ids) for part in parts)
        cancelled.cancel()
        line = await line_of(lines, request_id="cancelled")
        assert line["status"] == "CANCELLED"
        assert line["completion_tokens"] >= got
        assert (line["prompt_tokens"], line["attempts"], line["worker_id"]) == (3, 1, "w0")
        worker.step_s = 0.05
        timeout_s = await miss_deadline(
            lambda timeout_s: b.stub.Generate(
                request(request_id=f"late {timeout_s}", params={"max_tokens": 4000}), timeout=timeout_s
            ),
            lambda: any(stream.written_tokens for stream in running_streams(b.router)),
        )
        line = await line_of(lines, request_id=f"late {timeout_s}")
        assert line["status"] == "DEADLINE_EXCEEDED"
        assert line["completion_tokens"] > 0


async def test_log_line_of_queued_request_has_no_tokens(lines: list[Line]) -> None:
    """The deadline passes in the router's queue."""
    async with bench(FakeWorker(FILES, room_seqs=0, decoding=1)) as b:
        timeout_s = await miss_deadline(
            lambda timeout_s: b.stub.Generate(request(request_id=f"waits {timeout_s}"), timeout=timeout_s),
            lambda: len(b.router.dispatcher),
        )
        line = await line_of(lines, request_id=f"waits {timeout_s}")
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == ("DEADLINE_EXCEEDED", 3, 0)
    assert line["queue_ms"] == line["duration_ms"] > 0
    assert not {"ttft_ms", "prefill_ms", "worker_id"} & set(line)


@pytest.mark.parametrize(
    ("asked", "status", "wanted"),
    [
        (request(params={"top_p": 0}), "INVALID_ARGUMENT", {"fields": ["sampling_params.top_p"]}),
        (
            request(params={"constraint": {"regex": "a"}}),
            "UNIMPLEMENTED",
            {"fields": ["sampling_params.constraint"]},
        ),
        (request("x" * 9000), "OUT_OF_RANGE", {"fields": ["text"]}),
        (request(model="nobody"), "NOT_FOUND", {"reason": "UNKNOWN_MODEL", "model": "nobody"}),
        (request(request_id="\x1b[31m" + "x" * MAX_REQUEST_ID_BYTES), "INVALID_ARGUMENT", {"fields": ["request_id"]}),
    ],
)
async def test_log_line_of_refusal_has_field_and_reason(
    lines: list[Line], asked: pb.GenerateRequest, status: str, wanted: dict[str, Any]
) -> None:
    """The line has no contents and no terminal escapes."""
    async with bench() as b:
        error = await error_of(b.stub.Generate(asked))
        line = await line_of(lines, status=status)
    assert line["status"] == error.code().name
    assert {name: line[name] for name in wanted} == wanted
    assert line["request_id"].isprintable()
    assert len(line["request_id"]) <= 512
    assert "xxxxx" not in str({**line, "request_id": ""})


async def test_limit_and_duplicate_refusals_have_log_lines(lines: list[Line]) -> None:
    """Both are refused after validation, and each call has one line."""
    async with bench(tenants=TenantPolicy(concurrency=1)) as b:
        running = b.stub.Generate(request(request_id="one", params={"max_tokens": 4000}))
        await running.read()
        await error_of(b.stub.Generate(request(request_id="two")))
        assert (await line_of(lines, request_id="two"))["reason"] == "TENANT_LIMIT"
        await error_of(b.stub.Generate(request(request_id="one")))
        assert (await line_of(lines, request_id="one"))["reason"] == "DUPLICATE_REQUEST_ID"
        running.cancel()
        await until(lambda: ended(lines, request_id="one", status="CANCELLED"))


async def test_callers_are_named_by_their_key_and_strangers_by_their_address(lines: list[Line]) -> None:
    """An audit needs the name of the key, never the key or its hash."""
    shown, kept = new_key("billing", "gold", [Role.INFER])
    security = RouterSecurity(access=KeyAccess(KeyStore(None, [kept.line()])))
    async with bench(security=security, start=False) as b:
        key = (("authorization", f"Bearer {shown}"),)
        await until(lambda: b.ready_workers() == 1)
        await collect(b.stub.Generate(request(request_id="mine"), metadata=key))
        line = await line_of(lines, request_id="mine")
        assert (line["key"], line["tenant"]) == ("billing", "gold")
        await error_of(b.stub.Generate(request("secret"), metadata=METADATA))
        await error_of(b.stub.Tokenize(pb.TokenizeRequest(text="secret"), metadata=(("authorization", "Bearer no"),)))
        strangers = [await line_of(lines, reason=reason) for reason in ("API_KEY_MISSING", "API_KEY_INVALID")]
    assert [line["method"] for line in strangers] == [GENERATE, "fissile.v1.InferenceService/Tokenize"]
    assert {line["status"] for line in strangers} == {"UNAUTHENTICATED"}
    assert strangers[0]["trace_id"] == TRACE
    assert all("peer" in line and "key" not in line for line in strangers)
    everything = str(lines)
    assert not [text for text in (shown, kept.line().split()[-1], "secret") if text in everything]


async def raw(b: Bench, method: str, message: bytes | None = None) -> grpc.StatusCode:
    """The status of a call whose message is these bytes; None for no message."""
    call: Any
    if message is None:
        call = b.channel.stream_stream(f"/{method}")(timeout=60.0)
        await call.done_writing()
    else:
        # Not written by itself: the call may have ended before that, and then gRPC gives it a status of its own.
        multi: Any = b.channel.unary_stream(f"/{method}")
        call = multi(message, timeout=60.0)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await collect(call)
    return await call.code()  # type: ignore[no-any-return]


def late_lines(lines: list[Line]) -> list[Line]:
    return ended(lines, method=GENERATE, status="DEADLINE_EXCEEDED")


async def test_unparsable_request_has_log_line(lines: list[Line]) -> None:
    """The request is not a message, has no message, or names an unknown method."""
    async with bench() as b:
        assert await raw(b, GENERATE, b"\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
        assert await raw(b, "fissile.v1.InferenceService/Chat") is grpc.StatusCode.INVALID_ARGUMENT
        assert await raw(b, "fissile.v1.Other/Nothing", b"") is grpc.StatusCode.UNIMPLEMENTED
        for timeout_s in (1.0, 5.0, 25.0):
            silent: Any = b.channel.stream_stream("/" + GENERATE)(timeout=timeout_s)
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            # On a busy machine a deadline may pass before the router has accepted the call.
            with contextlib.suppress(AssertionError):
                await until(lambda: late_lines(lines), timeout_s)
                break
        assert (await line_of(lines, method=GENERATE, reason="MALFORMED_REQUEST"))["status"] == "INVALID_ARGUMENT"
        assert (await line_of(lines, reason="MALFORMED_REQUEST", method="fissile.v1.InferenceService/Chat"))["peer"]
        assert (await line_of(lines, method="fissile.v1.Other/Nothing"))["status"] == "UNIMPLEMENTED"
        assert late_lines(lines)[0]["duration_ms"] > 0


async def test_calls_without_answers_are_logged_only_on_failure(lines: list[Line]) -> None:
    """Tokenize, ListModels and probes are logged at debug."""
    async with bench() as b:
        await b.stub.Tokenize(pb.TokenizeRequest(text="say"))
        await b.stub.ListModels(pb.ListModelsRequest())
        await b.health()
        stub = health_pb2_grpc.HealthStub(b.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        watch.cancel()
        await error_of(stub.Check(health_pb2.HealthCheckRequest(service="nobody")))
        quiet = ["InferenceService/Tokenize", "InferenceService/ListModels", "Health/Check", "Health/Watch"]
        await until(lambda: {line["method"].partition(".v1.")[2] for line in ended(lines, level="debug")} >= {*quiet})
        failed = await line_of(lines, status="NOT_FOUND")
        assert failed["method"] == "grpc.health.v1.Health/Check"
        assert ended(lines) == [failed]
        await error_of(b.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1 << 20])))
        assert (await line_of(lines, status="INVALID_ARGUMENT"))["method"] == "fissile.v1.InferenceService/Detokenize"


async def test_slow_client_log_line_counts_delivered_tokens(lines: list[Line]) -> None:
    """Dropped tokens do not count as delivered."""
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, max_unread_tokens=20_000) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(request_id="slow", params={"max_tokens": 700_000}))
        await slow.read()
        line = await line_of(lines, request_id="slow")
        assert (line["status"], line["reason"]) == ("RESOURCE_EXHAUSTED", "SLOW_CLIENT")
        got = line["completion_tokens"]
        parts = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await slow.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert 0 < got <= 40_000


async def test_lost_worker_log_lines_share_ids_with_requests(lines: list[Line]) -> None:
    """`attempt lost` names the request and its trace; a stream that breaks after tokens is one line."""
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.3)) as b:
        calls = [
            b.stub.Generate(request(request_id=f"r{i}", params={"max_tokens": 4000}), metadata=METADATA)
            for i in range(2)
        ]
        for call in calls:
            await call.read()
        await worker.stop()
        for call in calls:
            assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        for i in range(2):
            line = await line_of(lines, request_id=f"r{i}")
            assert (line["status"], line["reason"], line["attempts"]) == ("ABORTED", "WORKER_LOST", 1)
            assert line["completion_tokens"] > 0
            assert line["trace_id"] == TRACE
    lost = [line for line in lines if line["event"] == "attempt lost"]
    assert {(line["request_id"], line["trace_id"]) for line in lost} == {("r0", TRACE), ("r1", TRACE)}


async def test_request_log_lines_carry_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line about one request has its ids; a line about a decision on all requests has none."""
    seen: dict[str, tuple[str, str]] = {}

    def look(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any) -> Any:
            seen[name] = (current_request_id.get(), current_trace_id.get())
            return function(*arguments)

        return looked

    async with bench() as b:
        monkeypatch.setattr(b.router.requests, "open", look("open", b.router.requests.open))
        running = b.router.requests.running
        monkeypatch.setattr(running, "submit", look("submit", running.submit))
        await collect(b.stub.Generate(request(request_id="r1"), metadata=METADATA))
    assert seen == {"open": ("r1", TRACE), "submit": ("", "")}


async def test_router_fault_is_one_log_line_with_traceback(lines: list[Line], monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash ends a request too."""

    async def broken(*_: object) -> None:
        raise KeyError("whatever")

    async with bench() as b:
        monkeypatch.setattr(b.router.service._encoder, "for_generate", broken)
        error = await error_of(b.stub.Generate(request(request_id="bad")))
        line = await line_of(lines, request_id="bad")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert (line["log_level"], line["status"], line["reason"]) == ("error", "INTERNAL", "ROUTER_ERROR")
    assert isinstance(line["exc_info"], KeyError)


async def test_log_line_names_end_of_router_as_cause(lines: list[Line]) -> None:
    """The cause is neither the client's cancel nor its deadline."""
    async with bench() as b:
        call = b.stub.Generate(request(request_id="cut", params={"max_tokens": 4000}), timeout=60)
        await call.read()
        await b.router.stop()
        line = await line_of(lines, request_id="cut")
        assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
    assert (line["status"], line["reason"]) == ("ABORTED", "ROUTER_ENDING")
    assert line["completion_tokens"] > 0


async def test_failed_observer_disturbs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in making the line, or its figures, does not affect a request."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no observer")

    async with bench() as b:
        monkeypatch.setattr("common.rpc.request_log.RequestLog.end", fail)
        monkeypatch.setattr(AnswerCall, "_account", fail)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
        assert (await error_of(b.stub.Generate(request(params={"top_p": 0})))).code() is (
            grpc.StatusCode.INVALID_ARGUMENT
        )
        await b.empty()


async def test_every_request_of_storm_has_one_log_line(lines: list[Line]) -> None:
    """Every end of a request counts, also while workers are lost."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", room_seqs=16) for i in range(3)]
    failover = FailoverOptions(FailoverPolicy.EXACT, worker_wait_s=2.0)
    rnd, told = random.Random(5), dict[str, grpc.StatusCode]()

    async def one(b: Bench, i: int) -> None:
        name, kind = f"s{i}", i % 5
        await asyncio.sleep(rnd.random())
        params = {"max_tokens": 0 if kind == 0 else rnd.choice([3, 40, 300])}
        call = b.stub.Generate(request(request_id=name, params=params), timeout=0.4 if kind == 1 else 60)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            if kind == 2:
                await call.read()
                call.cancel()
            await collect(call)
        told[name] = await call.code()

    async with bench(*workers, failover=failover) as b:
        storm = asyncio.gather(*(one(b, i) for i in range(150)))
        await asyncio.sleep(0.6)
        await workers[0].stop()
        await storm
        await b.empty()
        # A call with a short deadline may end before it has come here at all.
        short = {f"s{i}" for i in range(1, 150, 5)}
        await until(lambda: told.keys() - {line.get("request_id") for line in ended(lines)} <= short)
    found = Counter(line["request_id"] for line in ended(lines) if "request_id" in line)
    missing = told.keys() - found.keys()
    assert {told[name] for name in missing} <= {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert 150 - len(missing) <= len(ended(lines)) <= 150
    assert set(found.values()) == {1}
    assert found.keys() <= told.keys()
    pairs = [(line["status"], told[line["request_id"]].name) for line in ended(lines) if "request_id" in line]
    # Both sides have a timer, and a client may go just when its answer is complete.
    assert {pair for pair in pairs if pair[0] != pair[1] and pair[1] in ("OK", "INVALID_ARGUMENT")} == set()


async def test_usage_counts_by_model_and_status_however_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivered tokens count in spans and metrics, also if the client gave up later."""

    def are_there(points: list[ReceivedPoint]) -> bool:
        cancelled = {point.name for point in points if point.attributes.get(names.RPC_STATUS) == "CANCELLED"}
        return {names.ROUTER_GENERATED_TOKENS, names.ROUTER_PROMPT_TOKENS} <= cancelled

    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
        async with bench() as b:
            await collect(b.stub.Generate(request()))
            cancelled = b.stub.Generate(request(params={"max_tokens": 4000}))
            await cancelled.read()
            cancelled.cancel()
            await until(lambda: not b.router.service.in_flight)
            await error_of(b.stub.Generate(request(params={"top_p": 0})))
            figures = b.router._snapshot()
            await receiver.until_received(GENERATE, 3)
            await until(lambda: are_there(receiver.points))
        done, broken = figures.usage["m", "OK"], figures.usage["m", "CANCELLED"]
        assert figures.usage.keys() == {("m", "OK"), ("m", "CANCELLED")}
        assert (done.prompt, done.cached, done.generated) == (3, 3, 5)
        assert (broken.prompt, broken.generated > 0) == (3, True)
        spans = {s.attributes["rpc.response.status_code"]: s for s in receiver.wait_for(GENERATE, 3)}
        assert spans["CANCELLED"].attributes["gen_ai.usage.output_tokens"] == broken.generated
        assert "gen_ai.usage.output_tokens" not in spans["INVALID_ARGUMENT"].attributes
        points = {p.name: p for p in receiver.points if p.attributes.get(names.RPC_STATUS) == "CANCELLED"}
        assert points[names.ROUTER_GENERATED_TOKENS].value == broken.generated
        assert points[names.ROUTER_PROMPT_TOKENS].attributes[names.REQUEST_MODEL] == "m"


@pytest.mark.parametrize("method", ["Embed", "Rerank"])
async def test_calls_with_many_texts_count_all_tokens(
    method: str, monkeypatch: pytest.MonkeyPatch, lines: list[Line]
) -> None:
    """Log line, span and metrics agree with the answer: no token is generated for the client."""
    parts = [pb.TextOrTokens(text=text) for text in ("a b", "three of it", "two")]
    asked: dict[str, Any] = {
        "Embed": pb.EmbedRequest(inputs=parts),
        "Rerank": pb.RerankRequest(query="q", documents=[part.text for part in parts]),
    }
    described = {"features": ["logprobs", "embed"], "hidden_size": 3, "default_pooling": wpb.POOLING_LAST}
    if method == "Rerank":
        described |= {"head": wpb.HEAD_CLASSIFIER, "num_labels": 1}
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        async with bench(FakeWorker(FILES, description=described, answer=short)) as b:
            usage = (await getattr(b.stub, method)(asked[method])).usage
            await until(lambda: not b.router.service.in_flight)
            (figures,) = b.router._snapshot().usage.values()
            await receiver.until_received(f"fissile.v1.InferenceService/{method}")
        (span,) = receiver.wait_for(f"fissile.v1.InferenceService/{method}", 1)
    (line,) = ended(lines)
    assert usage.prompt_tokens > 10
    for found in (
        (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]),
        (figures.prompt, figures.cached, figures.generated),
        (
            span.attributes["gen_ai.usage.input_tokens"],
            usage.cached_tokens,
            span.attributes["gen_ai.usage.output_tokens"],
        ),
    ):
        assert found == (usage.prompt_tokens, usage.cached_tokens, 0)


async def test_ending_process_logs_interrupted_requests() -> None:
    """A router that is told twice to end still logs whose streams it cut."""
    async with draining_process() as (process, channel):
        asked = request("secret words", request_id="cut", params={"max_tokens": 4000})
        call: Any = InferenceServiceStub(channel).Generate(asked, timeout=60)
        await call.read()
        await heeds(process, channel, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        await error_of(call)
    log = log_of(process)
    (line,) = [line for line in map(json.loads, log.splitlines()) if line.get("request_id") == "cut"]
    assert (line["event"], line["status"], line["reason"]) == ("request ended", "ABORTED", "ROUTER_ENDING")
    assert "secret" not in log


async def test_direct_calls_have_log_lines(lines: list[Line], tmp_path: Path) -> None:
    """Direct calls finish, are refused and are cancelled on the worker itself; a router's Session is not a request."""
    async with running(Worker(options(make_model_folder(tmp_path / "tiny")))) as site:
        answers = [a async for a in site.stub.Generate(direct(20, request_id="whole"), metadata=METADATA)]
        line = await line_of(lines, request_id="whole")
        assert {name: line[name] for name in ("method", "status", "reason", "model", "worker_id", "trace_id")} == {
            "method": "fissile.worker.v1.WorkerService/Generate",
            "status": "OK",
            "reason": "length",
            "model": "tiny",
            "worker_id": "w0",
            "trace_id": TRACE,
        }
        assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (3, 20, 0)
        assert sum(line[name] for name in PHASES) == pytest.approx(line["duration_ms"], abs=0.05)
        assert answers
        with pytest.raises(grpc.aio.AioRpcError):
            await site.stub.Generate(direct(5, token_ids=[])).read()
        assert (await line_of(lines, status="INVALID_ARGUMENT"))["fields"] == ["token_ids"]
        given_up = site.stub.Generate(direct(ENDLESS, request_id="given up"))
        await given_up.read()
        given_up.cancel()
        line = await line_of(lines, request_id="given up")
        assert line["status"] == "CANCELLED"
        assert line["completion_tokens"] > 0
        await site.until_free()
        assert not ended(lines, method="fissile.worker.v1.WorkerService/Session")
    assert "token_ids" not in {name for line in lines for name in line}


async def test_time_on_worker_without_tokens_counts_as_queue(lines: list[Line]) -> None:
    """A worker is lost before the first token; the phases add up to the client's waiting time."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", answer=lambda _: []) for i in range(2)]
    async with bench(*workers) as b:
        call = b.stub.Generate(request(request_id="moved"))
        await until(lambda: any(worker.running for worker in workers))
        (lost,) = [worker for worker in workers if worker.running]
        (other,) = [worker for worker in workers if worker is not lost]
        other.answer = short
        await asyncio.sleep(0.3)
        await lost.stop()
        *_, last = await collect(call)
        line = await line_of(lines, request_id="moved")
    timings = last.finish.timings
    queue, prefill, ttft = (each.ToNanoseconds() / 1e9 for each in (timings.queue, timings.prefill, timings.ttft))
    assert queue >= 0.3
    assert queue + prefill == pytest.approx(ttft, abs=1e-6)
    assert (line["attempts"], line["worker_id"], line["queue_ms"] >= 300) == (2, other.worker_id, True)
