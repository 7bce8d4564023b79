"""InferenceService: what clients call."""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceServicer

from common.errors import InvalidFieldError, at_path
from common.limits import MAX_MODEL_LEN, MAX_TOKENIZE_TEXT_BYTES, MAX_UNREAD_TOKENS
from common.rpc.auth import caller
from common.rpc.unsupported_fields import refuse_unserved
from common.telemetry import names
from common.telemetry.metrics import Metrics
from common.telemetry.request_record import current_record
from common.telemetry.tracing import Tracing
from router.api.answer_call import Answering, AnswerObserver
from router.api.answers import Answers, CollectedAnswers, StreamedAnswers
from router.api.asked import CHAT, GENERATE, AnswerRequest, Asked, Encode, Kind
from router.api.embed import Embedding
from router.api.in_flight import InFlightCall, InFlightCalls
from router.api.pages import MAX_PAGE, page_of
from router.api.prompt_batch import PromptBatch
from router.api.replay import Replayer, check_replay, contradiction_of
from router.api.request_builder import RequestBuilder
from router.api.rerank import Reranking
from router.api.responses import describe_model
from router.api.rpc_scope import Context, RpcScope
from router.api.score import Scoring
from router.api.shutdown import OpenCalls
from router.api.tenants import TenantLimits, TenantPolicy, tenant_of
from router.model_registry import ModelRegistry, ServedModel
from router.prompts.prompts import Prompt, PromptEncoder
from router.requests.request_router import RequestRouter
from router.telemetry.metrics import RequestMeasure, RouterMetrics
from router.validation import (
    CHAT_SERVED,
    EMBED_SERVED,
    GENERATE_SERVED,
    RERANK_SERVED,
    SCORE_SERVED,
    check_chat,
    check_embed,
    check_generate,
    check_priority,
    check_request_id,
    check_rerank,
    check_score,
    check_text_bytes,
    check_whole_answers,
)
from router.workers.expected_workers import ExpectedWorkers

ManyPrompts: TypeAlias = pb.ScoreRequest | pb.EmbedRequest | pb.RerankRequest
_SALT_BYTES = 16
T = TypeVar("T")


def _within(name: str, served: Set[str]) -> frozenset[str]:
    """A field that is a message, and the fields of it that are served."""
    return frozenset({name, *(f"{name}.{path}" for path in served)})


