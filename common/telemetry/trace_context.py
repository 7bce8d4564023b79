"""W3C trace context in gRPC metadata and between our processes. Pure but for the counter of failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.telemetry import names
from common.telemetry.failures import count_failure

Metadata = Iterable[tuple[str, str | bytes]]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
# Longest trace parent that is parsed, in bytes. Version 00 has 55.
_MAX_TRACEPARENT: Final = 256
# Most entries of a trace state (W3C Trace Context).
_MAX_TRACESTATE: Final = 32
# End of our entry in a trace state that asks for steps.
_WITH_STEPS: Final = ".steps"


def extract(metadata: Metadata | None) -> Context:
    """The trace context of gRPC metadata; an empty one when there is none or it is malformed."""
    wanted = (names.TRACEPARENT, names.TRACESTATE)
    pairs = ((key.lower(), value) for key, value in metadata or ())
    carrier = {key: value for key, value in pairs if key in wanted and isinstance(value, str)}
    try:
        return _PROPAGATOR.extract(carrier, Context())
    except Exception:
        count_failure("traces")
        return Context()


def inject(context: Context) -> tuple[str, str]:
    """`traceparent` and `tracestate` of a context; empty strings for an empty context."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get(names.TRACEPARENT, ""), carrier.get(names.TRACESTATE, "")


def traceparent_of(metadata: Metadata | None) -> str:
    """The `traceparent` of gRPC metadata; empty when there is none or it is malformed."""
    # Most calls have none, so this must be cheap, also for malformed ones.
    found = next((value for key, value in metadata or () if key == names.TRACEPARENT), "")
    return inject(extract([(names.TRACEPARENT, found)]))[0] if 0 < len(found) <= _MAX_TRACEPARENT else ""


def trace_id_of(traceparent: str) -> str:
    """The trace id in a `traceparent` or `traceresponse`, 32 hex digits; empty when there is none."""
    fields = traceparent.split("-")
    return fields[1] if len(fields) >= 4 and len(fields[1]) == 32 else ""


def with_operation(tracestate: str, operation: str, *, has_steps: bool = False) -> str:
    """The trace state with our entry in front: the operation that the worker's span names, and if it has steps."""
    header = [tracestate] if tracestate else []
    others = [each for each in TraceState.from_header(header).items() if each[0] != names.TRACESTATE_KEY]
    entry = operation + (_WITH_STEPS if has_steps else "")
    return TraceState([(names.TRACESTATE_KEY, entry), *others[: _MAX_TRACESTATE - 1]]).to_header()


def operation_in(context: Context) -> tuple[str, bool]:
    """The operation that a router added to the trace state, "" without one; and True if the trace is to have steps."""
    entry = trace.get_current_span(context).get_span_context().trace_state.get(names.TRACESTATE_KEY, "")
    return entry.removesuffix(_WITH_STEPS), entry.endswith(_WITH_STEPS)


def asks_for_steps(metadata: Metadata | None) -> bool:
    """True if the client wants the engine steps of its request in the trace."""
    return any(key == names.TRACE_STEPS and value not in ("", "0") for key, value in metadata or ())
