"""Workers that have never been up: whether one of them may still bring a model that nobody serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from common.limits import MAX_QUEUED_REQUESTS, WORKER_WAIT_S
from router.model_registry import ModelRegistry, ServedModel


class ExpectedWorkers:
    """The addresses of which nothing has been heard, and the requests that wait for a model from one of them.

    Args:
        registry: the models that have been heard of.
        wait_s: for how long an address is expected to come up, seconds.
        clock: monotonic seconds.
    """

    def __init__(self, registry: ModelRegistry, wait_s: float = WORKER_WAIT_S, *, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._wait_s = wait_s
        self._clock = clock
        # By address: until when it is expected.
        self._until: dict[str, float] = {}
        self._came_up = asyncio.Event()
        self._num_waiting = 0

    def __len__(self) -> int:
        """Number of requests that wait."""
        return self._num_waiting

    def expect(self, address: str) -> None:
        """Expects a worker that has just been named."""
        self._until[address] = self._clock() + self._wait_s

    def forget(self, address: str) -> None:
        """Expects a worker no more."""
        self._until.pop(address, None)

    def came_up(self, address: str) -> None:
        """Notes that a worker has come up: the registry knows its model now."""
        self.forget(address)
        self._came_up.set()
        self._came_up = asyncio.Event()

    async def model(self, name: str) -> ServedModel:
        """Waits for the model called `name`, as `wait_for_model` does, and returns it.

        Raises:
            ApiError: as `ModelRegistry.get`.
        """
        await self.wait_for_model(name)
        return self._registry.get(name)

    async def wait_for_model(self, name: str) -> None:
        """Returns when a model called `name` (any for an empty name) is known, or nothing speaks for it any more.

        What has never been up may serve it: all workers together for `wait_s` from now while none has been up, and then
        each address for as long after it was named. So that a router that has just been started does not refuse what it
        will serve in a moment. At once when too many wait for it already.
        """
        if self._registry.knows(name) or self._num_waiting >= MAX_QUEUED_REQUESTS:
            return
        now = self._clock()
        end = now + self._wait_s
        if self._registry.knows(""):
            end = min(end, max(self._until.values(), default=now))
        self._num_waiting += 1
        try:
            while not self._registry.knows(name) and (left_s := end - self._clock()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._came_up.wait(), left_s)
        finally:
            self._num_waiting -= 1
