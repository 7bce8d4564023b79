"""Spans end once with the right status, and the trace context survives the hop from router to worker."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.errors import ApiError, InvalidFieldError, NoWorkerError, WorkerLostError
from common.params.sampling_params import SamplingParams
from common.telemetry import names
from common.telemetry.failures import failures
from common.telemetry.ledger import Blame, Ledger
from common.telemetry.logs import current_trace_id
from common.telemetry.names import Stage
from common.telemetry.trace_context import extract, inject, trace_id_of
from common.telemetry.tracing import SpanFactory, setup_tracing
from router.scheduling.queued_request import PlacementChoice
from router.telemetry.request_span import RequestFacts, RequestSpan, request_span
from worker.engine.outputs import DecodeWork, SequenceTimes
from worker.engine.sequence_ledger import TierWait
from worker.session.sequence_span import sequence_span

GENERATE = "fissile.v1.InferenceService/Generate"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
MANY = ",".join(f"k{i}=v" for i in range(32))
METADATA = (("traceparent", PARENT), ("tracestate", "vendor=1"), ("trace-bin", b"\x00"))


class Recorder:
    """A span factory that keeps its spans in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = SpanFactory(provider)

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def times(now: float) -> SequenceTimes:
    return SequenceTimes(arrived=now, first_scheduled=now + 0.1, first_token=now + 0.3, ended=now + 0.7)


def test_off_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    assert not setup_tracing("router", "1").enabled


def test_off_by_the_sdk_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert not setup_tracing("router", "1").enabled


def test_clients_context_is_passed_on_with_tracing_off() -> None:
    tracing = SpanFactory()

    with request_span(tracing, GENERATE, METADATA, operation=names.CHAT) as span:
        span.request(RequestFacts("m", "r"), SamplingParams())
        span.submitted("w")
        span.first_token(0.1)
        assert (span.traceparent, span.tracestate) == (PARENT, "vendor=1")
        assert span.trace_id == TRACE_ID
        # The trailing metadata never repeats the client's own span.
        assert span.trailing_metadata() == ()
        sequence = sequence_span(tracing, span.traceparent, span.tracestate, arrived=1.0)
        sequence.finish(times(1.0), reason="eos", input_tokens=1, output_tokens=1, cached_tokens=0)
        span.usage(output_tokens=1)
        span.finish(["stop"])

    assert tracing.open_spans() == 0
    tracing.shutdown()


def test_no_trace_context_sends_no_trace_headers() -> None:
    span = request_span(SpanFactory(), GENERATE, ())

    assert (span.traceparent, span.tracestate, span.trace_id, span.trailing_metadata()) == ("", "", "", ())


