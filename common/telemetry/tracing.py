"""Our own gRPC spans: a request's span on the router, a sequence's span on the worker, one trace across the hop.

    client's span
      fissile.v1.InferenceService/Generate   SERVER, router; events `submitted`, `first_token`
        tokenize, queue                      INTERNAL, router: making the prompt; waiting for the first worker
        wait for worker                      INTERNAL, router: waiting for another worker after a loss
        attempt                              CLIENT, router: one per worker, when a request needed more than one
        worker.generate                      SERVER, worker: the router waits for its result, so it is no CONSUMER
          queue, prefill, decode             INTERNAL, made at the end from the sequence's timestamps

Not opentelemetry-instrumentation-grpc: it leaks spans and records cancelled calls as successes.

Invariants: every started span ends exactly once, however its request ends (`open_spans` counts the open ones). There is
no span event per token, and no text of prompts or answers in attributes. With tracing off the client's trace context
still crosses the hop, and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from common.errors import ApiError
from common.limits import TELEMETRY_SHUTDOWN_S
from common.params.sampling_params import SamplingParams
from common.telemetry import exporter, names
from common.telemetry.failures import count_failure, harmless
from common.telemetry.logs import current_trace_id
from common.telemetry.prometheus import current_traceparent
from common.wire.draft_counts import Counts

Metadata = Iterable[tuple[str, str | bytes]]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_INT64_MAX: Final = 2**63 - 1
# Longest trace parent that is parsed, in bytes. Version 00 has 55.
_MAX_TRACEPARENT: Final = 256
# Most entries of a trace state (W3C Trace Context).
_MAX_TRACESTATE: Final = 32
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


def setup_tracing(service_name: str, instance_id: str) -> SpanFactory:
    """Tracing by the environment's settings: off unless OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME is set.
        instance_id: `service.instance.id`, unique per process start.
    """
    if not exporter.endpoint():
        return SpanFactory()
    export = exporter.TraceExport(service_name, instance_id)
    return SpanFactory(export.provider, export)


class _TracerShutdown(Protocol):
    def shutdown(self, timeout_s: float) -> None: ...


class SpanFactory:
    """Makes the spans of one process. Without a provider it records nothing."""

    def __init__(self, provider: TracerProvider | None = None, export: _TracerShutdown | None = None) -> None:
        self._tracer = provider.get_tracer(names.TRACER) if provider is not None else None
        self._export = export
        self._open: set[_OpenSpan] = set()

    @property
    def enabled(self) -> bool:
        """True if spans are recorded."""
        return self._tracer is not None

    def open_spans(self) -> int:
        """Number of spans that have started and not ended."""
        return len(self._open)

    def shutdown(self, timeout_s: float = TELEMETRY_SHUTDOWN_S) -> None:
        """Sends the remaining spans, within `timeout_s` seconds; later spans are dropped."""
        if self._export is not None:
            self._export.shutdown(timeout_s)

    def request_span(
        self, method: str, metadata: Metadata | None = None, *, operation: str = "", peer: str = ""
    ) -> RequestSpan:
        """Starts the router's span of an RPC.

        Args:
            method: fully qualified, without leading slash: `fissile.v1.InferenceService/Generate`.
            metadata: the call's invocation metadata, with the client's trace context.
            operation: `names.TEXT_COMPLETION` or `names.CHAT`; empty for an RPC that generates nothing.
            peer: the call's `context.peer()`.
        """
        context = extract(metadata)
        if self._tracer is None:
            return RequestSpan(*inject(context))
        attributes: dict[str, AttributeValue] = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method, **_peer(peer)}
        if operation:
            attributes |= {names.OPERATION: operation, names.PROVIDER: names.PROVIDER_FISSILE}
        try:
            span = self._tracer.start_span(method, context, SpanKind.SERVER, attributes)
            return _RecordedRequestSpan(_OpenSpan(span, context, self._open), self._tracer, operation)
        except Exception:
            count_failure("traces")
            return RequestSpan(*inject(context))

    def sequence_span(
        self,
        traceparent: str,
        tracestate: str = "",
        *,
        arrived: float,
        model: str = "",
        request_id: str = "",
        rid: str = "",
        worker_id: str = "",
    ) -> SequenceSpan:
        """Starts the worker's span of a sequence, at its arrival.

        Args:
            traceparent: of the router's span, as it came with the Submit (or in the metadata of a direct Generate).
            tracestate: likewise.
            arrived: monotonic seconds.
            model: the model's name.
            request_id: id of a request that came without a router; empty otherwise.
            rid: id of a router's sequence, as in log lines; empty otherwise.
            worker_id: this worker.
        """
        if self._tracer is None:
            return SequenceSpan()
        attributes: dict[str, AttributeValue] = {
            names.PROVIDER: names.PROVIDER_FISSILE,
            names.OPERATION: names.TEXT_COMPLETION,
            names.REQUEST_MODEL: model,
            names.RESPONSE_ID: request_id,
            names.RID: rid,
            names.WORKER_ID: worker_id,
        }
        context = extract([(names.TRACEPARENT, traceparent), (names.TRACESTATE, tracestate)])
        if _operation_in(context) == names.CHAT:
            attributes[names.OPERATION] = names.CHAT
        kept = {key: value for key, value in attributes.items() if value}
        start_ns = _wall_offset_ns() + _ns(arrived)
        try:
            span = self._tracer.start_span(names.WORKER_SPAN, context, SpanKind.SERVER, kept, start_time=start_ns)
            return _RecordedSequenceSpan(_OpenSpan(span, context, self._open), self._tracer)
        except Exception:
            count_failure("traces")
            return SequenceSpan()


class _OpenSpan:
    """A span that ends once."""

    def __init__(self, span: Span, parent: Context, registry: set[_OpenSpan]) -> None:
        self.span = span
        self.context = trace.set_span_in_context(span, parent)
        self._registry = registry
        registry.add(self)

    @property
    def ended(self) -> bool:
        return self not in self._registry

    def end(self, code: grpc.StatusCode, *, message: str = "", reason: str = "", end_ns: int | None = None) -> None:
        if self.ended:
            return
        self._registry.discard(self)
        self.span.set_attribute(names.RPC_STATUS, code.name)
        if reason:
            self.span.set_attribute(names.ERROR_REASON, reason)
        if code in _SERVER_ERRORS:
            self.span.set_attribute(names.ERROR_TYPE, code.name)
            self.span.set_status(Status(StatusCode.ERROR, message or None))
        self.span.end(end_ns)

    def fail(self, error: ApiError | grpc.StatusCode, end_ns: int | None = None) -> None:
        if isinstance(error, ApiError):
            self.end(error.code, message=error.message, reason=error.reason, end_ns=end_ns)
        else:
            self.end(error, end_ns=end_ns)


class RequestSpan:
    """The router's span of one RPC. This base class records nothing and passes the client's trace context on.

    Use it as a context manager around the RPC. Leaving it ends the span with the status of the exception that leaves
    (ApiError: its own, CancelledError: CANCELLED, any other: UNKNOWN), unless `finish` or `fail` has ended it already.
    Inside, log lines carry the trace id. All methods may be called at any time, any number of times.

    Attributes:
        traceparent: sent across the hop; "" without tracing and without a client's context.
        tracestate: sent across the hop; "" likewise.
    """

    def __init__(self, traceparent: str = "", tracestate: str = "") -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate
        self._outer = ("", "")

    @property
    def trace_id(self) -> str:
        """Trace id as 32 hex digits, or "". With tracing off it is that of the client's context."""
        return trace_id_of(self.traceparent)

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Trailing metadata that tells the client the trace id; empty if the client's own context is used."""
        return ()

    def request(self, *, model: str, request_id: str, params: SamplingParams) -> None:
        """Notes that the request has been validated."""

    def submitted(self, worker_id: str) -> None:
        """Notes that the request has been submitted to a worker."""

    def attempt(self, number: int, worker_id: str, *, began: float, ended: float, tokens: int, loss: str = "") -> None:
        """Records one of several attempts of the request, after its end: a worker that died sends no span of its own.

        Times are monotonic seconds; `loss` says why the attempt did not finish the request.
        """

    def phase(self, name: str, began: float, ended: float, *, worker_id: str = "", loss: str = "") -> None:
        """Records a stage of the request on the router.

        Args:
            name: one of `names`.
            began: monotonic seconds.
            ended: monotonic seconds.
            worker_id: the worker that it led to, "" for none.
            loss: why the previous worker was lost, "" if none was.
        """

    def first_token(self, ttft_s: float) -> None:
        """Notes that the first token is ready to send, `ttft_s` seconds after the request's arrival."""

    def usage(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
        worker_id: str = "",
        attempts: int = 1,
    ) -> None:
        """Notes the request's token counts at its end, successful or not. Counts are of delivered tokens."""

    def finish(self, finish_reasons: Iterable[str] = ()) -> None:
        """Ends the span: the request was answered."""

    def fail(self, error: ApiError | grpc.StatusCode) -> None:
        """Ends the span: the RPC ends with this error."""

    def __enter__(self) -> Self:
        self._outer = current_trace_id.get(), current_traceparent.get()
        current_trace_id.set(self.trace_id)
        current_traceparent.set(self.traceparent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not reset(token): a generator may be closed in another context than the one that entered it.
        trace_id, traceparent = self._outer
        current_trace_id.set(trace_id)
        current_traceparent.set(traceparent)
        if error is None:
            self.fail(grpc.StatusCode.OK)
        elif isinstance(error, ApiError):
            self.fail(error)
        else:
            cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            self.fail(grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.UNKNOWN)


class _RecordedRequestSpan(RequestSpan):
    def __init__(self, open_span: _OpenSpan, tracer: trace.Tracer, operation: str) -> None:
        super().__init__(*inject(open_span.context))
        if operation == names.CHAT:
            self.tracestate = _with_operation(self.tracestate, operation)
        self._open = open_span
        self._tracer = tracer

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((names.TRACERESPONSE, self.traceparent),)

    @harmless("traces")
    def request(self, *, model: str, request_id: str, params: SamplingParams) -> None:
        self._open.span.set_attributes(
            {
                names.REQUEST_MODEL: model,
                names.RESPONSE_MODEL: model,
                names.RESPONSE_ID: request_id,
                **_request_attributes(params),
            }
        )

    @harmless("traces")
    def submitted(self, worker_id: str) -> None:
        self._open.span.add_event(names.SUBMITTED_EVENT, {names.WORKER_ID: worker_id})

    @harmless("traces")
    def attempt(self, number: int, worker_id: str, *, began: float, ended: float, tokens: int, loss: str = "") -> None:
        attributes: dict[str, AttributeValue] = {
            names.WORKER_ID: worker_id,
            names.ATTEMPT_NUMBER: number,
            names.ATTEMPT_TOKENS: tokens,
        }
        offset_ns = _wall_offset_ns()
        start_ns, end_ns = offset_ns + _ns(began), offset_ns + _ns(ended)
        span = self._tracer.start_span(
            names.ATTEMPT_SPAN, self._open.context, SpanKind.CLIENT, attributes, start_time=start_ns
        )
        if loss:
            span.set_attribute(names.ATTEMPT_LOSS, loss)
            span.set_status(Status(StatusCode.ERROR, loss))
        span.end(end_ns)

    @harmless("traces")
    def phase(self, name: str, began: float, ended: float, *, worker_id: str = "", loss: str = "") -> None:
        offset_ns = _wall_offset_ns()
        said = {names.WORKER_ID: worker_id, names.ATTEMPT_LOSS: loss}
        kept = {key: value for key, value in said.items() if value}
        start_ns, end_ns = offset_ns + _ns(began), offset_ns + _ns(ended)
        self._tracer.start_span(name, self._open.context, attributes=kept, start_time=start_ns).end(end_ns)

    @harmless("traces")
    def first_token(self, ttft_s: float) -> None:
        self._open.span.set_attribute(names.RESPONSE_TIME_TO_FIRST_CHUNK, ttft_s)
        self._open.span.add_event(names.FIRST_TOKEN_EVENT)

    @harmless("traces")
    def usage(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
        worker_id: str = "",
        attempts: int = 1,
    ) -> None:
        if self._open.ended:
            return
        attributes = _usage((), input_tokens, output_tokens, cached_tokens)
        if worker_id:
            attributes |= {names.WORKER_ID: worker_id, names.ATTEMPTS: attempts}
        self._open.span.set_attributes(attributes)

    @harmless("traces")
    def finish(self, finish_reasons: Iterable[str] = ()) -> None:
        if self._open.ended:
            return
        if reasons := list(finish_reasons):
            self._open.span.set_attribute(names.RESPONSE_FINISH_REASONS, reasons)
        self._open.end(grpc.StatusCode.OK)

    @harmless("traces")
    def fail(self, error: ApiError | grpc.StatusCode) -> None:
        self._open.fail(error)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Work of the engine while a sequence decoded, which explains the time.

    Attributes:
        steps: of the engine, including those without the sequence.
        tokens: output of these steps, of all sequences.
        preemptions: of the sequence, since it arrived.
        drafts: of the sequence, verified and accepted, by their position after a token.
    """

    steps: int
    tokens: int
    preemptions: int
    drafts: tuple[Counts, ...] = ()

    def attributes(self) -> dict[str, AttributeValue]:
        """For the span."""
        mean = round(self.tokens / max(1, self.steps), 2)
        said: dict[str, AttributeValue] = {
            names.DECODE_STEPS: self.steps,
            names.DECODE_MEAN_BATCH: mean,
            names.DECODE_PREEMPTIONS: self.preemptions,
        }
        if self.drafts:
            verified, accepted = map(sum, zip(*self.drafts, strict=True))
            said |= {names.DECODE_DRAFTS: verified, names.DECODE_ACCEPTED: accepted}
        return said


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """A sequence's timestamps on the worker, monotonic seconds; None for stages that were not reached."""

    arrived: float
    first_scheduled: float | None
    first_token: float | None
    ended: float
    decode: DecodeWork | None = None

    def phases(self) -> list[tuple[str, float, float]]:
        """Name, start and end of queue, prefill and decode, as far as the sequence came."""
        starts = (self.arrived, self.first_scheduled, self.first_token)
        named = zip((names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN), starts, strict=True)
        reached = [(name, start) for name, start in named if start is not None]
        ends = [start for _, start in reached[1:]] + [self.ended]
        return [(name, start, end) for (name, start), end in zip(reached, ends, strict=True)]


class SequenceSpan:
    """The worker's span of one sequence; this class records nothing. The first of `finish` and `fail` ends it."""

    def finish(
        self, times: SequenceTimes, *, reason: str, input_tokens: int, output_tokens: int, cached_tokens: int
    ) -> None:
        """Ends the span of a sequence that ended by itself; `reason` is its end reason in lower case."""

    def fail(
        self,
        error: ApiError | grpc.StatusCode,
        times: SequenceTimes | None = None,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Ends the span of a sequence that was cancelled, ran out of time or lost its engine."""


class _RecordedSequenceSpan(SequenceSpan):
    def __init__(self, open_span: _OpenSpan, tracer: trace.Tracer) -> None:
        self._open = open_span
        self._tracer = tracer

    @harmless("traces")
    def finish(
        self, times: SequenceTimes, *, reason: str, input_tokens: int, output_tokens: int, cached_tokens: int
    ) -> None:
        if self._open.ended:
            return
        self._open.span.set_attributes(_usage([reason], input_tokens, output_tokens, cached_tokens))
        self._open.end(grpc.StatusCode.OK, end_ns=self._phases(times))

    @harmless("traces")
    def fail(
        self,
        error: ApiError | grpc.StatusCode,
        times: SequenceTimes | None = None,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        if self._open.ended:
            return
        self._open.span.set_attributes(_usage([], input_tokens, output_tokens, cached_tokens))
        self._open.fail(error, None if times is None else self._phases(times))

    def _phases(self, times: SequenceTimes) -> int:
        """Records the child spans; returns the sequence's end as Unix nanoseconds."""
        wall_ns = _wall_offset_ns()
        for name, start, end in times.phases():
            said = times.decode.attributes() if name == names.DECODE_SPAN and times.decode is not None else None
            child = self._tracer.start_span(name, self._open.context, attributes=said, start_time=wall_ns + _ns(start))
            child.end(wall_ns + _ns(end))
        return wall_ns + _ns(times.ended)


def _with_operation(tracestate: str, operation: str) -> str:
    """The trace state with our entry in front, so that the worker's span names the router's operation."""
    header = [tracestate] if tracestate else []
    others = [each for each in TraceState.from_header(header).items() if each[0] != names.TRACESTATE_KEY]
    return TraceState([(names.TRACESTATE_KEY, operation), *others[: _MAX_TRACESTATE - 1]]).to_header()


def _operation_in(context: Context) -> str:
    return trace.get_current_span(context).get_span_context().trace_state.get(names.TRACESTATE_KEY, "")


def _wall_offset_ns() -> int:
    """Offset between monotonic and Unix time, nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _request_attributes(params: SamplingParams) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.REQUEST_STREAM: True,
        names.REQUEST_MAX_TOKENS: params.max_tokens,
        names.REQUEST_TEMPERATURE: params.temperature,
        names.REQUEST_TOP_K: params.top_k,
        names.REQUEST_TOP_P: params.top_p,
        names.REQUEST_CHOICES: params.n,
        names.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
        names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
    }
    # OTLP integers are signed. A larger one would make its whole batch fail.
    if params.seed is not None and params.seed <= _INT64_MAX:
        attributes[names.REQUEST_SEED] = params.seed
    return attributes


def _usage(reasons: Iterable[str], input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    usage: dict[str, Any] = {
        names.INPUT_TOKENS: input_tokens,
        names.OUTPUT_TOKENS: output_tokens,
        names.CACHED_TOKENS: cached_tokens,
    }
    finish_reasons = list(reasons)
    return usage | ({names.RESPONSE_FINISH_REASONS: finish_reasons} if finish_reasons else {})


def _peer(peer: str) -> dict[str, AttributeValue]:
    """Address and port of gRPC's `ipv4:127.0.0.1:50051` or `ipv6:[::1]:50051` (percent-encoded on the wire)."""
    scheme, _, rest = peer.replace("%5B", "[").replace("%5D", "]").partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return {}
    address, _, port = rest.rpartition(":")
    if not port.isdigit():
        return {}
    return {names.PEER_ADDRESS: address.strip("[]"), names.PEER_PORT: int(port)}
