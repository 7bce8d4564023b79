"""Embed: vectors of texts, as requests whose prompt is computed and whose hidden states come back with one token."""

from __future__ import annotations

from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError, UnservedMethodError
from common.params.pooling import Pooling, finished
from common.wire.heads import pooling_of, public_pooling
from router.api.answer_call import AnswerCall
from router.api.prompt_batch import BatchPrompt, PromptBatch, pooled_states
from router.model_registry import ServedModel
from router.prompts.prompts import PromptEncoder
from router.requests.stream import RequestStream
from router.validation import check_vectors


class EmbedBatch(PromptBatch[pb.Embedding]):
    """The texts of one Embed, and the vector of each.

    Args:
        call: the call.
        request: as it came, checked by `validation.check_embed`.
        encoder: makes prompts.
    """

    def __init__(self, call: AnswerCall, request: pb.EmbedRequest, encoder: PromptEncoder) -> None:
        super().__init__(call)
        self._request = request
        self._encoder = encoder

    async def embed(self) -> pb.EmbedResponse:
        """Embeds the texts.

        Raises:
            ApiError: the request is refused, or failed; UNAVAILABLE if a worker was lost.
        """
        await self.run()
        return pb.EmbedResponse(
            request_id=self.call.request_id,
            embeddings=self.results,
            usage=self.usage,
            weights_digest=self.weights_digest,
            numerics=self.numerics,
            pooling=public_pooling(self.call.streams[0].request.pooling),
        )

    async def prompts(self, model: ServedModel) -> list[BatchPrompt]:
        """Makes a prompt of each text."""
        pooling = _pooling(self._request, model)
        check_vectors(self._request, model.hidden_size)
        call = self.call
        prompts = await self._encoder.for_embed(self._request, model, call.tenant, call.cache_salt)
        request = pb.GenerateRequest(model=model.name, session_id=self._request.session_id)
        return [BatchPrompt(prompt, request, pooling) for prompt in prompts]

    async def read(self, stream: RequestStream) -> pb.Embedding:
        """Reads the vector of a text."""
        states = await pooled_states(stream)
        normalize = self._request.normalize if self._request.HasField("normalize") else True
        vector = finished(states, self._request.dimensions or len(states) // 4, normalize=normalize)
        return pb.Embedding(values=vector.tolist())


def _pooling(request: pb.EmbedRequest, model: ServedModel) -> Pooling:
    """The pooling that a request or its checkpoint names.

    Raises:
        UnservedMethodError: the model does not embed.
        InvalidFieldError: neither names one that is served.
    """
    if not model.embeds:
        raise UnservedMethodError("Embed", model.name)
    pooling = pooling_of(request.pooling) or model.default_pooling
    if pooling is None:
        problem = "is POOLING_UNSPECIFIED, and the checkpoint's own is not served"
        raise InvalidFieldError("pooling", problem, "POOLING_LAST or POOLING_MEAN")
    return pooling