@pytest.mark.parametrize(
    "bad", ["", "x", "00-0-0-01", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{TRACE_ID}-b7ad6b7169203331-01"]
)
def test_malformed_context_is_dropped(bad: str, recorder: Recorder) -> None:
    assert inject(extract([("traceparent", bad)])) == ("", "")
    with request_span(recorder.tracing, GENERATE, [("traceparent", bad)]) as span:
        assert len(span.trace_id) == 32
    assert recorder.one(GENERATE).parent is None


def test_router_and_worker_spans_share_trace(recorder: Recorder) -> None:
    tracing, now = recorder.tracing, time.monotonic()
    with request_span(tracing, GENERATE, METADATA, operation=names.TEXT_COMPLETION, peer="ipv4:127.0.0.1:7") as span:
        span.request(RequestFacts("m", "r"), SamplingParams(temperature=0.5, max_tokens=9, seed=3))
        span.submitted("w")
        sequence = sequence_span(
            tracing, span.traceparent, span.tracestate, arrived=now, model="m", request_id="17", worker_id="w"
        )
        assert tracing.open_spans() == 2
        span.first_token(0.25)
        sequence.finish(times(now), reason="eos", input_tokens=5, output_tokens=4, cached_tokens=2)
        span.usage(input_tokens=5, output_tokens=4, cached_tokens=2, worker_id="w")
        span.finish(["stop"])
        assert trace_id_of(span.traceparent) == TRACE_ID
        assert span.trailing_metadata() == (("traceresponse", span.traceparent),)
        assert span.tracestate == "vendor=1"
    assert tracing.open_spans() == 0

    router, worker = recorder.one(GENERATE), recorder.one(names.WORKER_SPAN)
    assert router.parent is not None
    assert worker.parent is not None
    assert (router.kind, worker.kind) == (SpanKind.SERVER, SpanKind.SERVER)
    assert f"{router.parent.span_id:016x}" in PARENT
    assert worker.parent.span_id == router.context.span_id
    assert {s.context.trace_id for s in recorder.exporter.get_finished_spans()} == {int(TRACE_ID, 16)}
    assert attributes(router) == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "rpc.response.status_code": "OK",
        "network.peer.address": "127.0.0.1",
        "network.peer.port": 7,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "fissile",
        "gen_ai.request.model": "m",
        "gen_ai.output.type": "text",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "r",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "fissile.worker.id": "w",
        "fissile.attempts": 1,
    }
    assert [event.name for event in router.events] == ["submitted", "first_token"]
    assert attributes(worker)["gen_ai.response.finish_reasons"] == ("eos",)


def test_phases_are_children_made_from_the_timestamps(recorder: Recorder) -> None:
    before_ns, now, after_ns = time.time_ns(), time.monotonic(), time.time_ns()
    sequence = sequence_span(recorder.tracing, PARENT, arrived=now)
    sequence.finish(times(now), reason="eos", input_tokens=1, output_tokens=1, cached_tokens=0)

    worker = recorder.one(names.WORKER_SPAN)
    phases = [recorder.one(name) for name in (names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN)]
    seconds = [((p.end_time or 0) - (p.start_time or 0)) / 1e9 for p in phases]
    assert seconds == pytest.approx([0.1, 0.2, 0.4], abs=1e-6)
    assert {p.parent.span_id for p in phases if p.parent} == {worker.context.span_id}
    assert [p.end_time for p in phases[:2]] == [p.start_time for p in phases[1:]]
    assert phases[2].end_time == worker.end_time
    assert worker.start_time == pytest.approx(phases[0].start_time, abs=1e6)
    assert before_ns - 5e9 <= (worker.start_time or 0) <= after_ns + 5e9


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (SequenceTimes(1.0, None, None, 2.0), [("queue", 1.0, 2.0)]),
        (SequenceTimes(1.0, 1.5, None, 2.0), [("queue", 1.0, 1.5), ("prefill", 1.5, 2.0)]),
        (SequenceTimes(1.0, 1.5, 2.0, 2.0), [("queue", 1.0, 1.5), ("prefill", 1.5, 2.0), ("decode", 2.0, 2.0)]),
    ],
)
def test_phases_end_where_sequence_ended(reached: SequenceTimes, expected: list[tuple[str, float, float]]) -> None:
    assert reached.phases() == expected


def _leave_with(error: BaseException) -> Callable[[RequestSpan], None]:
    def leave(span: RequestSpan) -> None:
        raise error

    return leave


def _fail_with(error: ApiError | grpc.StatusCode) -> Callable[[RequestSpan], None]:
    return lambda span: span.fail(error)