_GENERATE_OR_CHAT = _within("generate", GENERATE_SERVED) | _within("chat", CHAT_SERVED)
# Fields that a method serves, by their paths; the other fields of its request are refused. No method that is not here.
SERVED: Final[Mapping[str, frozenset[str]]] = {
    "Generate": GENERATE_SERVED,
    "Chat": CHAT_SERVED,
    "GenerateOnce": GENERATE_SERVED,
    "ChatOnce": CHAT_SERVED,
    "Score": SCORE_SERVED,
    "Embed": EMBED_SERVED,
    "Rerank": RERANK_SERVED,
    "Replay": _GENERATE_OR_CHAT
    | _within("receipt", {field.name for field in pb.Receipt.DESCRIPTOR.fields})
    | _within("token_ids", {"ids"})
    | {"worker_id"},
    "Tokenize": frozenset({"model", "text"}),
    "Detokenize": frozenset({"model", "token_ids", "keep_special_tokens"}),
    "CountTokens": _GENERATE_OR_CHAT,
    "RenderPrompt": _within("chat", CHAT_SERVED),
    "ListModels": frozenset({"page_size", "page_token"}),
    "GetModel": frozenset({"model"}),
}


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
        has_keys: True if callers show API keys: then high priority is only for those that may have it.
        default_max_tokens: longest answer to a request that does not say; 0 is all that the model's length leaves.

    Attributes:
        calls: the calls of Generate and Chat, streamed or not, that have not ended.
        builder: makes requests of workers from checked calls.
        replayer: runs finished requests again.
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
        default_max_tokens: int = 0,
    ) -> None:
        self.calls = InFlightCalls()
        self._requests = requests
        self._expected = expected
        self._registry = registry
        self._encoder = encoder
        self._tracing = tracing
        self._clock = clock
        policy = TenantPolicy() if tenants is None else tenants
        self._policy = policy
        # A caller with a key is known, and gets what the operator has allowed it; without keys all are one caller.
        self._default_max_priority = "normal" if has_keys else "high"
        self._tenant_limits = TenantLimits(policy)
        encoder.set_weights(policy.weights)
        self._metrics = RouterMetrics(Metrics()) if metrics is None else metrics
        self._open_calls = OpenCalls() if calls is None else calls
        self.builder = RequestBuilder(
            encoder, clock, self._open_calls, requests.may_adopt, max_unread_tokens, default_max_tokens
        )
        self._answering = Answering(requests, expected, registry, self.builder, tracing, clock)
        gathering = PromptBatch(self._answering, self.builder)
        self._scoring = Scoring(gathering, encoder)
        self._embedding = Embedding(gathering, encoder)
        self._reranking = Reranking(gathering, encoder)
        self.replayer = Replayer(self.builder, requests, registry)

    def observe_answers(self, observers: Sequence[AnswerObserver]) -> None:
        """Shows every answered request to these observers from now on, in place of those before."""
        self._answering.on_answered = observers

    def set_tenants(self, policy: TenantPolicy) -> None:
        """Sets other limits from now on."""
        self._policy = policy
        self._tenant_limits.set_policy(policy)
        self._encoder.set_weights(policy.weights)

    @property
    def in_flight(self) -> int:
        """Number of calls of Generate and Chat, streamed or not, that have not ended."""
        return len(self.calls)

    def tables(self) -> dict[str, int]:
        """Entries of every table that grows with requests or tenants."""
        return {"request_ids": len(self.calls), "tenants_in_flight": len(self._tenant_limits)}

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Continues a prompt."""
        answers = StreamedAnswers(context, GENERATE.response)
        await self._answer(GENERATE, "Generate", request, context, answers)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Answers a conversation."""
        await self._answer(CHAT, "Chat", request, context, StreamedAnswers(context, CHAT.response))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateOnceResponse:
        """Continues a prompt, in one message."""
        answers = CollectedAnswers(GENERATE.response, request)
        await self._answer(GENERATE, "GenerateOnce", request, context, answers)
        return answers.generated()

    async def ChatOnce(self, request: pb.ChatRequest, context: Context) -> pb.ChatOnceResponse:
        """Answers a conversation, in one message."""
        answers = CollectedAnswers(CHAT.response, request)
        await self._answer(CHAT, "ChatOnce", request, context, answers)
        return answers.chatted()

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Says how likely continuations are."""
        one = pb.GenerateRequest(model=request.model, session_id=request.session_id)

        def score(asked: Asked, measure: RequestMeasure) -> Awaitable[pb.ScoreResponse]:
            return self._scoring.score(asked, request, measure)

        return await self._run("Score", names.SCORE, request, one, context, partial(check_score, request), score)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Turns texts into vectors."""
        one = pb.GenerateRequest(model=request.model, session_id=request.session_id)

        def embed(asked: Asked, measure: RequestMeasure) -> Awaitable[pb.EmbedResponse]:
            return self._embedding.embed(asked, request, measure)

        return await self._run("Embed", names.EMBEDDINGS, request, one, context, partial(check_embed, request), embed)

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        """Orders documents by their relevance."""
        one = pb.GenerateRequest(model=request.model, session_id=request.session_id)

        def rerank(asked: Asked, measure: RequestMeasure) -> Awaitable[pb.RerankResponse]:
            return self._reranking.rerank(asked, request, measure)

        return await self._run("Rerank", names.RERANK, request, one, context, partial(check_rerank, request), rerank)

    async def Replay(self, request: pb.ReplayRequest, context: Context) -> pb.ReplayResponse:
        """Runs a finished request again and compares it with its receipt."""
        arrival, scope = self._clock(), RpcScope(self._tracing, context, "Replay")
        async with scope as span:
            refuse_unserved(request, SERVED["Replay"])
            again, kind = check_replay(request), CHAT if request.HasField("chat") else GENERATE
            with at_path("generate" if kind is GENERATE else "chat"):
                _check(again)
            if (bad := contradiction_of(request)) is not None:
                return bad
            record = current_record()
            record.tenant = tenant = self._tenant(context)
            with at_path("generate" if kind is GENERATE else "chat"):
                priority = self._priority(again, tenant)
            call = InFlightCall(record.request_id, tenant, "Replay", again.model, priority, arrival, span.trace_id)
            # With a salt of its own nothing of it comes from a cache: a fault that is in there is not repeated.
            salt = secrets.token_bytes(_SALT_BYTES)
            asked = Asked(again, call, _encode(self._encoder, again), context, salt, span, record, scope)
            with self._in_flight(call):
                with self.builder.interruptible(call):
                    await self._expected.wait_for_model(again.model)
                return await self.replayer.replay(kind, asked, request)
        raise AssertionError("a call that is refused ends in its scope")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text into token ids."""
        async with RpcScope(self._tracing, context, "Tokenize"):
            with self._interruptible():
                refuse_unserved(request, SERVED["Tokenize"])
                check_text_bytes("text", request.text, MAX_TOKENIZE_TEXT_BYTES)
                with self._tenant_held(context) as tenant:
                    return await self._encoder.tokenize(request.text, await self._expected.model(request.model), tenant)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        async with RpcScope(self._tracing, context, "Detokenize"):
            with self._interruptible():
                refuse_unserved(request, SERVED["Detokenize"])
                ids, keep = request.token_ids, request.keep_special_tokens
                with self._tenant_held(context) as tenant:
                    model = await self._expected.model(request.model)
                    text = await self._encoder.detokenize(ids, model, keep_special=keep, tenant=tenant)
                return pb.DetokenizeResponse(text=text)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        """Counts the prompt tokens of a request."""
        async with RpcScope(self._tracing, context, "CountTokens"):
            with self._interruptible():
                refuse_unserved(request, SERVED["CountTokens"])
                kind = request.WhichOneof("request")
                if kind is None:
                    raise InvalidFieldError("request", "is missing", "one of generate, chat")
                asked: AnswerRequest = request.generate if kind == "generate" else request.chat
                with at_path(kind):
                    prompt, model = await self._whole_prompt(asked, context)
                return pb.CountTokensResponse(prompt_tokens=len(prompt.token_ids), max_model_len=model.max_model_len)

    async def RenderPrompt(self, request: pb.RenderPromptRequest, context: Context) -> pb.RenderPromptResponse:
        """Renders a conversation."""
        async with RpcScope(self._tracing, context, "RenderPrompt"):
            refuse_unserved(request, SERVED["RenderPrompt"])
            with self._interruptible(), at_path("chat"):
                check_chat(request.chat)
                with self._tenant_held(context) as tenant:
                    model = await self._expected.model(request.chat.model)
                    return await self._encoder.render(request.chat, model, tenant)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models."""
        async with RpcScope(self._tracing, context, "ListModels"):
            refuse_unserved(request, SERVED["ListModels"])
            served = self._registry.models
            keys = [model.name for model in served]
            models, following = page_of(served, keys, request.page_size, request.page_token, MAX_PAGE)
            described = [describe_model(model, self._registry) for model in models]
            return pb.ListModelsResponse(models=described, next_page_token=following)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes one model."""
        async with RpcScope(self._tracing, context, "GetModel"):
            refuse_unserved(request, SERVED["GetModel"])
            # Only a call that waits for its model counts against the tenant's limit.
            if not self._registry.knows(request.model):
                with self._interruptible(), self._tenant_held(context):
                    await self._expected.wait_for_model(request.model)
            return pb.GetModelResponse(model=describe_model(self._registry.get(request.model), self._registry))

    async def _answer(
        self, kind: Kind, method: str, request: AnswerRequest, context: Context, answers: Answers
    ) -> None:
        """Answers one Generate or Chat, streamed or not, from its arrival to its end."""

        def check() -> None:
            _check(request)
            check_whole_answers(request, is_streamed=answers.is_streamed)

        def answer(asked: Asked, measure: RequestMeasure) -> Awaitable[None]:
            return self._answering.run(kind, asked, measure, answers)

        await self._run(method, kind.operation, request, request, context, check, answer)

    async def _run(
        self,
        method: str,
        operation: str,
        request: AnswerRequest | ManyPrompts,
        one: AnswerRequest,
        context: Context,
        check: Callable[[], None],
        run: Callable[[Asked, RequestMeasure], Awaitable[T]],
    ) -> T:
        """Runs one call that generates, from its arrival to its end.

        Args:
            method: name of the RPC.
            operation: its name in traces and figures.
            request: as it came.
            one: the request of which each of its sequences is, or is made.
            context: of the call.
            check: refuses what needs no model to be refused.
            run: does what is asked.
        """
        arrival = self._clock()
        request_id = request.request_id or uuid.uuid4().hex

        def broken_off() -> grpc.StatusCode:
            return record.cancel(self._clock(), context.time_remaining())

        scope, record = RpcScope(self._tracing, context, method, request_id, operation), current_record()
        record.model = request.model
        measured = self._metrics.request(operation, arrival, self._clock, broken_off)
        async with scope as span, measured as measure:
            check_request_id(request_id)
            check()
            record.tenant = tenant = self._tenant(context)
            priority = self._priority(request, tenant)
            salt = self._policy.cache_salt(request.cache_salt, tenant)
            call = InFlightCall(request_id, tenant, method, request.model, priority, arrival, span.trace_id)
            asked = Asked(one, call, _encode(self._encoder, one), context, salt, span, record, scope)
            with self._in_flight(call, takes_over=one.HasField("resume")):
                return await run(asked, measure)
        raise AssertionError("a call that is refused ends in its scope")

    @contextlib.contextmanager
    def _in_flight(self, call: InFlightCall, *, takes_over: bool = False) -> Iterator[None]:
        """Holds the id of a call and its tenant's place while it is in flight; a drain waits for it.

        Raises:
            ApiError: the id is taken, or the tenant has as many as it may.
        """
        with (
            self._open_calls.held(),
            self.calls.held(call, takes_over=takes_over) as took_over,
            self._tenant_limits.held(call.tenant, self._clock, has_place=took_over),
        ):
            yield

    async def _whole_prompt(self, request: AnswerRequest, context: Context) -> tuple[Prompt, ServedModel]:
        """The prompt of a request, even if it is too long for the model, and the model."""
        _check(request)
        with self._tenant_held(context) as tenant:
            model = await self._expected.model(request.model)
            unbounded = replace(model, max_model_len=MAX_MODEL_LEN)
            return await _encode(self._encoder, request)(unbounded, tenant, b""), model

    def _tenant(self, context: Context) -> str:
        """Tenant that a call is for."""
        return tenant_of(context.invocation_metadata(), self._policy, caller.get().tenant)

    def _priority(self, request: AnswerRequest | ManyPrompts, tenant: str) -> int:
        """The class of a request, which its caller may ask for."""
        check_priority(request.priority)
        return self._policy.priority(request.priority, tenant, caller.get().max_priority, self._default_max_priority)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """For a call with one answer: a drain waits for it, the end of the router interrupts it."""
        with self._open_calls.held(), self._open_calls.interruptible():
            yield

    @contextlib.contextmanager
    def _tenant_held(self, context: Context) -> Iterator[str]:
        """Counts a call among those of its tenant, whose name it gives."""
        tenant = self._tenant(context)
        with self._tenant_limits.held(tenant, self._clock):
            yield tenant


def _encode(encoder: PromptEncoder, request: AnswerRequest) -> Encode:
    """Makes the prompt of a request, once its model is known."""
    if isinstance(request, pb.ChatRequest):
        return partial(encoder.for_chat, request)
    return partial(encoder.for_generate, request)


def _check(request: AnswerRequest) -> None:
    """Checks what needs no model.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    if isinstance(request, pb.ChatRequest):
        check_chat(request)
    else:
        check_generate(request)
