"""InferenceService: the RPCs that clients call."""

from __future__ import annotations

import contextlib
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceServicer

from common.errors import at_path
from common.limits import MAX_MODEL_LEN, MAX_TOKENIZE_TEXT_BYTES
from common.rpc.unsupported_fields import refuse_unserved
from common.telemetry import names
from router.api.answer_call import AnswerBackend, AnswerCall
from router.api.answers import AnswerRequest, CollectedAnswers, StreamedAnswers, field_of, request_of
from router.api.call_admission import CallAdmission
from router.api.embed import EmbedBatch
from router.api.in_flight import InFlightCall, InFlightCalls
from router.api.pages import MAX_PAGE, page_of
from router.api.replay import Replayer, check_replay, contradiction_of
from router.api.rerank import RerankBatch
from router.api.responses import describe_model
from router.api.rpc_scope import Context, RpcScope
from router.api.score import ScoreBatch
from router.api.served_fields import SERVED
from router.api.tenants import TenantPolicy
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt, PromptEncoder
from router.telemetry.metrics import RouterMetrics
from router.validation import (
    check_chat,
    check_embed,
    check_generate,
    check_request_id,
    check_rerank,
    check_score,
    check_text_bytes,
    check_whole_answers,
)

# Requests of the RPCs that run requests on workers.
WorkRequest: TypeAlias = AnswerRequest | pb.ScoreRequest | pb.EmbedRequest | pb.RerankRequest
_SALT_BYTES = 16
# For the type checker, which thinks that the context manager of a call may swallow an error.
_REFUSED = "a refused call ends in its scope"


