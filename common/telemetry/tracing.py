"""Spans of one process, which end once. One trace of a request has spans of its router and its workers:

    client's span
      fissile.v1.InferenceService/Generate   SERVER, router; events `submitted`, `first_token`
        tokenize, queue                      INTERNAL, router: making the prompt; waiting for the first worker
        wait for worker                      INTERNAL, router: waiting for another worker after a loss
        attempt                              CLIENT, router: one per worker, when a request needed more than one
        worker.generate                      SERVER, worker; events `preempted`. Its router waits, so it is no CONSUMER
          queue, prefill, decode             INTERNAL, made at the end from the sequence's timestamps

Not opentelemetry-instrumentation-grpc: it leaks spans and records cancelled calls as successes. The SDK samples; the
rest of a span is kept here until its end, which takes half of the SDK's time.

Invariants: every started span ends exactly once, however its request ends (`open_spans` counts the open ones). There is
no span event per token, and no text of prompts or answers in attributes. With tracing off the client's trace context
still crosses the hop, and nothing is recorded.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Event, ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from common.errors import ApiError
from common.limits import TELEMETRY_SHUTDOWN_S
from common.telemetry import exporter, names
from common.telemetry.failures import count_failure
from common.telemetry.ledger import Ledger

# Statuses that the RPC conventions count as server errors, plus ABORTED, which here means a lost worker.
_SERVER_ERRORS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.ABORTED,
    }
)
_SCOPE: Final = InstrumentationScope(names.TRACER)
_LEAST_WAIT_S: Final = 1e-3


def setup_tracing(service_name: str, instance_id: str, slow_s: float | None = None) -> SpanFactory:
    """Tracing by the environment's settings: off unless OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME is set.
        instance_id: `service.instance.id`, unique per process start.
        slow_s: requests of at least this time, and failed ones, are kept whatever the sampler says; None keeps none.
    """
    if not exporter.endpoint():
        return SpanFactory()
    export = exporter.TraceExport(service_name, instance_id, slow_s)
    return SpanFactory(export.provider, export)


class SpanFactory:
    """Makes the spans of one process. Without a provider it records nothing."""

    def __init__(self, provider: TracerProvider | None = None, export: exporter.TraceExport | None = None) -> None:
        tracer = provider.get_tracer(names.TRACER) if provider is not None else None
        self._tracer = tracer if isinstance(tracer, Tracer) else None
        self._export = export
        self._open: set[OpenSpan] = set()
        self._server: dict[str, AttributeValue] = {}

    @property
    def enabled(self) -> bool:
        """True if spans are recorded."""
        return self._tracer is not None

    def listens_at(self, address: str) -> None:
        """Names this process's host:port in later spans; a wildcard address is shown as the host's name."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        name = socket.gethostname() if host in ("", "::", "0.0.0.0") else host
        self._server = {names.SERVER_ADDRESS: name, names.SERVER_PORT: int(port)}

    def open_spans(self) -> int:
        """Number of spans that have started and not ended."""
        return len(self._open)

    def shutdown(self, timeout_s: float = TELEMETRY_SHUTDOWN_S) -> None:
        """Sends the remaining spans, within `timeout_s` seconds; later spans are dropped."""
        if self._export is not None:
            self._export.shutdown(timeout_s)

    def start(
        self, name: str, parent: Context, attributes: Mapping[str, AttributeValue], *, start_ns: int | None = None
    ) -> OpenSpan | None:
        """Starts a span of kind SERVER; None with tracing off, or if it cannot be made."""
        if self._tracer is None:
            return None
        try:
            known = {**attributes, **self._server}
            span = self._tracer.start_span(name, parent, SpanKind.SERVER, known, start_time=start_ns)
            return OpenSpan(span, parent, known, self._tracer, self._open)
        except Exception:
            count_failure("traces")
            return None


