"""GRPCInferenceService: the Open Inference Protocol v2 of KServe and Triton, on the port of InferenceService.

A request becomes one of Generate or Embed and takes the same way: the same seed gives the same text.
"""

from __future__ import annotations

from typing import Final

from fissile.peers.inference import open_inference_pb2 as oip
from fissile.peers.inference.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError, InvalidFieldError, SlowClientError
from common.limits import CONNECTION_IDLE_S, MAX_UNREAD_CALLS
from common.rpc.request_reader import MessageReads
from common.rpc.unsupported_fields import refuse_unserved
from common.telemetry import names
from common.version import fissile_version
from router.api.answer_call import AnswerBackend
from router.api.answers import CollectedAnswers
from router.api.embed import EmbedBatch
from router.api.open_inference_messages import (
    PLATFORM,
    InferAnswers,
    InferRequest,
    check_version,
    describe,
    failure,
    named_as_sent,
)
from router.api.open_inference_stream import InferParts, InferStream, InferWriter
from router.api.rpc_scope import Context, RpcScope, StreamItemScope
from router.api.service import InferenceService
from router.api.shutdown import OpenCalls
from router.prompts.prompts import PromptEncoder

SERVICE: Final = "inference.GRPCInferenceService"
_NAMED: Final = frozenset(("name", "version"))


class OpenInferenceService(GRPCInferenceServiceServicer):
    """The service of one router.

    Args:
        service: admits the calls.
        backend: what calls need to be answered.
        encoder: makes prompts, off the loop.
        open_calls: all calls of the router, which end with it.
    """

    def __init__(
        self, service: InferenceService, backend: AnswerBackend, encoder: PromptEncoder, open_calls: OpenCalls
    ) -> None:
        self._service = service
        self._registry, self._tracing = backend.registry, backend.tracing
        self._encoder = encoder
        self._open_calls = open_calls
        self._idle = MessageReads(MAX_UNREAD_CALLS, CONNECTION_IDLE_S)

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        """Says that the process runs."""
        async with self._scope("ServerLive", context):
            refuse_unserved(request)
            return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        """Says whether a worker is ready."""
        async with self._scope("ServerReady", context):
            refuse_unserved(request)
            return oip.ServerReadyResponse(ready=self._registry.serving)

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        """Says whether a worker of the model is ready; an unknown model is not."""
        async with self._scope("ModelReady", context):
            refuse_unserved(request, _NAMED)
            check_version("version", request.version)
            return oip.ModelReadyResponse(ready=self._registry.ready_workers(request.name) > 0)

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        """Names the server."""
        async with self._scope("ServerMetadata", context):
            refuse_unserved(request)
            return oip.ServerMetadataResponse(name=PLATFORM, version=fissile_version())

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        """Describes the tensors of a model."""
        async with self._scope("ModelMetadata", context):
            refuse_unserved(request, _NAMED)
            check_version("version", request.version)
            model = self._registry.get(request.name)
            size = model.hidden_size if model.embeds else 0
            return describe(model.name, embeds=not model.generates, embedding_size=size)

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        """Answers a request with one message."""
        try:
            infer = self._read(request)
            if infer.is_streamed:
                raise InvalidFieldError("inputs.stream", "is true", "false; ModelStreamInfer sends answers in parts")
        except ApiError:
            async with self._scope("ModelInfer", context, request.id):
                raise
        scope = self._scope("ModelInfer", context, infer.request.request_id, _operation(infer))
        return await self._answer_whole(scope, infer, context)

    async def ModelStreamInfer(self, _: object, context: Context) -> None:  # type: ignore[override]
        """Answers any number of requests, side by side."""

        async def answer(request: oip.ModelInferRequest, writer: InferWriter) -> None:
            try:
                await self._answer_item(request, context, writer)
            except SlowClientError:
                raise
            except Exception:
                # The request's scope has told the client, and logged it.
                return

        async with (scope := self._scope("ModelStreamInfer", context)):
            await InferStream(context, self._idle, self._open_calls, answer).serve(InferWriter(context, scope))

    async def _answer_item(self, request: oip.ModelInferRequest, context: Context, writer: InferWriter) -> None:
        """Answers one request of a stream, in one message or in parts."""

        async def refuse(error: ApiError) -> None:
            await writer.write(failure(request, error))

        def scope(request_id: str, operation: str) -> RpcScope:
            return StreamItemScope(self._tracing, context, "ModelStreamInfer", request_id, operation, SERVICE, refuse)

        try:
            infer = self._read(request)
        except ApiError:
            async with scope(request.id, names.TEXT_COMPLETION):
                raise
        opened = scope(infer.request.request_id, _operation(infer))
        if not infer.is_streamed:
            whole = await self._answer_whole(opened, infer, context)
            await writer.write(oip.ModelStreamInferResponse(infer_response=whole))
            return
        assert isinstance(infer.request, pb.GenerateRequest)
        async with self._service.admit(opened, infer.request, context) as call:
            with named_as_sent():
                await call.answer(InferParts(call, InferAnswers(infer), writer))

    async def _answer_whole(self, scope: RpcScope, infer: InferRequest, context: Context) -> oip.ModelInferResponse:
        """Runs a request to its end."""
        request, answers = infer.request, InferAnswers(infer)
        async with self._service.admit(scope, request, context, is_streamed=False) as call:
            with named_as_sent():
                if isinstance(request, pb.EmbedRequest):
                    return answers.vectors(await EmbedBatch(call, request, self._encoder).embed(), call.model)
                collected = CollectedAnswers(pb.GenerateResponse, request)
                await call.answer(collected)
            return answers.whole(collected.generated(), call.model)
        raise AssertionError("a refused call ends in its scope")

    def _read(self, request: oip.ModelInferRequest) -> InferRequest:
        """Reads a request for the model that it names; of an unknown model the call tells the client.

        Raises:
            ApiError: a field is not served, or invalid.
        """
        try:
            embeds = not self._registry.get(request.model_name).generates
        except ApiError:
            embeds = False
        return InferRequest.from_proto(request, embeds=embeds)

    def _scope(self, method: str, context: Context, request_id: str = "", operation: str = "") -> RpcScope:
        return RpcScope(self._tracing, context, method, request_id, operation, SERVICE)


def _operation(infer: InferRequest) -> str:
    return names.EMBEDDINGS if isinstance(infer.request, pb.EmbedRequest) else names.TEXT_COMPLETION
