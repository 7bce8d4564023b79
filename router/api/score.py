"""Score: how likely given continuations are, as requests that generate one token which nobody reads.

Each continuation is a prompt whose logprobs are wanted from where it begins, so that its bits are
those that decoding reports, and what is before it may come from the prefix cache. Nothing is sent before all is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from fissile.v1 import inference_pb2 as pb

from common.errors import UnservedMethodError
from common.wire.logprob_rows import added
from router.api.asked import Asked
from router.api.prompt_batch import Part, PromptBatch
from router.api.responses import token_logprobs
from router.model_registry import ServedModel
from router.prompts.prompts import PromptEncoder, ScorePrompt
from router.requests.stream import RequestStream
from router.telemetry.metrics import RequestMeasure


class Scoring:
    """Scores continuations.

    Args:
        gathering: has them answered.
        encoder: makes prompts.
    """

    def __init__(self, gathering: PromptBatch, encoder: PromptEncoder) -> None:
        self._gathering = gathering
        self._encoder = encoder

    async def score(self, asked: Asked, request: pb.ScoreRequest, measure: RequestMeasure) -> pb.ScoreResponse:
        """Scores the continuations of a request that `validation.check_score` has passed.

        Args:
            asked: the call; its request has the model and the session.
            request: as it came.
            measure: of the call.

        Raises:
            ApiError: the request is refused, or has failed; UNAVAILABLE if a worker was lost.
        """

        async def prepare(model: ServedModel) -> list[Part]:
            model.check_generates()
            if not model.serves_logprobs:
                raise UnservedMethodError("Score", model.name)
            prompts = await self._encoder.for_score(request, model, asked.call.tenant, asked.cache_salt)
            return [_part(asked, prompt) for prompt in prompts]

        gathered = await self._gathering.gather(asked, measure, prepare, _entries)
        return pb.ScoreResponse(
            request_id=asked.call.request_id,
            scores=[_score(entries, return_tokens=request.return_tokens) for entries in gathered.results],
            usage=gathered.usage,
            weights_digest=gathered.weights_digest,
            numerics=gathered.numerics,
        )


def _part(asked: Asked, scored: ScorePrompt) -> Part:
    """The request for one continuation."""
    one = pb.GenerateRequest(
        model=asked.request.model,
        session_id=asked.request.session_id,
        sampling_params=pb.SamplingParams(max_tokens=1, temperature=0.0),
        output_options=pb.OutputOptions(prompt_logprobs=0, prompt_logprobs_start=scored.start),
    )
    return Part(scored.prompt, one)


async def _entries(stream: RequestStream) -> list[pb.TokenLogprobs]:
    entries: list[pb.TokenLogprobs] = []
    while True:
        part = await stream.next()
        if part.logprobs is not None and part.logprobs.prompt is not None:
            entries += token_logprobs(part.logprobs.prompt)
        if part.ending is not None:
            return entries


def _score(entries: Sequence[pb.TokenLogprobs], *, return_tokens: bool) -> pb.Score:
    return pb.Score(
        logprob=added(0.0, (entry.logprob for entry in entries)),
        greedy=all(entry.rank == 1 for entry in entries),
        tokens=len(entries),
        logprobs=entries if return_tokens else (),
    )