@pytest.mark.parametrize(
    ("end", "code", "status"),
    [
        (lambda span: None, "OK", StatusCode.UNSET),
        (lambda span: span.finish(), "OK", StatusCode.UNSET),
        (_leave_with(asyncio.CancelledError()), "CANCELLED", StatusCode.UNSET),
        (_leave_with(GeneratorExit()), "CANCELLED", StatusCode.UNSET),
        (_leave_with(KeyError("text of a prompt")), "UNKNOWN", StatusCode.ERROR),
        (_leave_with(InvalidFieldError("text", "is empty", "some text")), "INVALID_ARGUMENT", StatusCode.UNSET),
        (_leave_with(NoWorkerError("no worker")), "UNAVAILABLE", StatusCode.ERROR),
        (_leave_with(WorkerLostError("w", 3)), "ABORTED", StatusCode.ERROR),
        (_fail_with(grpc.StatusCode.DEADLINE_EXCEEDED), "DEADLINE_EXCEEDED", StatusCode.ERROR),
        (_fail_with(grpc.StatusCode.CANCELLED), "CANCELLED", StatusCode.UNSET),
    ],
)
def test_every_end_has_its_status(
    end: Callable[[RequestSpan], None], code: str, status: StatusCode, recorder: Recorder
) -> None:
    with suppress(BaseException), request_span(recorder.tracing, GENERATE) as span:
        end(span)

    ended = recorder.one(GENERATE)
    assert attributes(ended)["rpc.response.status_code"] == code
    assert attributes(ended).get("error.type") == (code if status is StatusCode.ERROR else None)
    assert ended.status.status_code is status
    assert ended.events == ()
    assert recorder.tracing.open_spans() == 0


def test_first_end_is_kept(recorder: Recorder) -> None:
    with request_span(recorder.tracing, GENERATE) as span:
        span.usage(output_tokens=3)
        span.fail(WorkerLostError("w", 3))
        span.usage(output_tokens=9)
        span.finish(["stop"])
        span.fail(grpc.StatusCode.CANCELLED)

    ended = attributes(recorder.one(GENERATE))
    assert ended["rpc.response.status_code"] == "ABORTED"
    assert ended["fissile.error.reason"] == "WORKER_LOST"
    assert ended[names.OUTPUT_TOKENS] == 3
    assert names.RESPONSE_FINISH_REASONS not in ended


@pytest.mark.parametrize(
    ("code", "status"),
    [(grpc.StatusCode.CANCELLED, StatusCode.UNSET), (grpc.StatusCode.INTERNAL, StatusCode.ERROR)],
)
def test_failed_sequence(code: grpc.StatusCode, status: StatusCode, recorder: Recorder) -> None:
    now = time.monotonic()
    sequence = sequence_span(recorder.tracing, PARENT, arrived=now)
    sequence.fail(code, SequenceTimes(now, now + 0.1, None, now + 0.2), input_tokens=7)
    sequence.finish(times(now), reason="eos", input_tokens=7, output_tokens=1, cached_tokens=0)

    ended = recorder.one(names.WORKER_SPAN)
    assert ended.status.status_code is status
    assert attributes(ended)["rpc.response.status_code"] == code.name
    assert [s.name for s in recorder.exporter.get_finished_spans()] == ["queue", "prefill", "worker.generate"]


def test_wait_for_kv_tiers_is_a_span_that_ends_with_its_sequence(recorder: Recorder) -> None:
    now = time.monotonic()
    for ended in (now + 0.1, None):
        wait = TierWait(now, ended, num_asked=4, results=Counter({("redis", "hit"): 1, ("redis", "damaged"): 1}))
        sequence = sequence_span(recorder.tracing, PARENT, arrived=now)
        sequence.fail(grpc.StatusCode.CANCELLED, SequenceTimes(now, None, None, now + 0.5, tiers=wait))
    spans = [span for span in recorder.exporter.get_finished_spans() if span.name == "kv tiers"]
    assert [round(((span.end_time or 0) - (span.start_time or 0)) / 1e9, 6) for span in spans] == [0.1, 0.5]
    assert attributes(spans[0]) == {
        "fissile.kv_tiers.asked": 4,
        "fissile.kv_tiers.bytes": 0,
        "fissile.kv_tiers.late": False,
        "fissile.kv_tiers.redis.hit": 1,
        "fissile.kv_tiers.redis.damaged": 1,
    }


