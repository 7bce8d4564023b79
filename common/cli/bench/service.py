"""Requests of a benchmark to a running router over gRPC, as any client sends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.cli.bench.load import Load
from common.cli.bench.records import INTERRUPTED, Record
from common.cli.bench.workload import Work
from common.rpc.durations import to_seconds

GONE_AFTER: Final = 100


@dataclass(frozen=True, slots=True)
class Terms:
    """Model, sampling parameters and other fields that all requests of a benchmark share.

    Attributes:
        model: its name; empty takes the router's only one.
        sampling: fields of SamplingParams besides `max_tokens`, `ignore_eos` and `seed`.
        ignore_eos: go on past the end-of-sequence tokens, so that every answer has the length asked for.
        seed: of the benchmark; a request's own seed is made of it and the request's number.
        timeout_s: deadline of a request.
        metadata: of every call.
    """

    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: float = 600.0
    metadata: Sequence[tuple[str, str]] = ()

    def params(self, work: Work, index: int) -> dict[str, Any]:
        """The sampling parameters of request `index`."""
        own = {"max_tokens": work.output_tokens, "ignore_eos": self.ignore_eos, "seed": (self.seed + index) % (1 << 64)}
        return {**self.sampling, **own}


class RouterClient:
    """Sends requests and notes when their tokens come.

    Token ids are asked for, because they say when a token has come: text may lag behind, by a stop string that it could
    become or a character that is not whole.

    Args:
        channel: to the router.
        terms: of all requests.
        cache_salt: of all requests; with another one nothing is found in prefix caches.
    """

    def __init__(self, channel: grpc.aio.Channel, terms: Terms, cache_salt: str = "") -> None:
        self._stub = InferenceServiceStub(channel)
        self._terms = terms
        self._cache_salt = cache_salt

    async def send(self, work: Work, record: Record, clock: Callable[[], float]) -> None:
        """Sends one request and fills in its record until the stream ends.

        Args:
            work: what it asks for.
            record: of it.
            clock: seconds since the run's begin.
        """
        call = self._call(work, record.index)
        finish = pb.Finish()
        try:
            async for part in call:
                if part.token_ids:
                    record.arrivals.append(clock())
                    record.output_tokens += len(part.token_ids)
                if part.HasField("finish"):
                    finish = part.finish
        except grpc.aio.AioRpcError as error:
            record.status, record.message = error.code().name, error.details() or ""
            return
        finally:
            # Leaving the loop alone would not cancel the call.
            call.cancel()
        _note(record, finish)
        prompt_tokens = len(work.token_ids) or None
        said = finish.usage.completion_tokens
        record.check_lengths(work.output_tokens, prompt_tokens, said, exact=self._terms.ignore_eos)

    def _call(self, work: Work, index: int) -> grpc.aio.UnaryStreamCall[Any, Any]:
        terms = self._terms
        shared: dict[str, Any] = {
            "model": terms.model,
            "sampling_params": pb.SamplingParams(**terms.params(work, index)),
            "output_options": pb.OutputOptions(return_token_ids=True),
            "cache_salt": self._cache_salt,
        }
        if work.messages:
            chat = pb.ChatRequest(
                messages=[
                    pb.ChatMessage(role=message["role"], content=message["content"]) for message in work.messages
                ],
                **shared,
            )
            return self._stub.Chat(chat, timeout=terms.timeout_s, metadata=terms.metadata)
        request = pb.GenerateRequest(**shared)
        if work.text:
            request.text = work.text
        else:
            request.token_ids.ids.extend(work.token_ids)
        return self._stub.Generate(request, timeout=terms.timeout_s, metadata=terms.metadata)


def _note(record: Record, finish: pb.Finish) -> None:
    """Notes the content of the last message."""
    record.input_tokens, record.cached_tokens = finish.usage.prompt_tokens, finish.usage.cached_tokens
    record.worker_id, record.attempts = finish.worker_id, finish.attempts
    record.drafts = [(one.verified, one.accepted) for one in finish.drafts]
    timings = finish.timings
    record.queue_s, record.prefill_s = to_seconds(timings.queue), to_seconds(timings.prefill)
    record.service_ttft_s = to_seconds(timings.ttft)


class RouterRun:
    """One run of a load against a router.

    Attributes:
        records: of all requests that have been sent.
        in_flight: requests that have not ended.

    Args:
        load: says when.
        work_of: says what, by the request's number.
        client: sends.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        load: Load,
        work_of: Callable[[int], Work],
        client: RouterClient,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.records: list[Record] = []
        self.in_flight = 0
        self._load = load
        self._work_of = work_of
        self._client = client
        self._clock = clock
        self._begin = 0.0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unavailable = 0

    def stop(self) -> None:
        """Sends no further request and ends those in flight."""
        self._load = _Nothing()
        for task in self._tasks:
            task.cancel()
        self._changed.set()

    async def run(self) -> list[Record]:
        """Sends everything and waits until it has ended. Returns the records.

        When GONE_AFTER requests in turn were answered with UNAVAILABLE, the service has gone: no further one is sent.
        """
        self._begin = self._clock()
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for intended in self._load.take(self._now(), self.in_flight):
                    self._send(group, intended)
                finished = self._load.exhausted(self._now())
                if finished and not self.in_flight:
                    return self.records
                await self._wait(None if finished else self._load.next_time())

    async def _wait(self, until: float | None) -> None:
        """Waits until a request ends, or until the given time."""
        delay = None if until is None else max(0.0, until - self._now())
        try:
            async with asyncio.timeout(delay):
                await self._changed.wait()
        except TimeoutError:
            return

    def _send(self, group: asyncio.TaskGroup, intended: float) -> None:
        work = self._work_of(len(self.records))
        record = Record(len(self.records), intended, self._now())
        self.records.append(record)
        self.in_flight += 1
        task = group.create_task(self._client.send(work, record, self._now))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, record))

    def _ended(self, task: asyncio.Task[None], record: Record) -> None:
        record.ended = self._now()
        if task.cancelled():
            record.status = INTERRUPTED
        self._unavailable = self._unavailable + 1 if record.status == grpc.StatusCode.UNAVAILABLE.name else 0
        if self._unavailable == GONE_AFTER:
            self._load = _Nothing()
        self._tasks.discard(task)
        self.in_flight -= 1
        self._changed.set()

    def _now(self) -> float:
        return self._clock() - self._begin


class _Nothing:
    """A load without requests."""

    def take(self, now: float, in_flight: int) -> list[float]:
        return []

    def next_time(self) -> None:
        return

    def exhausted(self, now: float) -> bool:
        """True, always: nothing further is ever due."""
        return True