class InferenceService(InferenceServiceServicer):
    """The public service of one router.

    The streaming methods write to their context instead of yielding: gRPC does not close a generator that is suspended
    at a yield when its call is cancelled, and a coroutine that waits for a write it does.

    Args:
        admission: admits calls.
        backend: what calls need to be answered.
        replayer: runs finished requests again.
        encoder: makes prompts, off the loop.
        metrics: measures the calls.
    """

    def __init__(
        self,
        admission: CallAdmission,
        backend: AnswerBackend,
        replayer: Replayer,
        encoder: PromptEncoder,
        metrics: RouterMetrics,
    ) -> None:
        self._admission = admission
        self._backend = backend
        self._registry, self._expected = backend.registry, backend.expected
        self._tracing, self._clock = backend.tracing, backend.clock
        self._replayer = replayer
        self._encoder = encoder
        self._metrics = metrics

    def set_tenants(self, policy: TenantPolicy) -> None:
        """Replaces limits and rights of the tenants from now on."""
        self._admission.set_policy(policy)
        self._encoder.set_weights(policy.weights)

    @property
    def calls(self) -> InFlightCalls:
        """The calls that run requests on workers."""
        return self._admission.calls

    @property
    def in_flight(self) -> int:
        """Number of these calls."""
        return len(self.calls)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Continues a prompt."""
        answers = StreamedAnswers(context, pb.GenerateResponse)
        async with self._call("Generate", names.TEXT_COMPLETION, request, context) as call:
            await call.answer(answers)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        """Answers a conversation."""
        answers = StreamedAnswers(context, pb.ChatResponse)
        async with self._call("Chat", names.CHAT, request, context) as call:
            await call.answer(answers)

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateOnceResponse:
        """Continues a prompt, in one message."""
        answers = CollectedAnswers(pb.GenerateResponse, request)
        async with self._call("GenerateOnce", names.TEXT_COMPLETION, request, context, is_streamed=False) as call:
            await call.answer(answers)
        return answers.generated()

    async def ChatOnce(self, request: pb.ChatRequest, context: Context) -> pb.ChatOnceResponse:
        """Answers a conversation, in one message."""
        answers = CollectedAnswers(pb.ChatResponse, request)
        async with self._call("ChatOnce", names.CHAT, request, context, is_streamed=False) as call:
            await call.answer(answers)
        return answers.chatted()

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Says how likely continuations are."""
        async with self._call("Score", names.SCORE, request, context) as call:
            return await ScoreBatch(call, request, self._encoder).score()
        raise AssertionError(_REFUSED)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Turns texts into vectors."""
        async with self._call("Embed", names.EMBEDDINGS, request, context) as call:
            return await EmbedBatch(call, request, self._encoder).embed()
        raise AssertionError(_REFUSED)

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        """Orders documents by their relevance."""
        async with self._call("Rerank", names.RERANK, request, context) as call:
            return await RerankBatch(call, request, self._encoder).rerank()
        raise AssertionError(_REFUSED)

    async def Replay(self, request: pb.ReplayRequest, context: Context) -> pb.ReplayResponse:
        """Runs a finished request again and compares it with its receipt."""
        arrival, scope = self._clock(), RpcScope(self._tracing, context, "Replay")
        async with scope:
            refuse_unserved(request, SERVED["Replay"])
            again = check_replay(request)
            with at_path(field_of(again)):
                _check(again)
            if (bad := contradiction_of(request)) is not None:
                return bad
            scope.record.tenant = tenant = self._admission.tenant(context)
            with at_path(field_of(again)):
                priority = self._admission.priority(again.priority, tenant)
            call = InFlightCall(
                request_id=scope.record.request_id,
                tenant=tenant,
                method="Replay",
                model=again.model,
                priority=priority,
                # With its own salt no block comes from a cache: a fault in the cache is not repeated.
                cache_salt=secrets.token_bytes(_SALT_BYTES),
                arrived=arrival,
                scope=scope,
                open_calls=self._admission.open_calls,
            )
            with self._admission.held(call):
                with call.interruptible():
                    await self._expected.wait_for_model(again.model)
                response = await self._replayer.replay(call, again, request)
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text into token ids."""
        async with RpcScope(self._tracing, context, "Tokenize"):
            with self._admission.interruptible():
                refuse_unserved(request, SERVED["Tokenize"])
                check_text_bytes("text", request.text, MAX_TOKENIZE_TEXT_BYTES)
                with self._admission.tenant_held(context) as tenant:
                    return await self._encoder.tokenize(request.text, await self._expected.model(request.model), tenant)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        async with RpcScope(self._tracing, context, "Detokenize"):
            with self._admission.interruptible():
                refuse_unserved(request, SERVED["Detokenize"])
                ids, keep = request.token_ids, request.keep_special_tokens
                with self._admission.tenant_held(context) as tenant:
                    model = await self._expected.model(request.model)
                    text = await self._encoder.detokenize(ids, model, keep_special=keep, tenant=tenant)
                return pb.DetokenizeResponse(text=text)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        """Counts the prompt tokens of a request."""
        async with RpcScope(self._tracing, context, "CountTokens"):
            with self._admission.interruptible():
                refuse_unserved(request, SERVED["CountTokens"])
                counted = request_of(request)
                with at_path(field_of(counted)):
                    prompt, model = await self._whole_prompt(counted, context)
                return pb.CountTokensResponse(prompt_tokens=len(prompt.token_ids), max_model_len=model.max_model_len)

    async def RenderPrompt(self, request: pb.RenderPromptRequest, context: Context) -> pb.RenderPromptResponse:
        """Renders a conversation."""
        async with RpcScope(self._tracing, context, "RenderPrompt"):
            refuse_unserved(request, SERVED["RenderPrompt"])
            with self._admission.interruptible(), at_path("chat"):
                check_chat(request.chat)
                with self._admission.tenant_held(context) as tenant:
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
                with self._admission.interruptible(), self._admission.tenant_held(context):
                    await self._expected.wait_for_model(request.model)
            return pb.GetModelResponse(model=describe_model(self._registry.get(request.model), self._registry))

    def _call(
        self, method: str, operation: str, request: WorkRequest, context: Context, *, is_streamed: bool = True
    ) -> AbstractAsyncContextManager[AnswerCall]:
        """Opens the scope of an RPC of this service and admits its call."""
        scope = RpcScope(self._tracing, context, method, request.request_id or uuid.uuid4().hex, operation)
        return self.admit(scope, request, context, is_streamed=is_streamed)

    @contextlib.asynccontextmanager
    async def admit(
        self, scope: RpcScope, request: WorkRequest, context: Context, *, is_streamed: bool = True
    ) -> AsyncIterator[AnswerCall]:
        """Admits a call, which the block runs.

        Args:
            scope: of the call; entered here.
            request: the request; its id is that of the scope.
            context: of the call.
            is_streamed: False if the answers are sent as one message.
        """
        arrival, request_id = scope.record.arrived, scope.record.request_id
        scope.record.model = request.model
        measured = self._metrics.request(scope.operation, arrival, self._clock, scope.cancel, scope.record)
        async with scope, measured as measure:
            check_request_id(request_id)
            _check(request, is_streamed=is_streamed)
            scope.record.tenant = tenant = self._admission.tenant(context)
            if isinstance(request, AnswerRequest):
                answer_request = request
            else:
                answer_request = pb.GenerateRequest(model=request.model, session_id=request.session_id)
            call = AnswerCall(
                request_id=request_id,
                tenant=tenant,
                method=scope.method,
                model=request.model,
                priority=self._admission.priority(request.priority, tenant),
                cache_salt=self._admission.cache_salt(request.cache_salt, tenant),
                arrived=arrival,
                scope=scope,
                open_calls=self._admission.open_calls,
                request=answer_request,
                measure=measure,
                backend=self._backend,
            )
            with self._admission.held(call, takes_over=answer_request.HasField("resume")):
                yield call

    async def _whole_prompt(self, request: AnswerRequest, context: Context) -> tuple[Prompt, ServedModel]:
        """The prompt of a request, even if it is too long for the model, and the model."""
        _check(request)
        with self._admission.tenant_held(context) as tenant:
            model = await self._expected.model(request.model)
            unbounded = replace(model, max_model_len=MAX_MODEL_LEN)
            return await self._backend.builder.prompt(request, unbounded, tenant, b""), model


def _check(request: WorkRequest, *, is_streamed: bool | None = None) -> None:
    """Checks what needs no model.

    Args:
        request: the request.
        is_streamed: whether the answers of Generate or Chat are streamed; None for a request that is not answered.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    match request:
        case pb.ChatRequest():
            check_chat(request)
        case pb.GenerateRequest():
            check_generate(request)
        case pb.ScoreRequest():
            check_score(request)
        case pb.EmbedRequest():
            check_embed(request)
        case pb.RerankRequest():
            check_rerank(request)
    if is_streamed is not None and isinstance(request, pb.GenerateRequest | pb.ChatRequest):
        check_whole_answers(request, is_streamed=is_streamed)
