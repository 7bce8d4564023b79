"""Changes of the cached blocks, one by one, for subscribers of other projects (`worker/doors`).

Routers of Fissile compute a block's hash themselves and learn the cache granule by granule (cache_events.py). Other
projects hash blocks in their own way, so they need each block's tokens and its parent.

Invariants:
  * Batches are numbered without gaps, and have at most MAX_KV_FRAME_CHANGES changes.
  * All batches up to a number add up to the cache after that batch: to `snapshot` for the newest.
  * The log holds at most `capacity` changes, apart from the newest batch, and each cached block once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from common.limits import MAX_KV_FRAME_CHANGES, MAX_KV_LOG
from worker.engine.prefix_cache import BlockChange, StoredBlock


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Some changes of one step, in order."""

    number: int
    changes: tuple[BlockChange, ...]


class BlockLog:
    """The changes of one engine's cached blocks.

    Args:
        first: number of the first batch.
        capacity: the log keeps the newest batches with at most this many changes, and the newest one in any case.

    Attributes:
        number: of the newest batch; one below `first` for an empty log.
    """

    def __init__(self, first: int, capacity: int = MAX_KV_LOG) -> None:
        self.number = first - 1
        self._capacity = capacity
        self._present: dict[int, StoredBlock] = {}
        self._batches: deque[BlockBatch] = deque()
        self._num_changes = 0
        # Callbacks for the next batch; a dict, because it keeps their order.
        self._waiting: dict[Callable[[], None], None] = {}

    def append(self, changes: Iterable[BlockChange]) -> None:
        """Appends the changes of one step (`PrefixCache.take_block_changes`) and wakes the waiting callbacks."""
        known = iter([change for change in changes if self._apply(change)])
        before = self.number
        while some := tuple(islice(known, MAX_KV_FRAME_CHANGES)):
            self.number += 1
            self._batches.append(BlockBatch(self.number, some))
            self._num_changes += len(some)
        while self._num_changes > self._capacity and len(self._batches) > 1:
            self._num_changes -= len(self._batches.popleft().changes)
        if self.number != before:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def remembers(self, number: int) -> bool:
        """True if every batch behind batch `number` is kept."""
        return self.number - len(self._batches) <= number <= self.number

    def after(self, number: int) -> list[BlockBatch]:
        """The batches behind batch `number`, which must be kept."""
        return [self._batches[i] for i in range(number - self.number, 0)]

    def snapshot(self) -> list[StoredBlock]:
        """All cached blocks after the newest batch, parents first."""
        return list(self._present.values())

    def wait(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once, at the next batch."""
        self._waiting[wake] = None

    def leave(self, wake: Callable[[], None]) -> None:
        """Removes a waiting callback."""
        self._waiting.pop(wake, None)

    def _apply(self, change: BlockChange) -> bool:
        """Applies a change to the cached blocks. False if it removes a block that was never reported."""
        if isinstance(change, int):
            return self._present.pop(change, None) is not None
        self._present[change.hash] = change
        return True
