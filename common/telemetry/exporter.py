"""Export of spans by OTLP/gRPC that can not disturb the service.

A dead collector costs one warning line, whatever the SDK has to say about it, and a bounded time at shutdown (the SDK's
own takes 7 s and more).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = structlog.get_logger(__name__)

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# The SDK logs every retry here, and stack traces.
_SDK_LOGGERS: Final = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")


def endpoint() -> str:
    """The collector's address from the standard variables; empty when tracing is off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    return next((os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)), "")


class Export:
    """A tracer provider that exports to the collector of the environment's variables, in a thread of its own.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME says otherwise.
        instance_id: `service.instance.id`.
    """

    def __init__(self, service_name: str, instance_id: str) -> None:
        self._exporter = _Exporter(endpoint())
        name = os.environ.get("OTEL_SERVICE_NAME") or service_name
        resource = Resource.create(
            {"service.name": name, "service.instance.id": instance_id, "service.version": version("fissile")}
        )
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def shutdown(self, timeout_s: float) -> None:
        """Sends what is left; gives up after `timeout_s`."""
        thread = threading.Thread(target=self.provider.shutdown, name="trace-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._exporter.abandon()


class _Exporter(SpanExporter):
    """The SDK's exporter, with its failures as one warning."""

    def __init__(self, address: str) -> None:
        self._otlp = OTLPSpanExporter()
        self._address = address
        self._lock = threading.Lock()
        self._warned = False
        for name in _SDK_LOGGERS:
            logging.getLogger(name).addFilter(self._heard)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch; a failure loses it."""
        result = self._otlp.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._warn()
        return result

    def shutdown(self) -> None:
        """Closes the connection; the last call, after the exporting thread has ended."""
        self._otlp.shutdown()
        for name in _SDK_LOGGERS:
            logging.getLogger(name).removeFilter(self._heard)

    def abandon(self) -> None:
        """Breaks off an export that is under way."""
        self._warn()
        self._otlp.shutdown()

    def _heard(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self._warn()
        return False

    def _warn(self) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            log.warning("traces are lost: the collector does not take them", endpoint=self._address)
