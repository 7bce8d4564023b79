"""Export over the real wire: to a collector that takes the spans, to a closed port, to one that never answers."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from common.limits import TELEMETRY_SHUTDOWN_S
from common.sampling_params import SamplingParams
from common.telemetry import names
from common.telemetry.tracing import SequenceTimes, new_traceparent, setup_tracing, trace_id_of
from tests.otlp_receiver import OtlpReceiver

GENERATE = "fissile.v1.InferenceService/Generate"
# Scheduling of a busy machine, on top of the promised bound.
SLACK_S = 0.5


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as opened:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", opened.endpoint)
        yield opened


def test_trace_of_two_services_reaches_the_collector(receiver: OtlpReceiver) -> None:
    parent, now = new_traceparent(), time.monotonic()
    router, worker = setup_tracing("fissile-router", "r1"), setup_tracing("fissile-worker", "w1")
    metadata = [("traceparent", parent), ("tracestate", "vendor=1")]
    with router.request_span(GENERATE, metadata, operation=names.CHAT) as span:
        sequence = worker.sequence_span(span.traceparent, span.tracestate, arrived=now, model="m")
        span.request(model="m", request_id="r", params=SamplingParams(seed=2**64 - 1))
        times = SequenceTimes(now, now + 0.1, now + 0.2, now + 0.3)
        sequence.finish(times, reason="eos", input_tokens=3, output_tokens=2, cached_tokens=1)
        span.finish(finish_reasons=["stop"], input_tokens=3, output_tokens=2, cached_tokens=1)
    router.shutdown()
    worker.shutdown()

    (server,), (sequence_span,) = receiver.wait_for(GENERATE), receiver.wait_for(names.WORKER_SPAN)
    assert {span.trace_id for span in receiver.spans} == {trace_id_of(parent)}
    assert (server.service, server.instance, server.kind) == ("fissile-router", "r1", "SERVER")
    assert (sequence_span.service, sequence_span.instance, sequence_span.kind) == ("fissile-worker", "w1", "SERVER")
    assert (server.parent_id, sequence_span.parent_id) == (parent.split("-")[2], server.span_id)
    assert sequence_span.trace_state == "vendor=1"
    assert sequence_span.attributes[names.CACHED_TOKENS] == 1
    for name in (names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN):
        (phase,) = receiver.named(name)
        assert phase.parent_id == sequence_span.span_id
        assert phase.end_ns - phase.start_ns == pytest.approx(1e8, abs=1e3)


def dead_collector_costs_one_warning(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    tracing = setup_tracing("router", "1")
    with capture_logs() as lines:
        for _ in range(3):
            with tracing.request_span(GENERATE):
                time.sleep(0.1)
        start = time.monotonic()
        tracing.shutdown()
        took = time.monotonic() - start
        time.sleep(0.1)

    assert took <= TELEMETRY_SHUTDOWN_S + SLACK_S
    assert [(line["log_level"], line["endpoint"]) for line in lines] == [("warning", endpoint)]


def test_closed_port_costs_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead_collector_costs_one_warning(f"http://127.0.0.1:{taken.getsockname()[1]}", monkeypatch)
    # Nothing of the SDK's own gets through to the handlers.
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_silent_collector_costs_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        dead_collector_costs_one_warning(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
