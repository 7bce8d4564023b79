"""Workers that have never been up; requests for an unknown model wait for them for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from common.errors import NoWorkerError
from common.limits import MAX_QUEUED_REQUESTS, WORKER_WAIT_S
from router.model_registry import ModelRegistry, ServedModel


class ExpectedWorkers:
    """Addresses that have never been up, and the requests that wait for a model from one of them.

    Args:
        registry: the known models.
        wait_s: how long a new address is expected to come up, seconds.
        clock: monotonic seconds.

    Attributes:
        names: models whose workers may be away, scaled to zero; requests for them always wait.
    """

    def __init__(self, registry: ModelRegistry, wait_s: float = WORKER_WAIT_S, *, clock: Callable[[], float]) -> None:
        self.names: frozenset[str] = frozenset()
        self._registry = registry
        self._wait_s = wait_s
        self._clock = clock
        # By address: the end of its expectation.
        self._until: dict[str, float] = {}
        self._came_up = asyncio.Event()
        self._num_waiting = 0

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self._num_waiting

    def expect(self, address: str) -> None:
        """Expects a worker whose address has just been added."""
        self._until[address] = self._clock() + self._wait_s

    def forget(self, address: str) -> None:
        """Stops expecting a worker."""
        self._until.pop(address, None)

    def came_up(self, address: str) -> None:
        """Wakes the waiting requests, because a worker is up and the registry knows its model."""
        self.forget(address)
        self._came_up.set()
        self._came_up = asyncio.Event()

    async def model(self, name: str) -> ServedModel:
        """Waits for a model as `wait_for_model` does, and returns it.

        Raises:
            ApiError: as `wait_for_model` and `ModelRegistry.get`.
        """
        await self.wait_for_model(name)
        return self._registry.get(name)

    async def wait_for_model(self, name: str) -> None:
        """Waits until a model called `name` (any model for an empty name) is known, or no expected worker is left.

        Until a first worker has been up, waits `wait_s`; afterwards until `wait_s` after the last address was added. So
        a router that has just started does not refuse requests that it can serve in a moment. A request for one of
        `names` always waits `wait_s`. Returns at once if too many requests wait.

        Raises:
            NoWorkerError: no worker with a model of `names` has come up.
        """
        if self._registry.knows(name) or self._num_waiting >= MAX_QUEUED_REQUESTS:
            return
        now = self._clock()
        end = now + self._wait_s
        if self._registry.knows("") and name not in self.names:
            end = min(end, max(self._until.values(), default=now))
        self._num_waiting += 1
        try:
            while not self._registry.knows(name) and (left_s := end - self._clock()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._came_up.wait(), left_s)
        finally:
            self._num_waiting -= 1
        if name in self.names and not self._registry.knows(name):
            waited_s = f"{self._wait_s:g}"
            raise NoWorkerError(f"no worker serves model {name!r}, for {waited_s} s now", waited_s=waited_s)
