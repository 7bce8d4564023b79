"""Span of one RPC at the router, with attributes of its request and spans of its phases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import grpc
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from common.errors import ApiError
from common.params.sampling_params import SamplingParams
from common.telemetry import names
from common.telemetry.failures import harmless
from common.telemetry.ledger import Ledger
from common.telemetry.logs import current_trace_id
from common.telemetry.prometheus import current_traceparent
from common.telemetry.request_record import shown
from common.telemetry.trace_context import Metadata, asks_for_steps, extract, inject, trace_id_of, with_operation
from common.telemetry.tracing import OpenSpan, SpanFactory, usage_attributes
from router.scheduling.queued_request import PlacementChoice

_INT64_MAX: Final = 2**63 - 1
_STAGE_MS: Final = {stage: names.STAGE_MS.format(stage) for stage in names.Stage}
# Waits that are events. Those for a worker are spans, and those at a worker are in its span.
_WAITS: Final = frozenset(
    {
        names.Stage.MODEL_WAIT,
        names.Stage.TOKENIZE_QUEUE,
        names.Stage.GATE_HOLD,
        names.Stage.GATE_BACKLOG,
        names.Stage.PLACEMENT_WAIT,
        names.Stage.CLIENT_WAIT,
    }
)
# Stop strings in a span, and characters of each.
_MAX_STOPS: Final = 8
_MAX_STOP: Final = 64


def request_span(
    tracing: SpanFactory, method: str, metadata: Metadata | None = None, *, operation: str = "", peer: str = ""
) -> RequestSpan:
    """Starts the router's span of an RPC.

    Args:
        tracing: of this process.
        method: fully qualified, without leading slash: `fissile.v1.InferenceService/Generate`.
        metadata: the call's invocation metadata, with the client's trace context.
        operation: `names.TEXT_COMPLETION` or `names.CHAT`; empty for an RPC that generates nothing.
        peer: the call's `context.peer()`.
    """
    context = extract(metadata)
    attributes: dict[str, AttributeValue] = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method, **_peer(peer)}
    if operation:
        attributes |= {names.OPERATION: operation, names.PROVIDER: names.PROVIDER_FISSILE}
    started = tracing.start(method, context, attributes)
    if started is None:
        return RequestSpan(*inject(context))
    return RecordedRequestSpan(started, operation, has_steps=asks_for_steps(metadata))


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts of a request for its span, besides its sampling parameters; "" for unknown ones.

    Attributes:
        model: name of its model.
        request_id: of the request.
        session_id: the client's conversation.
        tenant: of the call.
        key: name of the API key, never the key.
        priority: name of its class.
        is_json: True if the answer is confined to JSON.
    """

    model: str
    request_id: str
    session_id: str = ""
    tenant: str = ""
    key: str = ""
    priority: str = ""
    is_json: bool = False

    def attributes(self, operation: str) -> dict[str, str]:
        """Attributes of the span of a call with this operation, without unknown ones."""
        known = {
            names.REQUEST_MODEL: self.model,
            names.RESPONSE_MODEL: self.model,
            names.RESPONSE_ID: self.request_id,
            names.CONVERSATION_ID: shown(self.session_id),
            names.TENANT: shown(self.tenant),
            names.KEY: self.key,
            names.PRIORITY: self.priority,
        }
        if operation in (names.CHAT, names.TEXT_COMPLETION):
            known[names.OUTPUT_TYPE] = "json" if self.is_json else "text"
        return {name: value for name, value in known.items() if value}


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

    def request(self, facts: RequestFacts, params: SamplingParams) -> None:
        """Notes that the request has been validated."""

    def submitted(self, worker_id: str, choice: PlacementChoice | None = None) -> None:
        """Notes that the request has been submitted to a worker, and why to this one."""

    def attempt(self, number: int, worker_id: str, *, began: float, ended: float, tokens: int, loss: str = "") -> None:
        """Records one of several attempts of the request, after its end: a worker that died sends no span of its own.

        The span links to the attempt before. Times are monotonic seconds; `loss` says why the attempt did not finish
        the request.
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
        reasoning_tokens: int = 0,
        worker_id: str = "",
        attempts: int = 1,
    ) -> None:
        """Notes the request's token counts at its end, successful or not. Counts are of delivered tokens."""

    def stages(self, ledger: Ledger, now: float) -> None:
        """Notes the request's time in each stage until `now`, and the requests that cost it most."""

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


