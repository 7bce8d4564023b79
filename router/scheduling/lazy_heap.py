"""The least value among things that come and go: a heap with lazy deletion."""

from __future__ import annotations

import heapq
from collections.abc import Container

# Entries of things that are gone stay in the heap until they come up, or until so many more than half of it are gone.
_SPARE = 64


class LazyMinHeap:
    """The least value of the keys that are in `alive`; each operation is O(log n), amortized.

    A key that leaves `alive` is forgotten. One that comes back must be added again, with the value it had.

    Args:
        alive: the keys that count, kept by the owner.
    """

    def __init__(self, alive: Container[int]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int]] = []
        self._limit = _SPARE

    def __len__(self) -> int:
        """Number of entries, those of keys that are gone included."""
        return len(self._heap)

    def add(self, value: float, key: int) -> None:
        """Counts `key`, which is in `alive`, with its value."""
        heapq.heappush(self._heap, (value, key))
        if len(self._heap) > self._limit:
            self._heap = list({entry for entry in self._heap if entry[1] in self._alive})
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SPARE

    def top(self) -> tuple[float, int] | None:
        """The least (value, key); None when there is none."""
        while self._heap and self._heap[0][1] not in self._alive:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
