"""InferenceService: what clients call.

Nothing is sent before the first token, not even initial metadata, so that standard client retries work. Every request
leaves the router's tables on every path: finished, failed, cancelled, past its deadline.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import structlog
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceServicer

from common.block_hash import GRANULE_BLOCKS
from common.errors import DuplicateRequestError, NoTokenizerError
from common.limits import MAX_UNREAD_TOKENS
from common.rpc.access import caller
from common.rpc.unserved import refuse_unserved
from common.seed import derive_seed
from common.telemetry import names
from common.telemetry.metrics import Metrics
from common.telemetry.tracing import RequestSpan, Tracing
from common.text.stop_strings import StopStrings
from router.assembly import StreamAssembly
from router.call import Call, Context
from router.fleet import Fleet
from router.metrics import RequestMeasure, RouterMetrics
from router.model_registry import ModelRegistry, ServedModel
from router.prompts import Prompt, PromptEncoder
from router.request_stream import RequestStream, RoutedRequest
from router.responses import decode_s, describe_model, fill_response, time_to_first_token_s
from router.tenants import TenantLimits, TenantPolicy, tenant_of
from router.validation import (
    check_chat,
    check_generate,
    check_priority,
    check_request_id,
    check_text_bytes,
    clip_to_length,
    sampling_params,
)

log = structlog.get_logger(__name__)

AnswerRequest: TypeAlias = pb.GenerateRequest | pb.ChatRequest
AnswerResponse: TypeAlias = pb.GenerateResponse | pb.ChatResponse


@dataclass(frozen=True, slots=True)
class _Kind:
    """What Generate and Chat do differently."""

    method: str
    operation: str
    response: Callable[..., AnswerResponse]


_GENERATE = _Kind("Generate", names.TEXT_COMPLETION, pb.GenerateResponse)
_CHAT = _Kind("Chat", names.CHAT, pb.ChatResponse)


class InferenceService(InferenceServiceServicer):
    """The public service of one router.

    The streaming methods write to their context instead of yielding: a generator that is suspended at a yield is not
    closed when its call is cancelled, a coroutine that waits for a write is.

    Args:
        fleet: sends requests on their way.
        registry: the models.
        encoder: makes prompts, off the loop.
        tracing: makes a span per call.
        clock: monotonic seconds.
        max_unread_tokens: a client that leaves more unread is dropped.
        tenants: what tenants get; None for all the same, without limits.
        metrics: measures the requests; None for nobody who looks.
    """

    def __init__(
        self,
        fleet: Fleet,
        registry: ModelRegistry,
        encoder: PromptEncoder,
        tracing: Tracing,
        clock: Callable[[], float] = time.monotonic,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        tenants: TenantPolicy | None = None,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._encoder = encoder
        self._tracing = tracing
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        policy = TenantPolicy() if tenants is None else tenants
        self._tenant_key = policy.key
        self._tenant_limits = TenantLimits(policy)
        self._ids_in_flight: set[str] = set()
        self._metrics = RouterMetrics(Metrics()) if metrics is None else metrics

    def set_tenants(self, policy: TenantPolicy) -> None:
        """Other limits from now on. The metadata key stays."""
        self._tenant_limits.set_policy(policy)

    @property
    def in_flight(self) -> int:
        """Number of Generate and Chat requests that have not ended."""
        return len(self._ids_in_flight)

    def tables(self) -> dict[str, int]:
        """Entries of every table that grows with requests or tenants."""
        return {"request_ids": len(self._ids_in_flight), "tenants_in_flight": len(self._tenant_limits)}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Continues a prompt."""

        async def encode(model: ServedModel) -> Prompt:
            return await self._encoder.for_generate(request, model)

        await self._answer(_GENERATE, request, context, lambda: check_generate(request), encode)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Answers a conversation."""

        async def encode(model: ServedModel) -> Prompt:
            return await self._encoder.for_chat(request, model)

        await self._answer(_CHAT, request, context, lambda: check_chat(request), encode)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text into token ids."""
        async with Call(self._tracing, context, "Tokenize"):
            refuse_unserved(request, frozenset({"model", "text"}))
            check_text_bytes("text", request.text)
            return await self._encoder.tokenize(request.text, self._registry.get(request.model))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        async with Call(self._tracing, context, "Detokenize"):
            refuse_unserved(request, frozenset({"model", "token_ids", "keep_special_tokens"}))
            model = self._registry.get(request.model)
            keep = request.keep_special_tokens
            return pb.DetokenizeResponse(
                text=await self._encoder.detokenize(request.token_ids, model, keep_special=keep)
            )

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models."""
        async with Call(self._tracing, context, "ListModels"):
            models = [describe_model(model, self._registry) for model in self._registry.models]
            return pb.ListModelsResponse(models=models)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes one model."""
        async with Call(self._tracing, context, "GetModel"):
            refuse_unserved(request, frozenset({"model"}))
            return pb.GetModelResponse(model=describe_model(self._registry.get(request.model), self._registry))

    async def _answer(
        self,
        kind: _Kind,
        request: AnswerRequest,
        context: Context,
        check: Callable[[], None],
        encode: Callable[[ServedModel], Awaitable[Prompt]],
    ) -> None:
        """One Generate or Chat from its arrival to its end."""
        arrival = self._clock()
        request_id = request.request_id or uuid.uuid4().hex
        call = Call(self._tracing, context, kind.method, request_id, kind.operation)
        measured = self._metrics.request(kind.operation, self._clock, lambda: context.time_remaining() == 0)
        async with call as span, measured as measure:
            check_request_id(request_id)
            check()
            tenant = tenant_of(context.invocation_metadata(), self._tenant_key, caller.get().tenant)
            with self._claimed(request_id), self._tenant_limits.held(tenant, self._clock):
                model = self._registry.get(request.model)
                measure.model(model.name)
                params = sampling_params(request.sampling_params, model.text.defaults, model.vocab_size)
                prompt = await encode(model)
                params = clip_to_length(params, len(prompt.token_ids), model.max_model_len)
                span.request(model=model.name, request_id=request_id, params=params)
                remaining = context.time_remaining()
                routed = RoutedRequest(
                    model=model.name,
                    identity=model.identity,
                    token_ids=prompt.token_ids,
                    params=params,
                    seed=derive_seed(request_id) if params.seed is None else params.seed,
                    chain_hash=prompt.chain_hash,
                    cache_salt=request.cache_salt.encode(),
                    priority=check_priority(request.priority),
                    tenant=tenant,
                    session_id=request.session_id,
                    granules=prompt.granules,
                    granule_tokens=GRANULE_BLOCKS * model.block_size,
                    arrival=arrival,
                    deadline=None if remaining is None else self._clock() + remaining,
                    traceparent=span.traceparent,
                    tracestate=span.tracestate,
                )
                assembly = self._assembly(routed, model, request.output_options.return_token_ids)
                stream = self._fleet.open(routed, assembly, span.submitted)
                try:
                    await self._send(kind, request_id, stream, context, span, measure)
                finally:
                    self._fleet.close(stream)
                    self._trace_attempts(span, stream)

    async def _send(
        self,
        kind: _Kind,
        request_id: str,
        stream: RequestStream,
        context: Context,
        span: RequestSpan,
        measure: RequestMeasure,
    ) -> None:
        """Writes parts as they come, as fast as the client reads; what comes meanwhile is merged."""
        # One message for all parts: gRPC has made bytes of it when `write` returns.
        message = kind.response(request_id=request_id)
        while True:
            part = await stream.next()
            if part.start is not None:
                ttft_s = time_to_first_token_s(stream)
                span.first_token(ttft_s)
                measure.first_token(ttft_s)
            fill_response(message, part, stream, self._clock)
            await stream.written(context.write(message))
            if part.ending is not None:
                self._finished(request_id, message, span, stream)
                measure.finished(decode_s(stream), message.finish.usage.completion_tokens)
                return

    def _finished(self, request_id: str, message: AnswerResponse, span: RequestSpan, stream: RequestStream) -> None:
        finish = message.finish
        reason = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
        span.finish(
            finish_reasons=[reason],
            input_tokens=finish.usage.prompt_tokens,
            output_tokens=finish.usage.completion_tokens,
            cached_tokens=finish.usage.cached_tokens,
            worker_id=finish.worker_id,
            attempts=finish.attempts,
        )
        log.info(
            "request finished",
            request_id=request_id,
            reason=reason,
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            ttft_ms=round(time_to_first_token_s(stream) * 1000, 1),
            worker_id=finish.worker_id,
        )

    def _trace_attempts(self, span: RequestSpan, stream: RequestStream) -> None:
        """Says in the trace where a request has been that needed more than one worker."""
        attempts = stream.attempts.all
        for number, attempt in enumerate(attempts if len(attempts) > 1 else (), start=1):
            span.attempt(
                number,
                attempt.worker_id,
                began=attempt.began,
                ended=self._clock() if attempt.ended is None else attempt.ended,
                tokens=attempt.tokens,
                loss="" if attempt.loss is None else attempt.loss.value,
            )

    def _assembly(self, request: RoutedRequest, model: ServedModel, return_token_ids: bool) -> StreamAssembly:
        params, tokenizer = request.params, model.text.tokenizer
        if params.stop_strings and tokenizer is None:
            raise NoTokenizerError(model.name)
        stops = StopStrings(params.stop_strings, params.include_stop_string) if params.stop_strings else None
        return StreamAssembly(
            len(request.token_ids),
            detokenizer=None if tokenizer is None else tokenizer.decode_stream(),
            stop_strings=stops,
            min_tokens=params.min_tokens,
            return_token_ids=return_token_ids,
            max_unread_tokens=self._max_unread_tokens,
        )

    @contextlib.contextmanager
    def _claimed(self, request_id: str) -> Iterator[None]:
        """Holds the id while the request is in flight."""
        if request_id in self._ids_in_flight:
            raise DuplicateRequestError(request_id)
        self._ids_in_flight.add(request_id)
        try:
            yield
        finally:
            self._ids_in_flight.discard(request_id)
