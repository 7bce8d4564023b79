"""Export of spans and metrics by OTLP/gRPC that can not disturb the service.

A dead collector costs one warning line, whatever the SDK has to say about it, and a bounded time at shutdown (the SDK's
own takes 7 s and more).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, Final, Literal

import structlog
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = structlog.get_logger(__name__)

Signal = Literal["traces", "metrics"]

# The SDK logs every retry here, and stack traces.
_SDK_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)


def endpoint(signal: Signal = "traces") -> str:
    """The collector's address from the standard variables; empty when the signal is off."""
    name = signal.upper()
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or os.environ.get(f"OTEL_{name}_EXPORTER", "").strip().lower() == "none":
        return ""
    variables = (f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next((os.environ[variable] for variable in variables if os.environ.get(variable)), "")


class TraceExport:
    """A tracer provider that exports to the collector of the environment's variables, in a thread of its own.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME says otherwise.
        instance_id: `service.instance.id`.
    """

    def __init__(self, service_name: str, instance_id: str) -> None:
        self._exporter = _SpanExporter()
        self.provider = TracerProvider(resource=_resource(service_name, instance_id), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def shutdown(self, timeout_s: float) -> None:
        """Sends what is left; gives up after `timeout_s`."""
        _bounded(self.provider.shutdown, timeout_s, self._exporter.abandon)


class MetricExport:
    """A meter provider that exports to the collector of the environment's variables, in a thread of its own.

    It does so every OTEL_METRIC_EXPORT_INTERVAL milliseconds, 60,000 by default, and once more at the end.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME says otherwise.
        instance_id: `service.instance.id`.
    """

    def __init__(self, service_name: str, instance_id: str) -> None:
        self._exporter = _MetricExporter()
        reader = PeriodicExportingMetricReader(self._exporter)
        self.provider = MeterProvider([reader], _resource(service_name, instance_id), shutdown_on_exit=False)

    def shutdown(self, timeout_s: float) -> None:
        """Sends the last figures; gives up after `timeout_s`."""
        _bounded(self.provider.shutdown, timeout_s, self._exporter.abandon)


class _Loss:
    """What is said when a collector takes nothing: one line for all signals that go to it."""

    _shared: ClassVar[dict[str, _Loss]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, address: str) -> None:
        self._address = address
        self._users = 0
        self._warned = False

    @classmethod
    def at(cls, address: str) -> _Loss:
        """That of an address, until everybody who asked has called `release`."""
        with cls._lock:
            loss = cls._shared.setdefault(address, cls(address))
            loss._users += 1
            if loss._users == 1:
                for name in _SDK_LOGGERS:
                    logging.getLogger(name).addFilter(loss._heard)
            return loss

    def release(self) -> None:
        """This user is done."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._shared[self._address]
                for name in _SDK_LOGGERS:
                    logging.getLogger(name).removeFilter(self._heard)

    def warn(self, what: str) -> None:
        """Says it, the first time."""
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            log.warning(f"{what} lost: the collector does not take them", endpoint=self._address)

    def _heard(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.warn("traces or metrics are")
        return False


class _SpanExporter(SpanExporter):
    """The SDK's exporter, with its failures as one warning."""

    def __init__(self) -> None:
        self._otlp = OTLPSpanExporter()
        self._loss = _Loss.at(endpoint("traces"))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch; a failure loses it."""
        result = self._otlp.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._loss.warn("traces are")
        return result

    def shutdown(self) -> None:
        """Closes the connection; the last call, after the exporting thread has ended."""
        self._otlp.shutdown()
        self._loss.release()

    def abandon(self) -> None:
        """Breaks off an export that is under way."""
        self._loss.warn("traces are")
        self._otlp.shutdown()


class _MetricExporter(OTLPMetricExporter):
    """The SDK's exporter, with its failures as one warning. A reader asks more of it than its methods."""

    def __init__(self) -> None:
        super().__init__()
        self._loss = _Loss.at(endpoint("metrics"))

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Sends the figures; a failure loses them, and the next ones are newer."""
        result = super().export(metrics_data, timeout_millis, **kwargs)
        if result is not MetricExportResult.SUCCESS:
            self._loss.warn("metrics are")
        return result

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Closes the connection; the last call, after the exporting thread has ended."""
        super().shutdown(timeout_millis, **kwargs)
        self._loss.release()

    def abandon(self) -> None:
        """Breaks off an export that is under way."""
        self._loss.warn("metrics are")
        super().shutdown()


def _resource(service_name: str, instance_id: str) -> Resource:
    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    return Resource.create(
        {"service.name": name, "service.instance.id": instance_id, "service.version": version("fissile")}
    )


def _bounded(shutdown: Callable[[], None], timeout_s: float, abandon: Callable[[], None]) -> None:
    thread = threading.Thread(target=shutdown, name="telemetry-shutdown", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        abandon()
