"""Export over the real wire to a working collector, a closed port and a silent collector."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode
from structlog.testing import capture_logs

from common.errors import NoWorkerError
from common.limits import TELEMETRY_SHUTDOWN_S
from common.params.sampling_params import SamplingParams
from common.telemetry import names
from common.telemetry.exporter import _GrpcSpanExporter
from common.telemetry.metrics import setup_metrics
from common.telemetry.trace_context import trace_id_of
from common.telemetry.tracing import SpanFactory, setup_tracing
from router.telemetry.request_span import RequestFacts, request_span
from tests.otlp_receiver import OtlpReceiver
from worker.engine.outputs import SequenceTimes
from worker.session.sequence_span import sequence_span

GENERATE = "fissile.v1.InferenceService/Generate"
# Bound for data that must arrive on any machine: a shutdown gives up after a second.
PATIENT_S = 60.0
# Scheduling delay of a busy machine, beyond the promised bound.
SLACK_S = 60.0


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as opened:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", opened.endpoint)
        yield opened


def test_trace_of_two_services_reaches_the_collector(receiver: OtlpReceiver) -> None:
    parent, now = f"00-{'4' * 32}-{'7' * 16}-01", time.monotonic()
    router, worker = setup_tracing("fissile-router", "r1"), setup_tracing("fissile-worker", "w1")
    metadata = [("traceparent", parent), ("tracestate", "vendor=1")]
    with request_span(router, GENERATE, metadata, operation=names.CHAT) as span:
        sequence = sequence_span(worker, span.traceparent, span.tracestate, arrived=now, model="m")
        span.request(RequestFacts("m", "r"), SamplingParams(seed=2**64 - 1))
        times = SequenceTimes(now, now + 0.1, now + 0.2, now + 0.3)
        sequence.finish(times, reason="eos", input_tokens=3, output_tokens=2, cached_tokens=1)
        span.usage(input_tokens=3, output_tokens=2, cached_tokens=1)
        span.finish(["stop"])
    router.shutdown(PATIENT_S)
    worker.shutdown(PATIENT_S)

    (server,), (worker_span,) = receiver.wait_for(GENERATE), receiver.wait_for(names.WORKER_SPAN)
    assert {span.trace_id for span in receiver.spans} == {trace_id_of(parent)}
    assert (server.service, server.instance, server.kind) == ("fissile-router", "r1", "SERVER")
    assert (worker_span.service, worker_span.instance, worker_span.kind) == ("fissile-worker", "w1", "SERVER")
    assert (server.parent_id, worker_span.parent_id) == (parent.split("-")[2], server.span_id)
    assert worker_span.trace_state == "fissile=chat,vendor=1"
    assert worker_span.attributes[names.CACHED_TOKENS] == 1
    for name in (names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN):
        (phase,) = receiver.named(name)
        assert phase.parent_id == worker_span.span_id
        assert phase.end_ns - phase.start_ns == pytest.approx(1e8, abs=1e3)


def test_otel_sampler_and_service_variables_apply(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sampled share of 0, only traces whose client set the sampled flag are recorded."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "routers-of-mine")
    tracing = setup_tracing("fissile-router", "r1")
    parents = [f"00-{digit * 32}-{'7' * 16}-0{flag}" for digit, flag in (("1", "0"), ("2", "1"), ("3", "0"))]
    for parent in (*parents, ""):
        with request_span(tracing, GENERATE, [("traceparent", parent)] if parent else []) as span:
            # Log lines need the trace id even if the trace is not recorded.
            assert not parent or trace_id_of(span.traceparent) == trace_id_of(parent)
    tracing.shutdown(PATIENT_S)
    (recorded,) = receiver.wait_for(GENERATE)
    assert (recorded.trace_id, recorded.service) == ("2" * 32, "routers-of-mine")


def test_slow_and_failed_requests_are_exported_whatever_the_sampler_says(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    for instance, slow_s in (("all", 0.0), ("failed", 1000.0)):
        tracing = setup_tracing("fissile-router", instance, slow_s)
        for error in (None, grpc.StatusCode.UNAVAILABLE):
            with request_span(tracing, GENERATE) as span:
                span.phase(names.QUEUE_SPAN, 1.0, 2.0)
                if error is not None:
                    span.fail(error)
        tracing.shutdown(PATIENT_S)
    receiver.wait_for(GENERATE)
    found = [(span.instance, span.name, span.status) for span in receiver.spans]
    for name, status in ((names.QUEUE_SPAN, "UNSET"), (GENERATE, "ERROR")):
        assert found.count(("failed", name, status)) == 1
    assert sorted(instance for instance, _, _ in found) == ["all"] * 4 + ["failed"] * 2


def dead_collector_costs_one_warning(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shutdown also returns, though the SDK would wait for an hour."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    tracing = setup_tracing("router", "1")
    with capture_logs() as lines:
        for _ in range(3):
            with request_span(tracing, GENERATE):
                time.sleep(0.1)
        start = time.monotonic()
        tracing.shutdown()
        took = time.monotonic() - start
        end = time.monotonic() + 60
        while not lines and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)

    assert took <= TELEMETRY_SHUTDOWN_S + SLACK_S
    assert [(line["log_level"], line["endpoint"], line["signal"]) for line in lines] == [
        ("warning", endpoint, "traces")
    ]
    assert "OTEL_TRACES_EXPORTER=none" in lines[0]["cure"]


def test_closed_port_costs_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead_collector_costs_one_warning(f"http://127.0.0.1:{taken.getsockname()[1]}", monkeypatch)
    # The SDK's own log lines do not reach the handlers.
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_silent_collector_costs_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        dead_collector_costs_one_warning(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


class HalfCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that accepts traces, unless it `refuses`, and no metrics."""

    def __init__(self) -> None:
        self.taken = 0
        self.refuses = False
        self.server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: object, context: grpc.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        refuses = self.refuses
        self.taken += 1
        if refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not now")
        return trace_service_pb2.ExportTraceServiceResponse()