def test_sequence_that_reached_no_worker_still_ends(recorder: Recorder) -> None:
    sequence = sequence_span(recorder.tracing, "", arrived=time.monotonic())
    sequence.fail(grpc.StatusCode.UNAVAILABLE)

    assert recorder.one(names.WORKER_SPAN).parent is None
    assert recorder.tracing.open_spans() == 0


def test_unsampled_context_stays_unsampled(recorder: Recorder) -> None:
    with request_span(recorder.tracing, GENERATE, [("traceparent", PARENT[:-2] + "00")]) as span:
        assert span.trace_id == TRACE_ID
        assert span.traceparent.endswith("-00")

    assert recorder.exporter.get_finished_spans() == ()
    assert recorder.tracing.open_spans() == 0


def test_log_lines_carry_the_trace_id_inside_only(recorder: Recorder) -> None:
    with request_span(recorder.tracing, GENERATE, METADATA):
        assert current_trace_id.get() == TRACE_ID
        with request_span(recorder.tracing, GENERATE) as inner:
            assert current_trace_id.get() == inner.trace_id
        assert current_trace_id.get() == TRACE_ID
    assert current_trace_id.get() == ""


async def test_closing_a_generator_elsewhere_ends_its_span(recorder: Recorder) -> None:
    async def stream() -> object:
        with request_span(recorder.tracing, GENERATE):
            yield 1
            yield 2

    generator = stream()
    await asyncio.create_task(anext(generator))  # type: ignore[call-overload]
    await generator.aclose()  # type: ignore[attr-defined]

    assert attributes(recorder.one(GENERATE))["rpc.response.status_code"] == "CANCELLED"


def test_disabled_tracing_makes_no_spans() -> None:
    tracing = SpanFactory()
    with request_span(tracing, GENERATE, (), operation=names.CHAT) as span:
        assert type(span) is RequestSpan
        assert tracing.open_spans() == 0


@pytest.mark.parametrize(
    ("client", "sent"),
    [("", "fissile=chat"), ("k=v,fissile=x,a=b", "fissile=chat,k=v,a=b"), (MANY, f"fissile=chat,{MANY}")],
)
def test_chat_operation_crosses_router_worker_hop(client: str, sent: str, recorder: Recorder) -> None:
    """The worker's span has the client's operation and trace state."""
    metadata = (("traceparent", PARENT), *([("tracestate", client)] if client else []))
    with request_span(recorder.tracing, GENERATE, metadata, operation=names.CHAT) as span:
        assert span.tracestate == (sent if len(sent.split(",")) <= 32 else sent.rpartition(",")[0])
        sequence = sequence_span(recorder.tracing, span.traceparent, span.tracestate, arrived=1.0)
        sequence.finish(times(1.0), reason="eos", input_tokens=1, output_tokens=1, cached_tokens=0)
    assert attributes(recorder.one(names.WORKER_SPAN))["gen_ai.operation.name"] == "chat"


def test_decode_span_has_steps_batch_and_preemptions(recorder: Recorder) -> None:
    """Number of steps, mean batch size and preemptions."""
    sequence = sequence_span(recorder.tracing, PARENT, arrived=1.0)
    done = SequenceTimes(1.0, 1.1, 1.2, 1.9, DecodeWork(steps=10, tokens=35, preemptions=2, kv_usage=0.25))
    sequence.finish(done, reason="eos", input_tokens=1, output_tokens=9, cached_tokens=0)
    assert attributes(recorder.one(names.DECODE_SPAN)) == {
        "fissile.decode.steps": 10,
        "fissile.decode.mean_batch": 3.5,
        "fissile.decode.preemptions": 2,
        "fissile.engine.kv_cache.usage": 0.25,
    }
    assert attributes(recorder.one(names.PREFILL_SPAN)) == {}


def test_decode_span_has_accepted_drafts() -> None:
    said = DecodeWork(steps=10, tokens=35, preemptions=0, kv_usage=0.0, drafts=((5, 4), (3, 1))).attributes()
    assert (said["fissile.decode.drafts"], said["fissile.decode.drafts_accepted"]) == (8, 5)


