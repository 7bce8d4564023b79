"""Many prompts of one call: requests of their own, of which nothing is sent before all is there.

A call has a bounded number of them under way, so that one with thousands does not fill the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError, EngineError
from common.limits import MAX_PROMPTS_AT_ONCE
from router.answers.stream_assembly import StreamAssembly
from router.api.answer_call import Answering, as_seen, first_of
from router.api.asked import GENERATE, Asked
from router.api.request_builder import RequestBuilder
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt
from router.requests.stream import RequestStream, RoutedRequest
from router.telemetry.metrics import RequestMeasure

T = TypeVar("T")
# Prompts that are sent on their way before the event loop does something else.
_OPENED_PER_TURN = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One of the prompts.

    Attributes:
        prompt: its tokens.
        request: parameters of the answer that it gets.
        change: changes what workers get.
    """

    prompt: Prompt
    request: pb.GenerateRequest
    change: Callable[[RoutedRequest], RoutedRequest] = lambda routed: routed


# Makes the prompts for a model.
Prepare: TypeAlias = Callable[[ServedModel], Awaitable[Sequence[Part]]]


@dataclass(frozen=True, slots=True)
class BatchResults(Generic[T]):
    """Results of the prompts, in their order, and the streams that brought them."""

    results: list[T]
    streams: Sequence[RequestStream]

    @property
    def usage(self) -> pb.Usage:
        """Token counts: nothing is generated for the client."""
        return pb.Usage(
            prompt_tokens=sum(len(stream.request.token_ids) for stream in self.streams),
            cached_tokens=sum(stream.assembly.start.cached_tokens for stream in self.streams),
        )

    @property
    def weights_digest(self) -> str:
        """Digest of the weights."""
        return self.streams[0].request.weights_digest

    @property
    def numerics(self) -> str:
        """Digest of the numerics class; "" where workers of several classes have shared the prompts."""
        classes = {stream.attempts.numerics for stream in self.streams}
        return classes.pop() if len(classes) == 1 else ""


class PromptBatch:
    """Has many prompts of a call answered.

    Args:
        answering: carries calls.
        builder: makes of a request what workers get.
    """

    def __init__(self, answering: Answering, builder: RequestBuilder) -> None:
        self._answering = answering
        self._builder = builder

    async def gather(
        self,
        asked: Asked,
        measure: RequestMeasure,
        prepare: Prepare,
        read: Callable[[RequestStream], Awaitable[T]],
    ) -> BatchResults[T]:
        """Has all prompts answered; prepares them once more where their weights go before they have begun.

        Args:
            asked: the call; its request has the model and the session.
            measure: of the call.
            prepare: makes the prompts.
            read: reads the answer to one of them.

        Raises:
            ApiError: the request is refused, or has failed; UNAVAILABLE if a worker was lost.
        """
        parts: Sequence[Part] = ()
        earlier: Sequence[RequestStream] = ()
        streams: list[RequestStream] = []

        async def begin(model: ServedModel, before: Sequence[RequestStream]) -> Sequence[RequestStream]:
            nonlocal parts, earlier, streams
            with self._builder.interruptible(asked.call):
                parts = await prepare(model)
            earlier, streams = before, []
            return streams

        async def read_all(model: ServedModel, _: Sequence[RequestStream]) -> BatchResults[T]:
            return BatchResults(await self._read(asked, model, parts, earlier, streams, read), streams)

        return await self._answering.carry(asked, measure, begin, read_all)

    async def _read(
        self,
        asked: Asked,
        model: ServedModel,
        parts: Sequence[Part],
        earlier: Sequence[RequestStream],
        streams: list[RequestStream],
        read: Callable[[RequestStream], Awaitable[T]],
    ) -> list[T]:
        """Answers to all prompts, whose streams are added to `streams`; the first that fails ends the others.

        Raises:
            ApiError: of the first that has failed, as of a call of which nothing has come.
        """
        total = sum(len(part.prompt.token_ids) for part in parts)
        slots = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)

        async def read_one(stream: RequestStream) -> T:
            result = await read(stream)
            slots.release()
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for place, part in enumerate(parts):
                    await slots.acquire()
                    if place and place % _OPENED_PER_TURN == 0:
                        await asyncio.sleep(0)
                    one = await self._prepare(asked, model, place, part)
                    asked.record.prompt_tokens = asked.call.prompt_tokens = total
                    self._answering.open(asked, [one], earlier, beside=streams)
                    tasks.append(group.create_task(read_one(streams[-1])))
        except BaseExceptionGroup as errors:
            error = first_of(errors)
            raise (as_seen(error, streams, has_sent=False) if isinstance(error, ApiError) else error) from None
        if any(task.cancelled() for task in tasks):
            raise asyncio.CancelledError
        return [task.result() for task in tasks]

    async def _prepare(
        self, asked: Asked, model: ServedModel, place: int, part: Part
    ) -> tuple[RoutedRequest, StreamAssembly]:
        """The request that workers get of a prompt, and the assembly that takes the answer."""

        async def encode(*_: object) -> Prompt:
            return part.prompt

        routed = await self._builder.prepare(GENERATE, replace(asked, request=part.request, encode=encode), model)
        routed = part.change(replace(routed, choice=place))
        return routed, self._builder.assembly(GENERATE, routed, model)


async def pooled_states(stream: RequestStream) -> bytes:
    """Waits for what a worker makes of the hidden states of a prompt.

    Raises:
        EngineError: the worker has sent nothing.
    """
    while (await stream.next()).ending is None:
        pass
    states, stream.assembly.pooled = stream.assembly.pooled, b""
    if not states:
        raise EngineError(f"worker {stream.assembly.worker_id} sends no vector of a prompt that is embedded")
    return states
