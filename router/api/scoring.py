"""Score: how likely given continuations are, as requests that generate one token which nobody reads.

Each continuation is a prompt whose logprobs are wanted from where it begins, so that its bits are
those that decoding reports, and what is before it may come from the prefix cache. Nothing is sent before all is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError
from common.logprob_rows import added
from router.api.answering import GENERATE, Answering, Asked, as_seen, first_of
from router.api.responses import token_logprobs
from router.model_registry import ServedModel
from router.requests.stream import RequestStream, RoutedRequest
from router.telemetry.metrics import RequestMeasure
from router.text.prompts import Prompt, PromptEncoder, ScorePrompt


class Scoring:
    """Scores continuations.

    Args:
        answering: makes of a request what workers get, and carries it.
        encoder: makes prompts.
    """

    def __init__(self, answering: Answering, encoder: PromptEncoder) -> None:
        self._answering = answering
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

        async def begin(model: ServedModel, earlier: Sequence[RequestStream]) -> Sequence[RequestStream]:
            with self._answering.interruptible(asked.call):
                prompts = await self._encoder.for_score(request, model, asked.call.tenant, asked.cache_salt)
            routed = [await self._prepare(asked, model, i, prompt) for i, prompt in enumerate(prompts)]
            asked.record.prompt_tokens = asked.call.prompt_tokens = sum(len(one.token_ids) for one in routed)
            taken = ((one, self._answering.assembly(GENERATE, one, model)) for one in routed)
            return self._answering.open(asked, taken, earlier)

        async def read(_: ServedModel, streams: Sequence[RequestStream]) -> pb.ScoreResponse:
            return _response(request, await _read(streams), streams)

        return await self._answering.carry(asked, measure, begin, read)

    async def _prepare(self, asked: Asked, model: ServedModel, index: int, scored: ScorePrompt) -> RoutedRequest:
        """The request for one continuation."""

        async def encode(*_: object) -> Prompt:
            return scored.prompt

        one = pb.GenerateRequest(
            model=asked.request.model,
            session_id=asked.request.session_id,
            sampling_params=pb.SamplingParams(max_tokens=1, temperature=0.0),
            output_options=pb.OutputOptions(prompt_logprobs=0, prompt_logprobs_start=scored.start),
        )
        routed = await self._answering.prepare(GENERATE, replace(asked, request=one, encode=encode), model)
        return replace(routed, choice=index)


async def _read(streams: Sequence[RequestStream]) -> list[list[pb.TokenLogprobs]]:
    """Entries of each continuation; the first that fails ends the others.

    Raises:
        ApiError: of the first that has failed, as of a call of which nothing has come.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_entries(stream)) for stream in streams]
    except BaseExceptionGroup as errors:
        error = first_of(errors)
        raise (as_seen(error, streams, has_sent=False) if isinstance(error, ApiError) else error) from None
    if any(task.cancelled() for task in tasks):
        raise asyncio.CancelledError
    return [task.result() for task in tasks]


async def _entries(stream: RequestStream) -> list[pb.TokenLogprobs]:
    entries: list[pb.TokenLogprobs] = []
    while True:
        part = await stream.next()
        if part.logprobs is not None and part.logprobs.prompt is not None:
            entries += token_logprobs(part.logprobs.prompt)
        if part.ending is not None:
            return entries


def _response(
    request: pb.ScoreRequest, scored: Sequence[Sequence[pb.TokenLogprobs]], streams: Sequence[RequestStream]
) -> pb.ScoreResponse:
    # Workers of several classes may have shared the continuations, and then there is no one class.
    classes = {stream.attempts.numerics for stream in streams}
    return pb.ScoreResponse(
        request_id=streams[0].request.request_id,
        scores=[
            pb.Score(
                logprob=added(0.0, (entry.logprob for entry in entries)),
                greedy=all(entry.rank == 1 for entry in entries),
                tokens=len(entries),
                logprobs=entries if request.return_tokens else (),
            )
            for entries in scored
        ],
        usage=pb.Usage(
            prompt_tokens=sum(len(stream.request.token_ids) for stream in streams),
            cached_tokens=sum(stream.assembly.start.cached_tokens for stream in streams),
        ),
        weights_digest=streams[0].request.weights_digest,
        numerics=classes.pop() if len(classes) == 1 else "",
    )
