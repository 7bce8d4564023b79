"""A collector of traces and metrics in this process: OTLP/gRPC on a real socket, for what really goes over the wire.

with OtlpReceiver() as receiver:
    environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
    ...
    span = receiver.wait_for("worker.generate")[0]
    running = receiver.wait_for_metric("fissile.engine.sequences.running", lambda points: points[-1].value == 0)
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from common.telemetry.names import WAIT_MS

KINDS = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT", 4: "PRODUCER", 5: "CONSUMER"}
STATUSES = {0: "UNSET", 1: "OK", 2: "ERROR"}


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector got it; ids in hex, times in Unix nanoseconds; `waits` are its events with a time."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    start_ns: int
    end_ns: int
    status: str
    status_message: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    waits: dict[str, float]
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReceivedPoint:
    """One value of a metric as the collector got it.

    `kind` is `gauge`, `sum` (monotonic, cumulative) or `histogram` (cumulative): then `value` is the number of values,
    `total` their sum, and `buckets` how many are at most each bound, with the bound. `traces` are the trace ids of its
    exemplars.
    """

    service: str
    instance: str
    name: str
    unit: str
    kind: str
    value: float
    attributes: dict[str, Any]
    total: float = 0.0
    buckets: tuple[tuple[float, int], ...] = ()
    traces: frozenset[str] = frozenset()


class _MetricsServicer(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, take: Callable[[metrics_service_pb2.ExportMetricsServiceRequest], None]) -> None:
        self._take = take

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._take(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans and metrics while it is open, in threads of its own: a blocked event loop does not stop it."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self._points: list[ReceivedPoint] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        metrics = _MetricsServicer(self._take_metrics)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._arrived:
            self._spans.extend(_spans(request))
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def _take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._arrived:
            self._points.extend(_points(request))
            self._arrived.notify_all()

    @property
    def points(self) -> list[ReceivedPoint]:
        with self._arrived:
            return list(self._points)

    def wait_for_metric(
        self, name: str, ready: Callable[[list[ReceivedPoint]], bool] = bool, timeout_s: float = 60.0
    ) -> list[ReceivedPoint]:
        """All points of this name in the order of their coming, as soon as they are `ready`."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while not (found := [point for point in self._points if point.name == name]) or not ready(found):
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"metric {name!r} after {timeout_s} s: {found[-3:]}")
        return found

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._arrived:
            return list(self._spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    async def until_received(self, name: str, count: int = 1) -> None:
        """Waits until so many spans of this name are there, beside the loop that makes them.

        While it runs: a process that ends gives what is left a second.
        """
        await asyncio.to_thread(self.wait_for, name, count)

    def wait_for(self, name: str, count: int = 1, timeout_s: float = 60.0) -> list[ReceivedSpan]:
        """The spans of this name, as soon as there are `count` of them."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while len(found := [span for span in self._spans if span.name == name]) < count:
                if not self._arrived.wait(deadline - time.monotonic()):
                    seen = sorted({span.name for span in self._spans})
                    raise TimeoutError(f"{len(found)} of {count} spans {name!r} after {timeout_s} s; seen: {seen}")
        return found


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        _received(span, _values(resource.resource.attributes))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _received(span: trace_pb2.Span, resource: dict[str, Any]) -> ReceivedSpan:
    events = [(event.name, _values(event.attributes).get(WAIT_MS)) for event in span.events]
    return ReceivedSpan(
        service=resource.get("service.name", ""),
        instance=resource.get("service.instance.id", ""),
        name=span.name,
        kind=KINDS[span.kind],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=STATUSES[span.status.code],
        status_message=span.status.message,
        attributes=_values(span.attributes),
        events=tuple(name for name, wait_ms in events if wait_ms is None),
        waits={name: wait_ms for name, wait_ms in events if wait_ms is not None},
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _points(request: metrics_service_pb2.ExportMetricsServiceRequest) -> Iterator[ReceivedPoint]:
    for resource in request.resource_metrics:
        owner = _values(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                yield from _points_of(metric, owner)


def _points_of(metric: metrics_pb2.Metric, owner: dict[str, Any]) -> Iterator[ReceivedPoint]:
    kind = metric.WhichOneof("data") or ""
    if kind == "sum":
        assert metric.sum.is_monotonic
        assert metric.sum.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    for point in getattr(metric, kind).data_points:
        histogram = kind == "histogram"
        bounds = (*point.explicit_bounds, math.inf) if histogram else ()
        yield ReceivedPoint(
            service=owner.get("service.name", ""),
            instance=owner.get("service.instance.id", ""),
            name=metric.name,
            unit=metric.unit,
            kind=kind,
            value=point.count if histogram else getattr(point, point.WhichOneof("value")),
            attributes=_values(point.attributes),
            total=point.sum if histogram else 0.0,
            buckets=tuple(zip(bounds, point.bucket_counts, strict=True)) if histogram else (),
            traces=frozenset(exemplar.trace_id.hex() for exemplar in point.exemplars),
        )


def _values(attributes: Any) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
