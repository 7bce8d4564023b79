"""Rerank: how relevant documents are, as requests that ask a model so and weigh its yes against its no."""

from __future__ import annotations

import math

from fissile.v1 import inference_pb2 as pb

from common.errors import NotARerankerError
from router.api.answering import Asked
from router.api.gathering import Gathering, Part
from router.api.responses import token_logprobs
from router.model_registry import ServedModel
from router.requests.stream import RequestStream
from router.telemetry.metrics import RequestMeasure
from router.text.prompts import PromptEncoder


class Reranking:
    """Orders documents by their relevance.

    Args:
        gathering: has them answered.
        encoder: makes prompts.
    """

    def __init__(self, gathering: Gathering, encoder: PromptEncoder) -> None:
        self._gathering = gathering
        self._encoder = encoder

    async def rerank(self, asked: Asked, request: pb.RerankRequest, measure: RequestMeasure) -> pb.RerankResponse:
        """Orders the documents of a request that `validation.check_rerank` has passed.

        Args:
            asked: the call; its request has the model and the session.
            request: as it came.
            measure: of the call.

        Raises:
            ApiError: the request is refused, or has failed; UNAVAILABLE if a worker was lost.
        """

        async def prepare(model: ServedModel) -> list[Part]:
            if not model.reranks or model.relevance_tokens is None:
                raise NotARerankerError(model.name)
            prompts = await self._encoder.for_rerank(request, model, asked.call.tenant, asked.cache_salt)
            one = pb.GenerateRequest(
                model=model.name,
                session_id=asked.request.session_id,
                sampling_params=pb.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                output_options=pb.OutputOptions(logprobs=0, logprob_token_ids=model.relevance_tokens),
            )
            return [Part(prompt, one) for prompt in prompts]

        gathered = await self._gathering.gather(asked, measure, prepare, _relevance)
        ranked = [pb.RankedDocument(index=i, relevance=value) for i, value in enumerate(gathered.results)]
        ranked.sort(key=lambda document: (-document.relevance, document.index))
        del ranked[request.top_n or len(ranked) :]
        for document in ranked if request.return_documents else ():
            document.document = request.documents[document.index]
        return pb.RerankResponse(
            request_id=asked.call.request_id,
            documents=ranked,
            usage=gathered.usage,
            weights_digest=gathered.weights_digest,
            numerics=gathered.numerics,
        )


async def _relevance(stream: RequestStream) -> float:
    """Waits for the logprobs of yes and no; the former's part of both probabilities."""
    yes = no = 0.0
    while True:
        part = await stream.next()
        if part.logprobs is not None and part.logprobs.generated is not None:
            ((yes, no),) = (entry.given for entry in token_logprobs(part.logprobs.generated))
        if part.ending is not None:
            return _share(yes - no)


def _share(log_odds: float) -> float:
    """The part that the first of two probabilities is of both, by the difference of their logarithms."""
    if log_odds >= 0:
        return 1.0 / (1.0 + math.exp(-log_odds))
    odds = math.exp(log_odds)
    return odds / (1.0 + odds)
