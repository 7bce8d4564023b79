"""A call with many prompts, each of which is a request of its own; nothing is sent before all results are there.

A call has a bounded number of requests under way, so that one with thousands does not fill the queue.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError, EngineError
from common.limits import MAX_PROMPTS_AT_ONCE
from common.params.pooling import EMBED_PARAMS, Pooling
from router.answers.stream_assembly import StreamAssembly
from router.api.answer_call import AnswerCall
from router.api.answer_writer import as_seen, first_of
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt
from router.requests.stream import ReplacedError, RequestStream, RoutedRequest

T = TypeVar("T")
# Streams that are opened before the event loop does something else.
_OPENED_PER_TURN = 64


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """One of the prompts.

    Attributes:
        prompt: its tokens.
        request: parameters of its answer.
        pooling: how its hidden states become a vector; None for a prompt that is answered.
    """

    prompt: Prompt
    request: pb.GenerateRequest
    pooling: Pooling | None = None


class PromptBatch(ABC, Generic[T]):
    """The prompts of one call, and the result of each. A subclass says which prompts, and how a result is read.

    Args:
        call: the call.

    Attributes:
        results: the results, in the order of the prompts, once `run` has returned.
    """

    def __init__(self, call: AnswerCall) -> None:
        self.call = call
        self.results: Sequence[T] = ()

    @abstractmethod
    async def prompts(self, model: ServedModel) -> Sequence[BatchPrompt]:
        """Makes the prompts for a model.

        Raises:
            ApiError: the request is refused.
        """

    @abstractmethod
    async def read(self, stream: RequestStream) -> T:
        """Reads the result of one prompt.

        Raises:
            ApiError: its request failed.
        """

    @property
    def usage(self) -> pb.Usage:
        """Token counts: nothing is generated for the client."""
        streams = self.call.streams
        return pb.Usage(
            prompt_tokens=sum(len(stream.request.token_ids) for stream in streams),
            cached_tokens=sum(stream.assembly.start.cached_tokens for stream in streams),
        )

    @property
    def weights_digest(self) -> str:
        """Digest of the weights."""
        return self.call.streams[0].request.weights_digest

    @property
    def numerics(self) -> str:
        """Digest of the numerics class; "" if workers of several classes shared the prompts."""
        classes = {stream.attempts.numerics for stream in self.call.streams}
        return classes.pop() if len(classes) == 1 else ""

    async def run(self) -> None:
        """Has all prompts answered.

        Weights may be rolled away before the call has begun: then the prompts are made once more, for other weights.

        Raises:
            ApiError: the request is refused, or failed; UNAVAILABLE if a worker was lost.
        """
        call = self.call
        with call.accounted():
            await call.wait_for_model()
            while True:
                model = call.choose_model()
                with call.interruptible():
                    prompts = await self.prompts(model)
                earlier, call.streams = call.streams, ()
                try:
                    self.results = await self._read_all(model, prompts, earlier)
                    return
                except ReplacedError:
                    continue
                finally:
                    call.close_streams()

    async def _read_all(
        self, model: ServedModel, prompts: Sequence[BatchPrompt], earlier: Sequence[RequestStream]
    ) -> list[T]:
        """Opens a stream for each prompt and reads it; the first one that fails ends the others."""
        call = self.call
        total = sum(len(each.prompt.token_ids) for each in prompts)
        slots = asyncio.Semaphore(MAX_PROMPTS_AT_ONCE)
        streams = call.streams = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for place, each in enumerate(prompts):
                    await slots.acquire()
                    if place and place % _OPENED_PER_TURN == 0:
                        await asyncio.sleep(0)
                    routed, assembly = await self._build(model, place, each)
                    call.record.prompt_tokens = call.prompt_tokens = total
                    before = earlier[place] if place < len(earlier) else None
                    streams.append(call.open_stream(routed, assembly, before))
                    tasks.append(group.create_task(self._read_one(streams[-1], slots)))
        except BaseExceptionGroup as errors:
            error = first_of(errors)
            raise (as_seen(error, streams, has_sent=False) if isinstance(error, ApiError) else error) from None
        # A task that was cancelled alone counts as a good end in a group.
        if any(task.cancelled() for task in tasks):
            raise asyncio.CancelledError
        return [task.result() for task in tasks]

    async def _read_one(self, stream: RequestStream, slots: asyncio.Semaphore) -> T:
        result = await self.read(stream)
        slots.release()
        return result

    async def _build(self, model: ServedModel, place: int, each: BatchPrompt) -> tuple[RoutedRequest, StreamAssembly]:
        """Builds what workers get of a prompt, and the assembly of its answer."""
        builder = self.call.backend.builder
        routed = replace(await builder.build(self.call, each.request, model, each.prompt), choice=place)
        if each.pooling is not None:
            routed = replace(routed, params=EMBED_PARAMS, pooling=each.pooling)
        return routed, builder.assembly(each.request, routed, model)


async def pooled_states(stream: RequestStream) -> bytes:
    """Waits for the pooled hidden states of a prompt.

    Raises:
        EngineError: the worker sent none.
    """
    while (await stream.next()).ending is None:
        pass
    states, stream.assembly.pooled = stream.assembly.pooled, b""
    if not states:
        raise EngineError(f"worker {stream.assembly.worker_id} sends no vector of a prompt that is embedded")
    return states
