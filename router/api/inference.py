"""InferenceService: what clients call.

Nothing is sent before the first token, not even initial metadata, so that standard client retries work. Every request
leaves the router's tables on every path: finished, failed, cancelled, past its deadline.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceServicer

from common.block_hash import GRANULE_BLOCKS
from common.errors import DuplicateRequestError, NoTokenizerError
from common.limits import MAX_TOKENIZE_TEXT_BYTES, MAX_UNREAD_TOKENS
from common.rpc.auth import caller
from common.rpc.unsupported_fields import refuse_unserved
from common.seed import derive_seed
from common.telemetry import names
from common.telemetry.metrics import Metrics
from common.telemetry.request_record import RequestRecord, current_record
from common.telemetry.tracing import RequestSpan, Tracing
from common.text.stop_strings import StopStrings
from router.api.responses import decode_s, describe_model, fill_response, finish_name, times_of
from router.api.rpc_scope import Context, RpcScope
from router.api.shutdown import OpenCalls
from router.api.tenants import TenantLimits, TenantPolicy, tenant_of
from router.model_registry import ModelRegistry, ServedModel
from router.requests.request_router import RequestRouter
from router.requests.stream import ReplacedError, RequestStream, RoutedRequest
from router.scheduling.failover import Wait
from router.telemetry.metrics import RequestMeasure, RouterMetrics
from router.text.prompts import Prompt, PromptEncoder
from router.text.stream_assembly import StreamAssembly
from router.validation import (
    check_chat,
    check_generate,
    check_priority,
    check_request_id,
    check_text_bytes,
    clip_to_length,
    sampling_params,
)
from router.workers.expected_workers import ExpectedWorkers

AnswerRequest: TypeAlias = pb.GenerateRequest | pb.ChatRequest
AnswerResponse: TypeAlias = pb.GenerateResponse | pb.ChatResponse
# Makes a prompt for a model, of a tenant, with the salt in force.
_Encode: TypeAlias = Callable[[ServedModel, str, bytes], Awaitable[Prompt]]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Differences between Generate and Chat.

    Attributes:
        method: name of the call.
        operation: its name in traces and figures.
        response: makes its messages.
        continues: True if the answer's text continues the prompt's, False if it is a text of its own: a message has no
            space before its first word, whatever its template ends with.
    """

    method: str
    operation: str
    response: Callable[..., AnswerResponse]
    continues: bool


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that has passed the checks that need no model.

    Attributes:
        request: as it came.
        request_id: the client's, or a minted one.
        encode: makes its prompt.
        scope: of its call, which writes the first message.
        context: of its call.
        arrival: monotonic seconds.
        tenant: who it is for.
        cache_salt: the salt in force.
        priority: its class.
        span: of its call.
        record: what its log line will say.
    """

    request: AnswerRequest
    request_id: str
    encode: _Encode
    scope: RpcScope
    context: Context
    arrival: float
    tenant: str
    cache_salt: bytes
    priority: int
    span: RequestSpan
    record: RequestRecord


_GENERATE = _Kind("Generate", names.TEXT_COMPLETION, pb.GenerateResponse, continues=True)
_CHAT = _Kind("Chat", names.CHAT, pb.ChatResponse, continues=False)


class InferenceService(InferenceServiceServicer):
    """The public service of one router.

    The streaming methods write to their context instead of yielding: a generator that is suspended at a yield is not
    closed when its call is cancelled, a coroutine that waits for a write is.

    Args:
        requests: sends requests on their way.
        expected: workers that have never been up.
        registry: the models.
        encoder: makes prompts, off the loop.
        tracing: makes a span per call.
        clock: monotonic seconds.
        max_unread_tokens: a client that leaves more unread is dropped.
        tenants: what tenants get; None for all the same, without limits.
        metrics: measures the requests; None for nobody who looks.
        calls: knows the calls that have to end with the router; None for nobody who asks.
        has_keys: whether callers show API keys: then high priority is only for those that may have it.
    """

    def __init__(
        self,
        requests: RequestRouter,
        expected: ExpectedWorkers,
        registry: ModelRegistry,
        encoder: PromptEncoder,
        tracing: Tracing,
        clock: Callable[[], float] = time.monotonic,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        tenants: TenantPolicy | None = None,
        metrics: RouterMetrics | None = None,
        calls: OpenCalls | None = None,
        *,
        has_keys: bool = False,
    ) -> None:
        self._requests = requests
        self._expected = expected
        self._registry = registry
        self._encoder = encoder
        self._tracing = tracing
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        policy = TenantPolicy() if tenants is None else tenants
        self._policy = policy
        # A caller with a key is known, and gets what the operator has allowed it; without keys all are one caller.
        self._default_max_priority = "normal" if has_keys else "high"
        self._tenant_limits = TenantLimits(policy)
        encoder.set_weights(policy.weights)
        self._ids_in_flight: set[tuple[str, str]] = set()
        self._metrics = RouterMetrics(Metrics()) if metrics is None else metrics
        self._calls = OpenCalls() if calls is None else calls

    def set_tenants(self, policy: TenantPolicy) -> None:
        """Other limits from now on."""
        self._policy = policy
        self._tenant_limits.set_policy(policy)
        self._encoder.set_weights(policy.weights)

    @property
    def in_flight(self) -> int:
        """Number of Generate and Chat requests that have not ended."""
        return len(self._ids_in_flight)

    def tables(self) -> dict[str, int]:
        """Entries of every table that grows with requests or tenants."""
        return {"request_ids": len(self._ids_in_flight), "tenants_in_flight": len(self._tenant_limits)}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Continues a prompt."""
        encode = partial(self._encoder.for_generate, request)
        await self._answer(_GENERATE, request, context, partial(check_generate, request), encode)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Answers a conversation."""
        encode = partial(self._encoder.for_chat, request)
        await self._answer(_CHAT, request, context, partial(check_chat, request), encode)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text into token ids."""
        async with RpcScope(self._tracing, context, "Tokenize"):
            with self._interruptible():
                refuse_unserved(request, frozenset({"model", "text"}))
                check_text_bytes("text", request.text, MAX_TOKENIZE_TEXT_BYTES)
                with self._tenant_held(context) as tenant:
                    return await self._encoder.tokenize(request.text, self._registry.get(request.model), tenant)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        async with RpcScope(self._tracing, context, "Detokenize"):
            with self._interruptible():
                refuse_unserved(request, frozenset({"model", "token_ids", "keep_special_tokens"}))
                ids, keep = request.token_ids, request.keep_special_tokens
                with self._tenant_held(context) as tenant:
                    model = self._registry.get(request.model)
                    text = await self._encoder.detokenize(ids, model, keep_special=keep, tenant=tenant)
                return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models."""
        async with RpcScope(self._tracing, context, "ListModels"):
            refuse_unserved(request)
            models = [describe_model(model, self._registry) for model in self._registry.models]
            return pb.ListModelsResponse(models=models)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes one model."""
        async with RpcScope(self._tracing, context, "GetModel"):
            refuse_unserved(request, frozenset({"model"}))
            return pb.GetModelResponse(model=describe_model(self._registry.get(request.model), self._registry))

    async def _answer(
        self,
        kind: _Kind,
        request: AnswerRequest,
        context: Context,
        check: Callable[[], None],
        encode: _Encode,
    ) -> None:
        """One Generate or Chat from its arrival to its end."""
        arrival = self._clock()
        request_id = request.request_id or uuid.uuid4().hex

        def broken_off() -> grpc.StatusCode:
            return record.cancel(self._clock(), context.time_remaining())

        scope, record = RpcScope(self._tracing, context, kind.method, request_id, kind.operation), current_record()
        record.model = request.model
        measured = self._metrics.request(kind.operation, self._clock, broken_off)
        async with scope as span, measured as measure:
            check_request_id(request_id)
            check()
            record.tenant = tenant = self._tenant(context)
            priority = self._priority(request, tenant)
            salt = self._policy.cache_salt(request.cache_salt, tenant)
            with self._calls.held(), self._claimed(tenant, request_id), self._tenant_limits.held(tenant, self._clock):
                if not self._registry.knows(request.model):
                    with self._calls.interruptible():
                        await self._expected.wait_for_model(request.model)
                asked = _Asked(
                    request, request_id, encode, scope, context, arrival, tenant, salt, priority, span, record
                )
                await self._run(kind, asked, measure)

    async def _run(self, kind: _Kind, asked: _Asked, measure: RequestMeasure) -> None:
        """Has a request answered; prepares it once more where its weights go before it has begun."""
        stream: RequestStream | None = None
        opened = 0.0
        try:
            while True:
                # A session keeps its weights while they are rolled, because its requests build on earlier answers.
                model = self._registry.choose(asked.request.model, asked.request.session_id or asked.request_id)
                asked.record.model = model.name
                measure.model(model.name)
                routed = await self._prepare(asked, model)
                assembly = self._assembly(kind, routed, model, asked.request.output_options.return_token_ids)
                opened = opened or self._clock()
                stream = self._requests.open(routed, assembly, asked.span.submitted, stream)
                try:
                    return await self._send(kind, stream, asked, measure)
                except ReplacedError:
                    continue
                finally:
                    self._requests.close(stream)
        finally:
            # Observation may fail without failing the request.
            with contextlib.suppress(Exception):
                if stream is not None:
                    self._account(asked, measure, stream, opened)

    async def _prepare(self, asked: _Asked, model: ServedModel) -> RoutedRequest:
        """Makes of a request what workers with the weights of `model` get."""
        request = asked.request
        params = sampling_params(request.sampling_params, model.text.defaults, model.vocab_size)
        began = self._clock()
        try:
            with self._calls.interruptible():
                prompt = await asked.encode(model, asked.tenant, asked.cache_salt)
        finally:
            asked.span.phase(names.TOKENIZE_SPAN, began, self._clock())
        asked.record.prompt_tokens = len(prompt.token_ids)
        params = clip_to_length(params, len(prompt.token_ids), model.max_model_len)
        asked.span.request(model=model.name, request_id=asked.request_id, params=params)
        remaining = asked.context.time_remaining()
        return RoutedRequest(
            model=model.name,
            identity=model.identity,
            request_id=asked.request_id,
            token_ids=prompt.token_ids,
            params=params,
            seed=derive_seed(asked.request_id) if params.seed is None else params.seed,
            chain_hash=prompt.chain_hash,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
            tenant=asked.tenant,
            session_id=request.session_id,
            granules=prompt.granules,
            granule_tokens=GRANULE_BLOCKS * model.block_size,
            arrival=asked.arrival,
            deadline=None if remaining is None else self._clock() + remaining,
            traceparent=asked.span.traceparent,
            tracestate=asked.span.tracestate,
            weights_digest=model.weights_digest,
        )

    async def _send(self, kind: _Kind, stream: RequestStream, asked: _Asked, measure: RequestMeasure) -> None:
        """Writes parts as they come, as fast as the client reads; what comes meanwhile is merged."""
        write: Callable[[AnswerResponse], Awaitable[None]] = asked.scope.write_first
        # One message for all parts: gRPC has made bytes of it when `write` returns.
        message = kind.response(request_id=stream.request.request_id)
        while True:
            part = await stream.next()
            if part.start is not None:
                ttft_s = times_of(stream, self._clock()).ttft_s or 0.0
                asked.span.first_token(ttft_s)
                measure.first_token(ttft_s)
            fill_response(message, part, stream, self._clock)
            await stream.written(write(message))
            write = asked.context.write
            stream.written_tokens = stream.assembly.taken
            if part.ending is not None:
                asked.record.finish = finish_name(part.ending)
                measure.finished(decode_s(stream), message.finish.usage.completion_tokens)
                return

    def _account(self, asked: _Asked, measure: RequestMeasure, stream: RequestStream, opened: float) -> None:
        """Says what has come of a request, however it ended: in its record, its figures and its span."""
        record, span = asked.record, asked.span
        assembly, times = stream.assembly, times_of(stream, self._clock())
        record.times, record.worker_id = times, assembly.worker_id
        record.attempts, record.exact = len(stream.attempts), stream.attempts.exact
        record.completion_tokens = stream.written_tokens
        if times.first_token is not None:
            record.cached_tokens = assembly.start.cached_tokens
            measure.usage(assembly.prompt_tokens, assembly.start.cached_tokens, stream.written_tokens)
        self._trace_attempts(span, stream)
        if self._tracing.enabled:
            _trace_waits(span, stream.attempts.waits(opened, times.ended))
        span.usage(
            input_tokens=assembly.prompt_tokens,
            output_tokens=stream.written_tokens,
            cached_tokens=assembly.start.cached_tokens,
            worker_id=assembly.worker_id,
            attempts=len(stream.attempts),
        )
        if record.finish:
            span.finish([record.finish])

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

    def _assembly(
        self, kind: _Kind, request: RoutedRequest, model: ServedModel, return_token_ids: bool
    ) -> StreamAssembly:
        params, tokenizer = request.params, model.text.tokenizer
        if params.stop_strings and tokenizer is None:
            raise NoTokenizerError(model.name)
        stops = StopStrings(params.stop_strings, params.include_stop_string) if params.stop_strings else None
        behind = request.token_ids if kind.continues else ()
        return StreamAssembly(
            len(request.token_ids),
            detokenizer=None if tokenizer is None else tokenizer.decode_stream(behind=behind),
            stop_strings=stops,
            min_tokens=params.min_tokens,
            return_token_ids=return_token_ids,
            max_unread_tokens=self._max_unread_tokens,
        )

    def _tenant(self, context: Context) -> str:
        """Tenant that a call is for."""
        return tenant_of(context.invocation_metadata(), self._policy, caller.get().tenant)

    def _priority(self, request: AnswerRequest, tenant: str) -> int:
        """The class of a request, which its caller may ask for."""
        check_priority(request.priority)
        return self._policy.priority(request.priority, tenant, caller.get().max_priority, self._default_max_priority)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """For a call with one answer: a drain waits for it, the end of the router interrupts it."""
        with self._calls.held(), self._calls.interruptible():
            yield

    @contextlib.contextmanager
    def _tenant_held(self, context: Context) -> Iterator[str]:
        """Counts a call among those of its tenant, whose name it gives."""
        tenant = self._tenant(context)
        with self._tenant_limits.held(tenant, self._clock):
            yield tenant

    @contextlib.contextmanager
    def _claimed(self, tenant: str, request_id: str) -> Iterator[None]:
        """Holds the id while the request is in flight. A tenant learns nothing of others' ids."""
        claim = (tenant, request_id)
        if claim in self._ids_in_flight:
            raise DuplicateRequestError(request_id)
        self._ids_in_flight.add(claim)
        try:
            yield
        finally:
            self._ids_in_flight.discard(claim)


def _trace_waits(span: RequestSpan, waits: Sequence[Wait]) -> None:
    """Says in the trace when a request had no worker."""
    for wait in waits:
        name = names.QUEUE_SPAN if wait.loss is None else names.WAIT_SPAN
        loss = "" if wait.loss is None else wait.loss.value
        span.phase(name, wait.began, wait.ended, worker_id=wait.worker_id, loss=loss)
