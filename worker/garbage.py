"""Runs the garbage collector between steps in a worker's processes.

The automatic collector runs whenever enough has been allocated, also in the middle of a step, and a full collection
then stops all threads for milliseconds. Here it runs between two steps, a little at a time, and fully while the engine
is idle. Cycles come from the event loop (calls that end with an exception), hardly from the engine. Only a worker's
processes do this: `LLMEngine` is a library, and the collector belongs to its host.
"""

from __future__ import annotations

import enum
import gc
import time
from collections.abc import Callable
from typing import Final

# Containers allocated and not freed since the last collection. A collection of as many takes 0.1 to 0.5 ms.
YOUNG_ALLOCATIONS: Final = 1_000
# Young collections per middle one, and middle ones per full one: a full collection follows growth by 300,000
# containers at the latest.
YOUNG_PER_MIDDLE: Final = 5
MIDDLE_PER_FULL: Final = 50
# Seconds between two full collections: at least that while idle, at most that while busy.
IDLE_FULL_S: Final = 10.0
BUSY_FULL_S: Final = 300.0


class Generation(enum.IntEnum):
    """Depth of a collection: argument of `gc.collect`."""

    YOUNG = 0
    MIDDLE = 1
    FULL = 2


class CollectionPolicy:
    """Decides when to collect which generation. Pure: takes counts and `now`, monotonic seconds.

    Args:
        now: of a full collection.
    """

    def __init__(self, now: float) -> None:
        self._last_full = now
        self._num_young = 0
        self._num_middle = 0

    def due(self, allocated: int, now: float, *, idle: bool) -> Generation | None:
        """The collection to make now, which counts as made; None for none.

        Args:
            allocated: containers allocated and not freed since the last collection.
            now: monotonic seconds.
            idle: True if no step is running.
        """
        since_full = now - self._last_full
        if since_full >= (IDLE_FULL_S if idle else BUSY_FULL_S) or self._num_middle >= MIDDLE_PER_FULL:
            self._last_full, self._num_young, self._num_middle = now, 0, 0
            return Generation.FULL
        if allocated < YOUNG_ALLOCATIONS:
            return None
        if self._num_young >= YOUNG_PER_MIDDLE:
            self._num_young = 0
            self._num_middle += 1
            return Generation.MIDDLE
        self._num_young += 1
        return Generation.YOUNG


class GarbageCollector:
    """Replaces the automatic collector from `start` to `stop`. For the one thread that makes the steps.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._policy = CollectionPolicy(clock())

    def start(self) -> None:
        """Collects, freezes the surviving objects, and turns the automatic collector off.

        No later collection visits frozen objects (a pool of a million blocks takes 150 ms).
        """
        # Objects that an earlier engine froze are garbage by now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.disable()
        self._policy = CollectionPolicy(self._clock())

    def stop(self) -> None:
        """Turns the automatic collector on again."""
        gc.enable()

    def between_steps(self) -> None:
        """Collects a little if enough has been allocated."""
        self._collect(idle=False)

    def while_idle(self) -> None:
        """Runs a full collection if the last one was long enough ago."""
        self._collect(idle=True)

    def _collect(self, *, idle: bool) -> None:
        generation = self._policy.due(gc.get_count()[0], self._clock(), idle=idle)
        if generation is not None:
            gc.collect(generation)
