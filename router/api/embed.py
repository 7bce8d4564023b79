"""Embed: vectors of texts, as requests whose prompt is computed and whose hidden states come back with one token."""

from __future__ import annotations

from dataclasses import replace

from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError, UnservedMethodError
from common.params.pooling import EMBED_PARAMS, Pooling, finished
from common.wire.pooling_protos import pooling_of, public_pooling
from router.api.asked import Asked
from router.api.prompt_batch import Part, PromptBatch, pooled_states
from router.model_registry import ServedModel
from router.prompts.prompts import PromptEncoder
from router.requests.stream import RequestStream, RoutedRequest
from router.telemetry.metrics import RequestMeasure
from router.validation import check_vectors


class Embedding:
    """Turns texts into vectors.

    Args:
        gathering: has them answered.
        encoder: makes prompts.
    """

    def __init__(self, gathering: PromptBatch, encoder: PromptEncoder) -> None:
        self._gathering = gathering
        self._encoder = encoder

    async def embed(self, asked: Asked, request: pb.EmbedRequest, measure: RequestMeasure) -> pb.EmbedResponse:
        """Embeds the inputs of a request that `validation.check_embed` has passed.

        Args:
            asked: the call; its request has the model and the session.
            request: as it came.
            measure: of the call.

        Raises:
            ApiError: the request is refused, or has failed; UNAVAILABLE if a worker was lost.
        """
        normalize = request.normalize if request.HasField("normalize") else True

        async def prepare(model: ServedModel) -> list[Part]:
            pooling = _pooling(request, model)
            check_vectors(request, model.hidden_size)
            prompts = await self._encoder.for_embed(request, model, asked.call.tenant, asked.cache_salt)
            one = pb.GenerateRequest(model=model.name, session_id=asked.request.session_id)

            def change(routed: RoutedRequest) -> RoutedRequest:
                return replace(routed, params=EMBED_PARAMS, pooling=pooling)

            return [Part(prompt, one, change) for prompt in prompts]

        async def read(stream: RequestStream) -> tuple[pb.Embedding, Pooling | None]:
            states = await pooled_states(stream)
            dimensions = request.dimensions or len(states) // 4
            vector = finished(states, dimensions, normalize=normalize)
            return pb.Embedding(values=vector.tolist()), stream.request.pooling

        gathered = await self._gathering.gather(asked, measure, prepare, read)
        return pb.EmbedResponse(
            request_id=asked.call.request_id,
            embeddings=[embedding for embedding, _ in gathered.results],
            usage=gathered.usage,
            weights_digest=gathered.weights_digest,
            numerics=gathered.numerics,
            pooling=public_pooling(gathered.results[0][1]),
        )


def _pooling(request: pb.EmbedRequest, model: ServedModel) -> Pooling:
    """The pooling of a request.

    Raises:
        UnservedMethodError: workers of the model know none.
        InvalidFieldError: neither the request nor the checkpoint says one that is served.
    """
    if not model.embeds:
        raise UnservedMethodError("Embed", model.name)
    pooling = pooling_of(request.pooling) or model.default_pooling
    if pooling is None:
        problem = "is POOLING_UNSPECIFIED, and the checkpoint's own is not served"
        raise InvalidFieldError("pooling", problem, "POOLING_LAST or POOLING_MEAN")
    return pooling