class OpenSpan:
    """A span that ends once. Attributes and events of an ended one are left out.

    Attributes:
        context: parent of its children.
        is_recorded: False if the sampler dropped it; then only its context counts.
    """

    def __init__(
        self, span: Span, parent: Context, attributes: dict[str, AttributeValue], tracer: Tracer, opened: set[OpenSpan]
    ) -> None:
        self.context = trace.set_span_in_context(span, parent)
        self.is_recorded = isinstance(span, ReadableSpan)
        self._span = span
        self._attributes = attributes
        self._events: list[Event] = []
        self._tracer = tracer
        self._opened = opened
        # One offset for all children, so that the end of a stage is the start of the next one.
        self._offset_ns = wall_offset_ns()
        opened.add(self)

    @property
    def ended(self) -> bool:
        """True if `end` or `fail` was called."""
        return self not in self._opened

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Sets attributes."""
        if not self.ended:
            self._attributes.update(attributes)

    def add_event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, at_ns: int | None = None
    ) -> None:
        """Adds an event, now or at `at_ns` of the Unix epoch."""
        if not self.ended:
            self._events.append(Event(name, attributes, at_ns))

    def add_waits(self, ledger: Ledger, waits: Collection[names.Stage], now: float) -> None:
        """Adds an event for each of the `waits` of a millisecond or more: when it ended, and its time until `now`."""
        for stage, seconds in ledger.parts(now).items():
            if stage in waits and seconds >= _LEAST_WAIT_S:
                ended = self.unix_ns(ledger.ended.get(stage, now))
                self.add_event(stage, {names.WAIT_MS: round(1e3 * seconds, 3)}, ended)

    def end(self, code: grpc.StatusCode, *, message: str = "", reason: str = "", end_ns: int | None = None) -> None:
        """Ends the span with a status; later calls do nothing."""
        if self.ended:
            return
        self._opened.discard(self)
        span, status = self._span, Status()
        if not isinstance(span, ReadableSpan):
            return
        self._attributes |= {names.RPC_STATUS: code.name} | ({names.ERROR_REASON: reason} if reason else {})
        if code in _SERVER_ERRORS:
            self._attributes[names.ERROR_TYPE] = code.name
            status = Status(StatusCode.ERROR, message or None)
        ended = time.time_ns() if end_ns is None else end_ns
        given = span.context, span.parent, self._tracer.resource, self._attributes, self._events, ()
        whole = ReadableSpan(span.name, *given, span.kind, None, status, span.start_time, ended, _SCOPE)
        self._tracer.span_processor.on_end(whole)

    def fail(self, error: ApiError | grpc.StatusCode, end_ns: int | None = None) -> None:
        """Ends the span with an error's status."""
        if isinstance(error, ApiError):
            self.end(error.code, message=error.message, reason=error.reason, end_ns=end_ns)
        else:
            self.end(error, end_ns=end_ns)

    def unix_ns(self, seconds: float) -> int:
        """Monotonic seconds as nanoseconds of the Unix epoch."""
        return self._offset_ns + nanoseconds(seconds)

    def add_child(
        self,
        name: str,
        began: float,
        ended: float,
        attributes: Mapping[str, AttributeValue],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
        link: SpanContext | None = None,
    ) -> SpanContext:
        """Records a child after its end; empty attributes are left out.

        Args:
            name: of the span.
            began: monotonic seconds.
            ended: monotonic seconds.
            attributes: of the span.
            kind: of the span.
            error: why it failed, "" if it did not.
            link: a span that caused it.
        """
        parent = self._span.get_span_context()
        ids = parent.trace_id, self._tracer.id_generator.generate_span_id()
        context = SpanContext(*ids, is_remote=False, trace_flags=parent.trace_flags, trace_state=parent.trace_state)
        if self.is_recorded:
            kept = {key: value for key, value in attributes.items() if value not in ("", None)}
            given = context, parent, self._tracer.resource, kept, (), [Link(link)] if link else ()
            status = Status(StatusCode.ERROR, error) if error else Status()
            begin, end = self.unix_ns(began), self.unix_ns(ended)
            self._tracer.span_processor.on_end(ReadableSpan(name, *given, kind, None, status, begin, end, _SCOPE))
        return context


def wall_offset_ns() -> int:
    """Offset between monotonic and Unix time, nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * 1e9)


def usage_attributes(
    reasons: Sequence[str], input_tokens: int, output_tokens: int, cached_tokens: int
) -> dict[str, Any]:
    """Token counts and finish reasons of a request or a sequence."""
    usage: dict[str, Any] = {
        names.INPUT_TOKENS: input_tokens,
        names.OUTPUT_TOKENS: output_tokens,
        names.CACHED_TOKENS: cached_tokens,
    }
    return usage | ({names.RESPONSE_FINISH_REASONS: tuple(reasons)} if reasons else {})
