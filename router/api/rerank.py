"""Rerank: how relevant documents are to a query.

Each document is a request of its own. Either its prompt asks the model whether the document is relevant, and the
logprobs of yes and no are compared; or the model has a classifier, which computes a number.
"""

from __future__ import annotations

import math

import numpy as np
from fissile.v1 import inference_pb2 as pb

from common.errors import NotARerankerError
from common.params.pooling import LABELS
from router.api.answer_call import AnswerCall
from router.api.prompt_batch import BatchPrompt, PromptBatch, pooled_states
from router.api.responses import token_logprobs
from router.model_registry import ServedModel
from router.prompts.prompts import PromptEncoder
from router.requests.stream import RequestStream


class RerankBatch(PromptBatch[float]):
    """The documents of one Rerank, and the relevance of each, from 0 to 1.

    Args:
        call: the call.
        request: as it came, checked by `validation.check_rerank`.
        encoder: makes prompts.
    """

    def __init__(self, call: AnswerCall, request: pb.RerankRequest, encoder: PromptEncoder) -> None:
        super().__init__(call)
        self._request = request
        self._encoder = encoder

    async def rerank(self) -> pb.RerankResponse:
        """Orders the documents by their relevance.

        Raises:
            ApiError: the request is refused, or failed; UNAVAILABLE if a worker was lost.
        """
        await self.run()
        request = self._request
        ranked = [pb.RankedDocument(index=i, relevance=value) for i, value in enumerate(self.results)]
        ranked.sort(key=lambda document: (-document.relevance, document.index))
        del ranked[request.top_n or len(ranked) :]
        for document in ranked if request.return_documents else ():
            document.document = request.documents[document.index]
        return pb.RerankResponse(
            request_id=self.call.request_id,
            documents=ranked,
            usage=self.usage,
            weights_digest=self.weights_digest,
            numerics=self.numerics,
        )

    async def prompts(self, model: ServedModel) -> list[BatchPrompt]:
        """Makes a prompt of the query and each document."""
        tokens = model.relevance_tokens
        if not model.reranks or not (model.has_relevance_head or tokens):
            raise NotARerankerError(model.name, model.num_labels)
        call = self.call
        prompts = await self._encoder.for_rerank(self._request, model, call.tenant, call.cache_salt)
        request = pb.GenerateRequest(model=model.name, session_id=self._request.session_id)
        if model.has_relevance_head:
            return [BatchPrompt(prompt, request, LABELS) for prompt in prompts]
        request.sampling_params.CopyFrom(pb.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        # Yes and no.
        request.output_options.CopyFrom(pb.OutputOptions(logprobs=0, logprob_token_ids=tokens))
        return [BatchPrompt(prompt, request) for prompt in prompts]

    async def read(self, stream: RequestStream) -> float:
        """Reads the classifier's number, or the logprobs of yes and no, as a probability."""
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
    """The probability with these log odds, computed without overflow."""
    if log_odds >= 0:
        return 1.0 / (1.0 + math.exp(-log_odds))
    odds = math.exp(log_odds)
    return odds / (1.0 + odds)
