"""Export of spans and metrics by OTLP, over gRPC or HTTP, that cannot disturb the service.

An unreachable collector costs one log line, and one that refuses a signal another, however much the SDK logs about it.
Shutdown takes a bounded time; the SDK's own takes 7 s and more.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal

import grpc
import structlog
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
from opentelemetry.sdk.metrics import Exemplar, MeterProvider, ObservableCounter, ObservableGauge
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.util.types import Attributes

from common.limits import MAX_EXPORTED_SERIES
from common.telemetry import names
from common.telemetry.failures import count_spans
from common.telemetry.prometheus import HistogramPoint, SeriesHistogram
from common.telemetry.tail_sampling import RecordAll, SlowSpanKeeper
from common.version import fissile_version

log = structlog.get_logger(__name__)

Signal = Literal["traces", "metrics"]

# The SDK logs every retry to these, with stack traces.
_SDK_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)
GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
# Statuses of an export without an answer. CANCELLED is that of an export that was broken off.
_AWAY: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
_SAID_AWAY: Final = "away"
# Fields of OTLP's AnyValue, and flags of spans whose parent is in this process, and in another one.
_FIELDS: Final = {str: "string_value", bool: "bool_value", float: "double_value", int: "int_value"}
_LOCAL: Final = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE: Final = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class ExportError(Exception):
    """The environment asks for an unknown kind of export; the message is one line that says what to change."""


def protocol(signal: Signal) -> str:
    """GRPC or HTTP, from OpenTelemetry's standard variables.

    Raises:
        ExportError: the variables name another protocol.
    """
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next((name for name in variables if os.environ.get(name)), "")
    wanted = os.environ.get(variable, GRPC).strip().lower()
    if wanted not in (GRPC, HTTP):
        raise ExportError(f"{variable}={wanted} is not served; use {GRPC} or {HTTP}")
    return wanted


def endpoint(signal: Signal = "traces") -> str:
    """The collector's address from OpenTelemetry's standard variables; "" when the signal is off."""
    name = signal.upper()
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or os.environ.get(f"OTEL_{name}_EXPORTER", "").strip().lower() == "none":
        return ""
    variables = (f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((os.environ[variable] for variable in variables if os.environ.get(variable)), "")


class TraceExport:
    """Tracer provider that exports to the environment's collector, in a thread of its own.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME is set.
        instance_id: `service.instance.id`.
        slow_s: keeps the spans of requests that take at least this time, or fail; None leaves it to the sampler.
    """

    def __init__(self, service_name: str, instance_id: str, slow_s: float | None = None) -> None:
        self._exporter = _SpanExporter()
        self.provider = TracerProvider(resource=_resource(service_name, instance_id), shutdown_on_exit=False)
        processor: SpanProcessor = _SpanQueue(self._exporter)
        if slow_s is not None:
            self.provider.sampler = RecordAll(self.provider.sampler)
            processor = SlowSpanKeeper(processor, slow_s)
        self.provider.add_span_processor(processor)

    def shutdown(self, timeout_s: float) -> None:
        """Sends the remaining spans; gives up after `timeout_s`."""
        _bounded(self.provider.shutdown, timeout_s, self._exporter.abandon)


class MetricExport:
    """Meter provider that exports to the environment's collector, in a thread of its own.

    It exports every OTEL_METRIC_EXPORT_INTERVAL milliseconds, 60,000 by default, and at its end. See TraceExport.
    """

    def __init__(self, service_name: str, instance_id: str) -> None:
        self._exporter = _MetricExporter()
        # The SDK never forgets the labels of a worker that left. Beyond its limit, 2,000 by default, every new worker
        # would be merged into one overflow series.
        limits: dict[type, int] = dict.fromkeys((ObservableGauge, ObservableCounter), MAX_EXPORTED_SERIES)
        reader = PeriodicExportingMetricReader(self._exporter, cardinality_limits=limits)
        self.provider = MeterProvider([reader], _resource(service_name, instance_id), shutdown_on_exit=False)

    def add_histogram(self, name: str, unit: str, description: str, histogram: SeriesHistogram) -> None:
        """Exports a histogram that the SDK does not know, always cumulative."""
        self._exporter.histograms.append(_SeriesMetric(name, unit, description, histogram, time.time_ns()))

    def shutdown(self, timeout_s: float) -> None:
        """Sends the last figures; gives up after `timeout_s`."""
        _bounded(self.provider.shutdown, timeout_s, self._exporter.abandon)


@dataclass(frozen=True, slots=True)
class _SeriesMetric:
    """A histogram of ours under its name, counted from `began`, Unix nanoseconds."""

    name: str
    unit: str
    description: str
    histogram: SeriesHistogram
    began: int

    def metric(self, now: int) -> Metric:
        """The histogram as the SDK's exporters take it."""
        points = [self._point(point, now) for point in self.histogram.points()]
        return Metric(self.name, self.description, self.unit, Histogram(points, AggregationTemporality.CUMULATIVE))

    def _point(self, point: HistogramPoint, now: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=dict(point.labels),
            start_time_unix_nano=self.began,
            time_unix_nano=now,
            count=sum(point.counts),
            sum=point.total,
            bucket_counts=point.counts,
            explicit_bounds=self.histogram.bounds,
            # Not known; the proto has them as optional fields.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
            exemplars=[
                Exemplar({}, each.value, int(each.time_s * 1e9), int(each.span_id, 16), int(each.trace_id, 16))
                for each in point.exemplars.values()
            ],
        )


