"""Rerank: how relevant documents are.

Each is a request: one that asks a model so, whose yes is weighed against its no; or one of which a classifier makes a
number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from fissile.v1 import inference_pb2 as pb

from common.errors import NotARerankerError
from common.params.pooling import EMBED_PARAMS, LABELS
from router.api.asked import Asked
from router.api.prompt_batch import Part, PromptBatch, pooled_states
from router.api.responses import token_logprobs
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt, PromptEncoder
from router.requests.stream import RequestStream
from router.telemetry.metrics import RequestMeasure


class Reranking:
    """Orders documents by their relevance.

    Args:
        gathering: has them answered.
        encoder: makes prompts.
    """

    def __init__(self, gathering: PromptBatch, encoder: PromptEncoder) -> None:
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
            tokens = model.relevance_tokens
            if not model.reranks or not (model.has_relevance_head or tokens):
                raise NotARerankerError(model.name, model.num_labels)
            prompts = await self._encoder.for_rerank(request, model, asked.call.tenant, asked.cache_salt)
            part = _labelled if model.has_relevance_head else partial(_questioned, tokens or ())
            one = pb.GenerateRequest(model=model.name, session_id=asked.request.session_id)
            return [part(prompt, one) for prompt in prompts]

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


def _questioned(tokens: Sequence[int], prompt: Prompt, one: pb.GenerateRequest) -> Part:
    """A prompt behind which the model says yes or no; `tokens` are these two."""
    asked = pb.GenerateRequest(
        sampling_params=pb.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        output_options=pb.OutputOptions(logprobs=0, logprob_token_ids=tokens),
    )
    asked.MergeFrom(one)
    return Part(prompt, asked)


def _labelled(prompt: Prompt, one: pb.GenerateRequest) -> Part:
    """A prompt of which the model's classifier makes one number."""
    return Part(prompt, one, lambda routed: replace(routed, params=EMBED_PARAMS, pooling=LABELS))


async def _relevance(stream: RequestStream) -> float:
    """Waits for the logprobs of yes and no, or for the classifier's number; the log odds become a probability."""
    if stream.request.pooling is not None:
        return _logistic(float(np.frombuffer(await pooled_states(stream), "<f4")[0]))
    yes = no = 0.0
    while True:
        part = await stream.next()
        if part.logprobs is not None and part.logprobs.generated is not None:
            ((yes, no),) = (entry.given for entry in token_logprobs(part.logprobs.generated))
        if part.ending is not None:
            return _logistic(yes - no)


def _logistic(log_odds: float) -> float:
    """The probability with these odds; of two probabilities, whose logarithms differ so, the first one's part."""
    if log_odds >= 0:
        return 1.0 / (1.0 + math.exp(-log_odds))
    odds = math.exp(log_odds)
    return odds / (1.0 + odds)
