"""Score: how likely given continuations are, as requests that generate one token which nobody reads.

Each continuation is a prompt with logprobs from the continuation's first token on. So its bits are those that decoding
reports, and the context before it may come from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from fissile.v1 import inference_pb2 as pb

from common.errors import UnservedMethodError
from common.wire.logprob_rows import added
from router.api.answer_call import AnswerCall
from router.api.prompt_batch import BatchPrompt, PromptBatch
from router.api.responses import token_logprobs
from router.model_registry import ServedModel
from router.prompts.prompts import PromptEncoder, ScorePrompt
from router.requests.stream import RequestStream


class ScoreBatch(PromptBatch[list[pb.TokenLogprobs]]):
    """The continuations of one Score, and the logprobs of each.

    Args:
        call: the call.
        request: as it came, checked by `validation.check_score`.
        encoder: makes prompts.
    """

    def __init__(self, call: AnswerCall, request: pb.ScoreRequest, encoder: PromptEncoder) -> None:
        super().__init__(call)
        self._request = request
        self._encoder = encoder

    async def score(self) -> pb.ScoreResponse:
        """Scores the continuations.

        Raises:
            ApiError: the request is refused, or failed; UNAVAILABLE if a worker was lost.
        """
        await self.run()
        return pb.ScoreResponse(
            request_id=self.call.request_id,
            scores=[_score(entries, return_tokens=self._request.return_tokens) for entries in self.results],
            usage=self.usage,
            weights_digest=self.weights_digest,
            numerics=self.numerics,
        )

    async def prompts(self, model: ServedModel) -> list[BatchPrompt]:
        """Makes a prompt of each continuation and its context."""
        model.check_generates()
        if not model.serves_logprobs:
            raise UnservedMethodError("Score", model.name)
        call = self.call
        prompts = await self._encoder.for_score(self._request, model, call.tenant, call.cache_salt)
        return [self._batch_prompt(prompt) for prompt in prompts]

    async def read(self, stream: RequestStream) -> list[pb.TokenLogprobs]:
        """Reads the logprobs of a continuation's tokens."""
        entries: list[pb.TokenLogprobs] = []
        while True:
            part = await stream.next()
            if part.logprobs is not None and part.logprobs.prompt is not None:
                entries += token_logprobs(part.logprobs.prompt)
            if part.ending is not None:
                return entries

    def _batch_prompt(self, scored: ScorePrompt) -> BatchPrompt:
        request = pb.GenerateRequest(
            model=self._request.model,
            session_id=self._request.session_id,
            sampling_params=pb.SamplingParams(max_tokens=1, temperature=0.0),
            output_options=pb.OutputOptions(prompt_logprobs=0, prompt_logprobs_start=scored.start),
        )
        return BatchPrompt(scored.prompt, request)


def _score(entries: Sequence[pb.TokenLogprobs], *, return_tokens: bool) -> pb.Score:
    return pb.Score(
        logprob=added(0.0, (entry.logprob for entry in entries)),
        greedy=all(entry.rank == 1 for entry in entries),
        tokens=len(entries),
        logprobs=entries if return_tokens else (),
    )