def span_arrives(tracing: SpanFactory, collector: HalfCollector) -> None:
    before, end = collector.taken, time.monotonic() + 60
    with request_span(tracing, GENERATE):
        pass
    while collector.taken == before:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_refused_telemetry_signal_warning_has_status_and_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector for traces only costs one line about metrics and none about traces; a later change is logged too."""
    collector = HalfCollector()
    collector.server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with capture_logs() as lines:
        tracing, metrics = setup_tracing("router", "1"), setup_metrics("router", "1")
        metrics.gauge("fissile.test", "1", "A gauge", lambda: [(1.0, {})])
        span_arrives(tracing, collector)
        for refuses in (True, True, False, False):
            collector.refuses = refuses
            span_arrives(tracing, collector)
        tracing.shutdown(PATIENT_S)
        metrics.shutdown(PATIENT_S)
    collector.server.stop(0)
    (metric,) = [line for line in lines if line["signal"] == "metrics"]
    assert (metric["log_level"], metric["status"]) == ("warning", "UNIMPLEMENTED")
    assert "OTEL_METRICS_EXPORTER=none" in metric["cure"]
    traces = [(line["log_level"], line.get("status")) for line in lines if line["signal"] == "traces"]
    assert traces == [("warning", "PERMISSION_DENIED"), ("info", None)]


class HttpCollector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP/1.1."""

    paths: ClassVar[list[str]] = []
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).paths.append(f"{self.path} {self.headers['Content-Type']} {len(body) > 0}")
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HttpCollector]]:
    kept: type[HttpCollector] = type("Kept", (HttpCollector,), {"paths": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    yield kept
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("status", "said"), [(200, []), (404, [("traces", "HTTP 404"), ("metrics", "HTTP 404")])])
def test_otlp_over_http(http_collector: type[HttpCollector], status: int, said: list[tuple[str, str]]) -> None:
    """Traces and metrics are exported to an HTTP-only collector; a refusal is named."""
    http_collector.status = status
    with capture_logs() as lines:
        tracing, metrics = setup_tracing("router", "1"), setup_metrics("router", "1")
        metrics.gauge("fissile.test", "1", "A gauge", lambda: [(1.0, {})])
        with request_span(tracing, GENERATE):
            pass
        tracing.shutdown(PATIENT_S)
        metrics.shutdown(PATIENT_S)
    protobuf = "application/x-protobuf True"
    assert set(http_collector.paths) == {f"/v1/traces {protobuf}", f"/v1/metrics {protobuf}"}
    assert [(line["signal"], line["status"]) for line in lines] == said


@pytest.mark.parametrize(
    "variable",
    ["OTEL_EXPORTER_OTLP_PROTOCOL", pytest.param("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", marks=pytest.mark.slow)],
)
def test_unknown_protocol_is_refused_by_name(variable: str) -> None:
    """Regression: it sent gRPC to an HTTP port instead of exiting with code 2 and one line."""
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", variable: "http/json"}
    command = [sys.executable, "-m", "router", "--port", "0", "--worker", "127.0.0.1:9"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{variable}=http/json is not served; use grpc or http/protobuf" in done.stderr
    assert "Traceback" not in done.stderr


def test_spans_are_encoded_as_by_the_sdk() -> None:
    """Every part of a span is what the SDK's own encoder makes of it."""
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracing, now = SpanFactory(provider), time.monotonic()
    remote = [("traceparent", f"00-{'4' * 32}-{'7' * 16}-01"), ("tracestate", "vendor=1,other=2")]
    for metadata in (remote, []):
        with request_span(tracing, GENERATE, metadata, operation=names.CHAT, peer="ipv4:127.0.0.1:5") as span:
            span.request(RequestFacts("m", "r\u00e9"), SamplingParams(seed=3, stop_strings=("a", "b")))
            span.submitted("w")
            span.first_token(0.25)
            for number, loss in enumerate(("died", ""), start=1):
                span.attempt(number, "w", began=now, ended=now + 1, tokens=2, loss=loss)
            span.fail(NoWorkerError("none"))
    spans = memory.get_finished_spans()
    assert any(each.links for each in spans)
    assert any(each.events for each in spans)
    encoded = _GrpcSpanExporter(endpoint="127.0.0.1:1", insecure=True)._translate_data(spans)
    assert str(encoded).splitlines() == str(encode_spans(spans)).splitlines()


@pytest.mark.parametrize("value", [None, 1 << 63, "\ud800", ["a", None], object()])
def test_span_with_a_value_that_otlp_lacks_loses_that_attribute_alone(value: Any) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    provider.get_tracer("t").start_span("s").end()
    (span,) = memory.get_finished_spans()
    span._status = Status(StatusCode.ERROR, "cannot read \udcff")
    span._attributes = {"first": 1, "bad": value, "mode": _Mode.FAST, "last": "x"}
    encoded = _GrpcSpanExporter(endpoint="127.0.0.1:1", insecure=True)._translate_data([span])
    (sent,) = encoded.resource_spans[0].scope_spans[0].spans
    assert sent.status.message == "cannot read ?"
    assert [(each.key, each.value.WhichOneof("value")) for each in sent.attributes] == [
        ("first", "int_value"),
        ("mode", "string_value"),
        ("last", "string_value"),
    ]


class _Mode(StrEnum):
    FAST = "fast"
