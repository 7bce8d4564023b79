"""Spans of slow and failed requests are kept although the sampler drops them; no other span waits for ever."""

from __future__ import annotations

import time

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from common.errors import NoWorkerError
from common.telemetry import names
from common.telemetry.tail_sampling import RecordAll, SlowSpanKeeper
from common.telemetry.tracing import SpanFactory
from router.telemetry.request_span import request_span
from tests.unit.common.telemetry.test_tracing import GENERATE, PARENT, times
from worker.session.sequence_span import sequence_span

UNSAMPLED = PARENT[:-2] + "00"


class Tail:
    """A span factory with a keeper of slow spans, and the names of the exported spans."""

    def __init__(self, slow_s: float, sampler: Sampler = ALWAYS_OFF, max_held: int = 100) -> None:
        self._exporter = InMemorySpanExporter()
        self.keeper = SlowSpanKeeper(SimpleSpanProcessor(self._exporter), slow_s, max_held)
        provider = TracerProvider(RecordAll(sampler), shutdown_on_exit=False)
        provider.add_span_processor(self.keeper)
        self.tracing = SpanFactory(provider)

    def request(self, error: NoWorkerError | grpc.StatusCode | None = None) -> None:
        with request_span(self.tracing, GENERATE) as span:
            span.phase(names.QUEUE_SPAN, 1.0, 2.0)
            if error is not None:
                span.fail(error)

    def exported(self) -> list[str]:
        found = self._exporter.get_finished_spans()
        assert all(span.context.trace_flags.sampled for span in found)
        return [span.name for span in found]


def test_fast_request_is_dropped_and_slow_one_kept_whole() -> None:
    fast, slow = Tail(slow_s=1000.0), Tail(slow_s=0.0)
    for tail in (fast, slow):
        tail.request()
    assert fast.exported() == []
    assert slow.exported() == [names.QUEUE_SPAN, GENERATE]


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (NoWorkerError("none"), True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True),
        (grpc.StatusCode.CANCELLED, False),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
    ],
)
def test_failed_request_is_kept_if_the_failure_is_the_servers(
    error: NoWorkerError | grpc.StatusCode, kept: bool
) -> None:
    tail = Tail(slow_s=1000.0)
    tail.request(error)
    assert tail.exported() == ([names.QUEUE_SPAN, GENERATE] if kept else [])


def test_sampled_spans_are_exported_without_waiting() -> None:
    tail = Tail(slow_s=1000.0, sampler=ALWAYS_ON)
    with request_span(tail.tracing, GENERATE) as span:
        span.phase(names.QUEUE_SPAN, 1.0, 2.0)
        assert tail.exported() == [names.QUEUE_SPAN]
    assert tail.exported() == [names.QUEUE_SPAN, GENERATE]


def test_slow_sequence_of_unsampled_trace_is_kept_on_its_worker() -> None:
    for slow_s, kept in ((0.5, 4), (0.8, 0)):
        tail = Tail(slow_s)
        now = time.monotonic()
        # `times` gives it 0.7 s.
        sequence = sequence_span(tail.tracing, UNSAMPLED, arrived=now)
        sequence.finish(times(now), reason="eos", input_tokens=1, output_tokens=1, cached_tokens=0)
        assert len(tail.exported()) == kept


def test_spans_at_any_depth_wait_for_the_root() -> None:
    for slow_s, kept in ((0.0, ["step", "phase", "root"]), (1000.0, [])):
        exporter = InMemorySpanExporter()
        keeper = SlowSpanKeeper(SimpleSpanProcessor(exporter), slow_s)
        provider = TracerProvider(RecordAll(ALWAYS_OFF), shutdown_on_exit=False)
        provider.add_span_processor(keeper)
        tracer = provider.get_tracer("test")
        with (
            tracer.start_as_current_span("root"),
            tracer.start_as_current_span("phase"),
            tracer.start_as_current_span("step"),
        ):
            pass
        assert [span.name for span in exporter.get_finished_spans()] == kept
        assert keeper.num_held == 0


def test_no_span_waits_after_many_requests() -> None:
    tail = Tail(slow_s=1000.0)
    for _ in range(2000):
        tail.request()
    assert (tail.keeper.num_held, tail.tracing.open_spans(), tail.exported()) == (0, 0, [])


def test_waiting_spans_are_bounded_and_the_oldest_root_loses_its_own() -> None:
    tail = Tail(slow_s=0.0, max_held=3)
    first, second = (request_span(tail.tracing, GENERATE) for _ in range(2))
    for _ in range(2):
        first.phase(names.QUEUE_SPAN, 1.0, 2.0)
        second.phase(names.PREFILL_SPAN, 1.0, 2.0)
    assert tail.keeper.num_held == 2
    for span in (first, second):
        span.finish()
    assert tail.exported() == [GENERATE, names.PREFILL_SPAN, names.PREFILL_SPAN, GENERATE]
    assert tail.keeper.num_held == 0