def test_failed_tracer_disturbs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures to make or fill a span are counted and never raised into the request."""
    provider = TracerProvider()
    tracing = SpanFactory(provider)
    span = request_span(tracing, GENERATE, METADATA)
    before = failures().get("traces", 0)
    monkeypatch.setattr("common.telemetry.tracing.Event", lambda *_: 1 / 0)
    monkeypatch.setattr("opentelemetry.sdk.trace.SynchronousMultiSpanProcessor.on_end", lambda *_: 1 / 0)
    with span:
        span.submitted("w")
        span.first_token(0.1)
        span.finish()
    assert tracing.open_spans() == 0
    monkeypatch.setattr("opentelemetry.sdk.trace.Tracer.start_span", lambda *_, **__: 1 / 0)
    with request_span(tracing, GENERATE, METADATA) as other:
        assert other.trace_id == TRACE_ID
    sequence_span(tracing, PARENT, arrived=0.0).fail(grpc.StatusCode.INTERNAL)
    assert failures()["traces"] >= before + 4


def test_request_span_says_who_asked_and_for_what(recorder: Recorder) -> None:
    facts = RequestFacts("m", "r", session_id="s1", tenant="gold", key="team-a", priority="high", is_json=True)
    recorder.tracing.listens_at("[::1]:50051")
    with request_span(recorder.tracing, GENERATE, operation=names.CHAT) as span:
        span.request(facts, SamplingParams(stop_strings=("END", "x" * 200)))
        span.usage(output_tokens=9, reasoning_tokens=4)
    found = attributes(recorder.one(GENERATE))
    wanted = {
        "gen_ai.conversation.id": "s1",
        "gen_ai.output.type": "json",
        "gen_ai.request.stop_sequences": ("END", "x" * 64),
        "gen_ai.usage.reasoning.output_tokens": 4,
        "fissile.tenant": "gold",
        "fissile.key.name": "team-a",
        "fissile.priority": "high",
        "server.address": "::1",
        "server.port": 50051,
    }
    assert {name: found.get(name) for name in wanted} == wanted


def test_wildcard_address_is_shown_as_host_name(recorder: Recorder) -> None:
    recorder.tracing.listens_at("0.0.0.0:7")
    with request_span(recorder.tracing, GENERATE):
        pass
    assert attributes(recorder.one(GENERATE))["server.address"] == socket.gethostname()


def test_attempt_span_links_to_attempt_before(recorder: Recorder) -> None:
    with request_span(recorder.tracing, GENERATE) as span:
        span.attempt(1, "w0", began=1.0, ended=2.0, tokens=3, loss="died")
        span.attempt(2, "w1", began=2.0, ended=3.0, tokens=4)
        # The attempts of the next answer of the same call.
        span.attempt(1, "w0", began=1.0, ended=2.0, tokens=0, loss="died")
    attempts = [each for each in recorder.exporter.get_finished_spans() if each.name == names.ATTEMPT_SPAN]
    linked = [[link.context.span_id for link in each.links] for each in attempts]
    assert linked == [[], [attempts[0].context.span_id], []]
    assert [each.status.status_code for each in attempts] == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.ERROR]


def test_submitted_event_says_why_the_worker_was_chosen(recorder: Recorder) -> None:
    with request_span(recorder.tracing, GENERATE) as span:
        span.submitted("w0", PlacementChoice("prefix", 3, cached_tokens=512, estimate_s=0.0125))
        span.submitted("w1", PlacementChoice("turn", 2))
    first, second = (dict(event.attributes or {}) for event in recorder.one(GENERATE).events)
    assert first == {
        "fissile.worker.id": "w0",
        "fissile.placement.reason": "prefix",
        "fissile.placement.candidates": 3,
        "fissile.placement.cached_tokens": 512,
        "fissile.placement.estimate_ms": 12.5,
    }
    assert "fissile.placement.estimate_ms" not in second


@pytest.mark.parametrize("operation", [names.CHAT, names.TEXT_COMPLETION])
@pytest.mark.parametrize(("asked", "has_steps"), [("1", True), ("0", False), ("", False), (None, False)])
def test_wish_for_steps_crosses_the_hop(recorder: Recorder, operation: str, asked: str | None, has_steps: bool) -> None:
    metadata: list[tuple[str, str | bytes]] = [*METADATA]
    if asked is not None:
        metadata.append((names.TRACE_STEPS, asked))
    with request_span(recorder.tracing, GENERATE, metadata, operation=operation) as span:
        sequence = sequence_span(recorder.tracing, span.traceparent, span.tracestate, arrived=1.0)
        assert sequence.has_steps is has_steps
        sequence.fail(grpc.StatusCode.CANCELLED)
    assert attributes(recorder.one(names.WORKER_SPAN))["gen_ai.operation.name"] == operation


def test_without_tracing_nobody_looks_for_steps() -> None:
    with request_span(SpanFactory(), GENERATE, [(names.TRACE_STEPS, "1")], operation=names.CHAT) as span:
        assert not sequence_span(SpanFactory(), span.traceparent, span.tracestate, arrived=1.0).has_steps


def test_span_has_the_time_of_each_stage_and_the_blamed_request(recorder: Recorder) -> None:
    ledger = Ledger(Stage.PREPARE, 1.0)
    ledger.enter(Stage.GATE_HOLD, 1.25)
    ledger.blame(Stage.GATE_HOLD, Blame("r7", "gold", 0.5))
    with request_span(recorder.tracing, GENERATE) as span:
        span.stages(ledger, 2.0)
    found = attributes(recorder.one(GENERATE))
    assert {name: value for name, value in found.items() if name.startswith(("fissile.stage", "fissile.blame"))} == {
        "fissile.stage.prepare_ms": 250.0,
        "fissile.stage.gate_hold_ms": 750.0,
        "fissile.blame.gate_hold.request": "r7",
        "fissile.blame.gate_hold.tenant": "gold",
        "fissile.blame.gate_hold.cost_ms": 500.0,
    }


def test_waits_of_a_millisecond_are_events_at_their_ends(recorder: Recorder) -> None:
    ledger, engine = Ledger(Stage.PREPARE, 1.0), Ledger(Stage.WORKER_QUEUE, 1.5)
    ledger.enter(Stage.QUEUE, 1.25)
    ledger.enter(Stage.UNEXPLAINED, 1.5, {Stage.GATE_HOLD: 0.1, Stage.PLACEMENT_WAIT: 0.0, Stage.OWN_QUEUE: 0.05})
    engine.enter(Stage.GRAMMAR_WAIT, 1.6)
    engine.enter(Stage.DECODE, 1.62)
    engine.enter(Stage.DECODE, 1.8, {Stage.OTHERS_PREFILL: 0.04, Stage.STALL: 0.0005})
    ledger.enter(Stage.CLIENT_WAIT, 1.75)
    with request_span(recorder.tracing, GENERATE) as span:
        span.stages(ledger, 2.0)
        sequence = sequence_span(recorder.tracing, span.traceparent, arrived=1.5)
        sequence.add_waits(engine, 1.8)
        sequence.fail(grpc.StatusCode.CANCELLED)
    for name, expected, apart_s in (
        (GENERATE, {"gate_hold": 100.0, "client_wait": 250.0}, 0.5),
        (names.WORKER_SPAN, {"grammar_wait": 20.0, "others_prefill": 40.0}, 0.18),
    ):
        first, second = recorder.one(name).events
        assert {each.name: dict(each.attributes or {}) for each in (first, second)} == {
            event: {"fissile.wait_ms": ms} for event, ms in expected.items()
        }
        assert (second.timestamp - first.timestamp) / 1e9 == pytest.approx(apart_s)