@dataclass(slots=True)
class _Collector:
    """Log state of one collector: each status is logged once, until an export works."""

    users: int = 0
    told: set[str] = field(default_factory=set)


class _Fate:
    """Outcome of one signal's exports. Each change is one log line, and the SDK's own reports are dropped."""

    _collectors: ClassVar[dict[str, _Collector]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    # Signal that this thread is exporting.
    _current: ClassVar[threading.local] = threading.local()

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._address = endpoint(signal)
        self._said = False
        with self._lock:
            self._collector = self._collectors.setdefault(self._address, _Collector())
            self._collector.users += 1
            for name in _SDK_LOGGERS:
                filters = logging.getLogger(name).filters
                # Before the SDK's own filter, which drops records that differ only in signal and status.
                if _Fate._heard not in filters:
                    filters.insert(0, _Fate._heard)

    def release(self) -> None:
        """Ends the signal. The collector's state is forgotten with its last signal."""
        with self._lock:
            self._collector.users -= 1
            if not self._collector.users:
                self._collectors.pop(self._address, None)
            if not self._collectors:
                for name in _SDK_LOGGERS:
                    logging.getLogger(name).removeFilter(_Fate._heard)

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Attributes the SDK's log records of this thread to this signal while the block runs."""
        self._current.fate, self._said = self, False
        try:
            yield
        except Exception:
            self.fails()
            raise
        finally:
            self._current.fate = None

    def ends(self, *, well: bool) -> None:
        """Notes the end of an export."""
        if well:
            self._works()
        elif not self._said:
            self.fails()

    def _works(self) -> None:
        with self._lock:
            told = self._told()
            self._collector.told -= told
        if told:
            log.info(f"{self._signal} arrive again", signal=self._signal, endpoint=self._address)

    def fails(self, status: str = "") -> None:
        """Notes that an export was lost, or is about to be."""
        # While a collector is unreachable, every signal reports the same.
        away = not status or status in _AWAY
        key = _SAID_AWAY if away else f"{self._signal} {status}"
        self._said = True
        with self._lock:
            # Without a status it is logged only if nothing else was.
            first = key not in self._collector.told if status else not self._told()
            if first:
                self._collector.told.add(key)
        if first:
            log.warning(
                f"{self._signal} are lost: the collector {'does not answer' if away else 'refuses them'}",
                signal=self._signal,
                endpoint=self._address,
                status=status or "none",
                cure=f"OTEL_{self._signal.upper()}_EXPORTER=none, unless it should take them",
            )

    def _told(self) -> set[str]:
        return {key for key in self._collector.told if key == _SAID_AWAY or key.startswith(f"{self._signal} ")}

    @classmethod
    def _heard(cls, record: logging.LogRecord) -> bool:
        fate = getattr(cls._current, "fate", None)
        if fate is not None and record.levelno >= logging.WARNING:
            fate.fails(_status_of(record))
        return False


def _status_of(record: logging.LogRecord) -> str:
    """The status of gRPC or HTTP in a log record of the SDK; "" if it has none."""
    said = record.args if isinstance(record.args, tuple) else ()
    codes = (each.name for each in said if isinstance(each, grpc.StatusCode))
    return next(codes, next((f"HTTP {each}" for each in said if isinstance(each, int) and 100 <= each < 600), ""))


class _SpanQueue(BatchSpanProcessor):
    """The SDK's queue of spans, which counts those that it drops because it is full."""

    def __init__(self, exporter: SpanExporter) -> None:
        super().__init__(exporter)
        # Without a bound of its own, so that each dropped span is one that `on_end` took out.
        self._batch_processor._queue = deque()

    def on_end(self, span: ReadableSpan) -> None:
        """Puts a sampled span into the queue; a full queue loses its oldest one."""
        super().on_end(span)
        queue = self._batch_processor._queue
        while len(queue) > self._batch_processor._max_queue_size:
            with contextlib.suppress(IndexError):
                queue.pop()
                count_spans("dropped")


class _GrpcSpanExporter(OTLPSpanExporter):
    """The SDK's exporter over gRPC with an encoder that takes half of the time, and holds the GIL for as long."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        """The spans of one process, which have one resource and one scope, in OTLP."""
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add(resource={}, schema_url=data[0].resource.schema_url)
        _add_attributes(resource.resource.attributes, data[0].resource.attributes)
        spans = resource.scope_spans.add(scope={"name": names.TRACER}).spans
        for span in data:
            # Errors of the system may quote names of files that are not UTF-8.
            parent, message = span.parent, (span.status.description or "").encode(errors="replace").decode()
            added = spans.add(
                **_ids(span.context),
                trace_state=span.context.trace_state.to_header() if span.context else "",
                name=span.name,
                parent_span_id=b"" if parent is None else parent.span_id.to_bytes(8, "big"),
                # OTLP counts from 1: 0 is an unknown kind.
                kind=span.kind.value + 1,
                start_time_unix_nano=span.start_time,
                end_time_unix_nano=span.end_time,
                status={"code": span.status.status_code.value, "message": message},
                flags=_REMOTE if parent is not None and parent.is_remote else _LOCAL,
            )
            _add_attributes(added.attributes, span.attributes)
            for event in span.events:
                to = added.events.add(name=event.name, time_unix_nano=event.timestamp)
                _add_attributes(to.attributes, event.attributes)
            for link in span.links:
                added.links.add(**_ids(link.context), flags=_LOCAL)
        return request


def _ids(context: Any) -> dict[str, Any]:
    return {"trace_id": context.trace_id.to_bytes(16, "big"), "span_id": context.span_id.to_bytes(8, "big")}


def _add_attributes(into: Any, attributes: Attributes) -> None:
    """Adds attributes to a span, event or resource; leaves out values that OTLP cannot hold, as the SDK does."""
    for name, value in (attributes or {}).items():
        count = len(into)
        try:
            into.add(key=name, value=_any_value(value))
        except (TypeError, ValueError):
            del into[count:]


def _any_value(value: Any) -> dict[str, Any]:
    """A value of a span's attribute as arguments of OTLP's AnyValue."""
    field = _FIELDS.get(type(value)) or next((name for kind, name in _FIELDS.items() if isinstance(value, kind)), "")
    return {field: value} if field else {"array_value": {"values": [*map(_any_value, value)]}}


class _SpanExporter(SpanExporter):
    """The SDK's span exporter; its failures become our warnings."""

    def __init__(self) -> None:
        self._otlp: SpanExporter = _http("trace") if protocol("traces") == HTTP else _GrpcSpanExporter()
        self._fate = _Fate("traces")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch; a failure loses the batch."""
        with self._fate.exporting():
            result = self._otlp.export(spans)
        self._fate.ends(well=result is SpanExportResult.SUCCESS)
        count_spans("exported" if result is SpanExportResult.SUCCESS else "refused", len(spans))
        return result

    def shutdown(self) -> None:
        """Closes the connection; the last call, after the exporting thread has ended."""
        self._otlp.shutdown()
        self._fate.release()

    def abandon(self) -> None:
        """Breaks off a running export."""
        self._fate.fails()
        self._otlp.shutdown()


class _MetricExporter(MetricExporter):
    """The SDK's metric exporter; its failures become our warnings."""

    def __init__(self) -> None:
        self._otlp = _http("metric") if protocol("metrics") == HTTP else OTLPMetricExporter()
        # The SDK's reader asks for these two.
        super().__init__(self._otlp._preferred_temporality, self._otlp._preferred_aggregation)
        self._fate = _Fate("metrics")
        self.histograms: list[_SeriesMetric] = []

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Sends the figures; a failure loses them. The next export has newer ones."""
        with self._fate.exporting():
            result = self._otlp.export(self._with_histograms(metrics_data), timeout_millis, **kwargs)
        self._fate.ends(well=result is MetricExportResult.SUCCESS)
        return result

    def _with_histograms(self, metrics_data: MetricsData) -> MetricsData:
        """The figures and our histograms. A process has figures of one resource and one scope."""
        (resource,) = metrics_data.resource_metrics
        (scope,) = resource.scope_metrics
        now = time.time_ns()
        ours = [each.metric(now) for each in self.histograms]
        scope = replace(scope, metrics=[*scope.metrics, *(metric for metric in ours if metric.data.data_points)])
        return MetricsData([replace(resource, scope_metrics=[scope])])

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Flushes the inner exporter; False if that takes too long. Has nothing to wait for."""
        return self._otlp.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Closes the connection; the last call, after the exporting thread has ended."""
        self._otlp.shutdown(timeout_millis, **kwargs)
        self._fate.release()

    def abandon(self) -> None:
        """Breaks off a running export."""
        self._fate.fails()
        self._otlp.shutdown()


def _http(signal: Literal["trace", "metric"]) -> Any:
    # Importing it takes memory and a tenth of a second, which exports over gRPC should not cost.
    module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.http.{signal}_exporter")
    return module.OTLPSpanExporter() if signal == "trace" else module.OTLPMetricExporter()


def _resource(service_name: str, instance_id: str) -> Resource:
    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    return Resource.create(
        {"service.name": name, "service.instance.id": instance_id, "service.version": fissile_version()}
    )


def resource_labels(service_name: str, instance_id: str) -> dict[str, str]:
    """Attributes of this process as a TraceExport with these arguments sends them, without the SDK's own."""
    attributes = _resource(service_name, instance_id).attributes
    return {name: str(value) for name, value in attributes.items() if not name.startswith("telemetry.sdk.")}


def _bounded(shutdown: Callable[[], None], timeout_s: float, abandon: Callable[[], None]) -> None:
    thread = threading.Thread(target=shutdown, name="telemetry-shutdown", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        abandon()