class RecordedRequestSpan(RequestSpan):
    """A request's span that is recorded.

    Args:
        open_span: the span.
        operation: of the call, "" for an RPC that generates nothing.
        has_steps: True if workers add the engine steps of its sequences.
    """

    def __init__(self, open_span: OpenSpan, operation: str, *, has_steps: bool) -> None:
        super().__init__(*inject(open_span.context))
        if operation == names.CHAT or (operation and has_steps):
            self.tracestate = with_operation(self.tracestate, operation, has_steps=has_steps)
        self._open = open_span
        self._operation = operation
        self._last_attempt: SpanContext | None = None

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """`traceresponse` with the context of this span."""
        return ((names.TRACERESPONSE, self.traceparent),)

    @harmless("traces")
    def request(self, facts: RequestFacts, params: SamplingParams) -> None:
        """Sets the request's attributes."""
        if self._open.is_recorded:
            self._open.set_attributes({**facts.attributes(self._operation), **_request_attributes(params)})

    @harmless("traces")
    def submitted(self, worker_id: str, choice: PlacementChoice | None = None) -> None:
        """Adds an event."""
        attributes: dict[str, AttributeValue] = {names.WORKER_ID: worker_id}
        if choice is not None:
            attributes |= {
                names.PLACEMENT_REASON: choice.reason,
                names.PLACEMENT_CANDIDATES: choice.candidates,
                names.PLACEMENT_CACHED_TOKENS: choice.cached_tokens,
            }
            if choice.estimate_s is not None:
                attributes[names.PLACEMENT_ESTIMATE] = round(1e3 * choice.estimate_s, 3)
        self._open.add_event(names.SUBMITTED_EVENT, attributes)

    @harmless("traces")
    def attempt(self, number: int, worker_id: str, *, began: float, ended: float, tokens: int, loss: str = "") -> None:
        """Adds a child."""
        attributes: dict[str, AttributeValue] = {
            names.WORKER_ID: worker_id,
            names.ATTEMPT_NUMBER: number,
            names.ATTEMPT_TOKENS: tokens,
            names.ATTEMPT_LOSS: loss,
        }
        link = self._last_attempt if number > 1 else None
        self._last_attempt = self._open.add_child(
            names.ATTEMPT_SPAN, began, ended, attributes, kind=SpanKind.CLIENT, error=loss, link=link
        )

    @harmless("traces")
    def phase(self, name: str, began: float, ended: float, *, worker_id: str = "", loss: str = "") -> None:
        """Adds a child."""
        self._open.add_child(name, began, ended, {names.WORKER_ID: worker_id, names.ATTEMPT_LOSS: loss})

    @harmless("traces")
    def first_token(self, ttft_s: float) -> None:
        """Adds an event."""
        self._open.set_attributes({names.RESPONSE_TIME_TO_FIRST_CHUNK: ttft_s})
        self._open.add_event(names.FIRST_TOKEN_EVENT)

    @harmless("traces")
    def usage(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
        reasoning_tokens: int = 0,
        worker_id: str = "",
        attempts: int = 1,
    ) -> None:
        """Sets the token counts."""
        attributes = usage_attributes((), input_tokens, output_tokens, cached_tokens)
        if reasoning_tokens:
            attributes[names.REASONING_TOKENS] = reasoning_tokens
        if worker_id:
            attributes |= {names.WORKER_ID: worker_id, names.ATTEMPTS: attempts}
        self._open.set_attributes(attributes)

    @harmless("traces")
    def stages(self, ledger: Ledger, now: float) -> None:
        """Sets an attribute for each stage, and three for each blamed request; adds an event for each wait."""
        if not self._open.is_recorded:
            return
        found: dict[str, AttributeValue] = {}
        for stage, seconds in ledger.parts(now).items():
            found[_STAGE_MS[stage]] = round(1e3 * seconds, 3)
        for stage, blame in ledger.blames.items():
            found[names.BLAME_REQUEST.format(stage)] = shown(blame.request_id)
            found[names.BLAME_TENANT.format(stage)] = shown(blame.tenant)
            found[names.BLAME_MS.format(stage)] = round(1e3 * blame.seconds, 3)
        self._open.set_attributes(found)
        self._open.add_waits(ledger, _WAITS, now)

    @harmless("traces")
    def finish(self, finish_reasons: Iterable[str] = ()) -> None:
        """Ends the span with OK."""
        if reasons := tuple(finish_reasons):
            self._open.set_attributes({names.RESPONSE_FINISH_REASONS: reasons})
        self._open.end(grpc.StatusCode.OK)

    @harmless("traces")
    def fail(self, error: ApiError | grpc.StatusCode) -> None:
        """Ends the span with an error."""
        self._open.fail(error)


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
    if params.stop_strings:
        attributes[names.REQUEST_STOP_SEQUENCES] = tuple(
            shown(text, _MAX_STOP) for text in params.stop_strings[:_MAX_STOPS]
        )
    # OTLP integers are signed. A larger one would make its whole batch fail.
    if params.seed is not None and params.seed <= _INT64_MAX:
        attributes[names.REQUEST_SEED] = params.seed
    return attributes


def _peer(peer: str) -> dict[str, AttributeValue]:
    """Address and port of gRPC's `ipv4:127.0.0.1:50051` or `ipv6:[::1]:50051` (percent-encoded on the wire)."""
    scheme, _, rest = peer.replace("%5B", "[").replace("%5D", "]").partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return {}
    address, _, port = rest.rpartition(":")
    if not port.isdigit():
        return {}
    return {names.PEER_ADDRESS: address.strip("[]"), names.PEER_PORT: int(port)}
