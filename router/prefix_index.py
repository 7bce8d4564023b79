"""Which worker is likely to have which prefix in its cache: an index of granules of 8 blocks.

A granule is named by the chain hash of its last block, which stands for the whole prefix (`common.block_hash`). The
index is a hint: it is fed by what this router has sent to the workers, not by what they say they hold, so what another
router sent is not in it, and what a worker has evicted is only guessed. Workers compare tokens, whatever this says.

Layout: buckets of 8 entries, as in a processor's cache, in two flat arrays: the hash, and 4 owners of 32 bits, a worker
and a stamp of its clock: 24 bytes an entry. Nothing is ever moved or rehashed. Invariants:
  * There are never more than `capacity` entries; a full bucket gives up an entry without owners first.
  * A worker's clock runs by the granules that it had to compute; an owner whose stamp is a whole cache behind it does
    not count, for the worker has evicted that granule unless another router has used it since.
  * The owners of an entry are the latest 4 to get it; a worker that has left owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from common.limits import MAX_INDEX_ENTRIES

GRANULE_BLOCKS: Final = 8
BYTES_PER_ENTRY: Final = 24
_WAYS = 8
_OWNERS = 4
# Resolution of the clock: so many ticks while a worker writes its whole cache anew.
_TICKS = 16
_STAMP_BITS = 16
_STAMPS = 1 << _STAMP_BITS
_MAX_WORKERS = (1 << 16) - 1


@dataclass(slots=True)
class _Worker:
    name: str
    granules: int
    written: int = 0

    @property
    def clock(self) -> int:
        return self.written * _TICKS // self.granules if self.granules else 0


class PrefixIndex:
    """The granules of one model.

    Args:
        capacity: most entries; rounded up to a power of two of buckets.
    """

    def __init__(self, capacity: int = MAX_INDEX_ENTRIES) -> None:
        buckets = 1 << max(0, (-(-capacity // _WAYS) - 1).bit_length())
        self._mask = buckets - 1
        # Zeroed pages cost nothing until they are written; a memoryview gives plain ints four times as fast.
        self._hashes = np.zeros(buckets * _WAYS, np.uint64).data
        self._owners = np.zeros(buckets * _WAYS * _OWNERS, np.uint32).data
        self._slots: dict[str, int] = {}
        self._workers: list[_Worker | None] = [None]
        self._hand = 0

    @property
    def capacity(self) -> int:
        """Most entries."""
        return len(self._hashes)

    @property
    def nbytes(self) -> int:
        """Size of the entries, bytes."""
        return self._hashes.nbytes + self._owners.nbytes

    def add_worker(self, worker: str, granules: int) -> None:
        """A worker instance begins with an empty cache of so many granules; 0 when not known: nothing is forgotten."""
        self.remove_worker(worker)
        if len(self._workers) > _MAX_WORKERS:
            self._renumber()
        self._slots[worker] = len(self._workers)
        self._workers.append(_Worker(worker, granules))

    def remove_worker(self, worker: str) -> None:
        """A worker is gone; a no-op for one that is not here."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._workers[slot] = None

    def store(self, worker: str, granules: Sequence[int]) -> None:
        """The worker has been given a prompt with these granules, first to last; it will hold them all."""
        slot = self._slots[worker]
        entry = self._workers[slot]
        assert entry is not None
        entry.written += len(granules) - self.depth(worker, granules)
        stamp = slot << _STAMP_BITS | entry.clock % _STAMPS
        for granule in granules:
            if granule:
                self._own(self._find(granule), self._bucket(granule), granule, stamp)

    def depth(self, worker: str, granules: Sequence[int]) -> int:
        """How many of the first granules the worker is likely to hold: O(log) of their number."""
        slot = self._slots[worker]
        low, high = 0, len(granules)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if slot in self._live(granules[middle - 1]) else (low, middle - 1)
        return low

    def owners(self, granules: Sequence[int]) -> list[str]:
        """Up to 4 workers that are likely to hold the longest prefix of all; none when nobody holds any of it."""
        found: list[int] = []
        low, high = 0, len(granules)
        while low < high:
            middle = (low + high + 1) // 2
            slots = self._live(granules[middle - 1])
            if slots:
                found, low = slots, middle
            else:
                high = middle - 1
        return [worker.name for slot in found if (worker := self._workers[slot]) is not None]

    def _live(self, granule: int) -> list[int]:
        """Slots of the workers that own a granule."""
        at = self._find(granule)
        return [] if at is None else self._live_at(at)

    def _live_at(self, at: int) -> list[int]:
        owners = self._owners[at * _OWNERS : (at + 1) * _OWNERS].tolist()
        return [owner >> _STAMP_BITS for owner in owners if self._counts(owner)]

    def _counts(self, owner: int) -> bool:
        worker = self._workers[owner >> _STAMP_BITS]
        return worker is not None and (worker.clock - owner) % _STAMPS < _TICKS

    def _bucket(self, granule: int) -> int:
        return (granule & self._mask) * _WAYS

    def _find(self, granule: int) -> int | None:
        start = self._bucket(granule)
        bucket = self._hashes[start : start + _WAYS].tolist()
        return start + bucket.index(granule) if granule and granule in bucket else None

    def _own(self, at: int | None, bucket: int, granule: int, stamp: int) -> None:
        if at is None:
            at = self._victim(bucket)
            self._hashes[at] = granule
            for i in range(_OWNERS):
                self._owners[at * _OWNERS + i] = 0
        owners = self._owners[at * _OWNERS : (at + 1) * _OWNERS].tolist()
        slot = stamp >> _STAMP_BITS
        places = [i for i, owner in enumerate(owners) if owner >> _STAMP_BITS == slot]
        places = places or [i for i, owner in enumerate(owners) if not self._counts(owner)]
        self._owners[at * _OWNERS + (places[0] if places else self._turn(_OWNERS))] = stamp

    def _victim(self, bucket: int) -> int:
        free = next((at for at in range(bucket, bucket + _WAYS) if not self._live_at(at)), None)
        return bucket + self._turn(_WAYS) if free is None else free

    def _turn(self, number: int) -> int:
        self._hand += 1
        return self._hand % number

    def _renumber(self) -> None:
        """Numbers of workers have run out after 65,535 restarts: forgets everything but who is here."""
        names = {worker.name: worker.granules for worker in self._workers if worker is not None}
        self.__init__(self.capacity)  # type: ignore[misc]
        for name, granules in names.items():
            self.add_worker(name, granules)
