"""Index of the prefixes in each worker's KV cache and memory tier, in granules of 8 blocks.

A granule is named by the chain hash of its last block, which covers the whole prefix (common/wire/block_hash.py).
Workers report the blocks they hold (KvEvents of the Session), whichever router sent the prompt. A prompt that this
router has just sent counts for EXPECTED_S without a report. The index is only a hint: workers compare the tokens.

Layout: buckets of 8 entries, as in a processor's cache, in two flat arrays: the hash, and 8 owners of 16 bits: 24 bytes
an entry. The index starts small and grows by linear hashing (Litwin 1980): one bucket after the other splits in two by
one more bit of its hashes, without loss. So memory follows what the workers hold, and no report waits until the whole
table has been moved. Invariants:
  * There are at most `capacity` entries, and at most MAX_EXPECTED_GRANULES that are only expected.
  * Without overflow the index is exactly what the workers have reported. A full bucket forgets an entry without owners,
    or else any entry. A granule keeps its first 8 owners; another owner counts when it stores the granule again.
  * A worker that has left, or starts again, owns nothing.

A worker whose KV cache holds a granule also holds the ones before it in the prompt, so that binary search finds depths.
A memory tier may lack granules in the middle: it evicts a block while the KV cache still has it. So the index of memory
tiers is searched one granule after another, from the depth in the KV cache to the first hole.
Forgotten entries may make a depth too small, never too large. One case is unknown: a granule with 8 owners counts for
another worker too if that worker holds a later one.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from common.limits import EXPECTED_S, MAX_EXPECTED_GRANULES, MAX_INDEX_ENTRIES

BYTES_PER_ENTRY: Final = 24
_WAYS = 8
_OWNERS = 8
_MAX_WORKERS = (1 << 16) - 1
_FIRST_BUCKETS = 1 << 13
# The table grows below 6 slots per used entry: so sparse, buckets rarely overflow.
_SPARSE = 6
# Buckets that are renumbered in one step.
_PIECE = 1 << 12
_Names = npt.NDArray[np.uint64]
_Positions = npt.NDArray[np.intp]


def _marked_positions() -> list[int]:
    """Positions of the granules that are noted when a prompt is sent: numbers of at most 4 significant bits.

    So there are few of them, and the depth found is less than an eighth too small.
    """
    return sorted({mantissa << shift for shift in range(40) for mantissa in range(1, 16)})


_MARKS: Final = _marked_positions()


class PrefixIndex:
    """The granules of one model.

    Args:
        capacity: most entries; rounded up to a power of two of buckets.
    """

    def __init__(self, capacity: int = MAX_INDEX_ENTRIES) -> None:
        self._most_buckets = 1 << max(0, (-(-capacity // _WAYS) - 1).bit_length())
        # Buckets in use, of which the first `_num_buckets - _low` have been split; `_low` is a power of two.
        self._num_buckets = self._low = min(self._most_buckets, _FIRST_BUCKETS)
        self._hashes = np.frombuffer(_zeros(self._most_buckets * _WAYS * 8), np.uint64).reshape(-1, _WAYS)
        self._owners = np.frombuffer(_zeros(self._hashes.size * _OWNERS * 2), np.uint16).reshape(-1, _WAYS, _OWNERS)
        # A memoryview gives plain ints four times as fast.
        self._hash_at, self._owner_at = self._hashes.reshape(-1).data, self._owners.reshape(-1).data
        self._slots: dict[str, int] = {}
        # Worker name of each slot. Slot 0 is unused; a departed worker's name is set to "".
        self._names = [""]
        self._is_owner = np.zeros(_MAX_WORKERS + 1, np.bool_)
        self._hand = 0
        self._size = 0
        self._forgotten = 0
        self._expected = _ExpectedPrefixes()

    def __len__(self) -> int:
        """Number of entries, including those of departed workers that have not been overwritten."""
        return self._size

    @property
    def capacity(self) -> int:
        return self._most_buckets * _WAYS

    @property
    def nbytes(self) -> int:
        """Size of the table's current buckets, bytes."""
        return self._num_buckets * _WAYS * BYTES_PER_ENTRY

    @property
    def forgotten(self) -> int:
        """Number of owners that were not stored or were overwritten for lack of room."""
        return self._forgotten

    @property
    def workers(self) -> list[str]:
        """The workers in the index."""
        return list(self._slots)

    def add_worker(self, worker: str) -> None:
        """Adds a worker with an empty cache."""
        self.remove_worker(worker)
        if len(self._names) > _MAX_WORKERS:
            self._renumber()
        slot = self._slots[worker] = len(self._names)
        self._names.append(worker)
        self._is_owner[slot] = True

    def remove_worker(self, worker: str) -> None:
        """Removes a worker; a no-op if it is not in the index."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._names[slot] = ""
            self._is_owner[slot] = False

    def store(self, worker: str, granules: Iterable[int]) -> None:
        """Adds granules that a worker reports as stored."""
        slot, names = self._slots[worker], _array(granules)
        self._grow(min(self._most_buckets, (self._size + names.size) * _SPARSE // _WAYS))
        while names.size:
            buckets = self._buckets(names)
            # One granule per bucket and round, so that none overwrites another.
            _, firsts = np.unique(buckets, return_index=True)
            self._store_apart(slot, names[firsts], buckets[firsts])
            names = np.delete(names, firsts) if firsts.size < names.size else names[:0]

    def evict(self, worker: str, granules: Iterable[int]) -> None:
        """Removes granules that a worker reports as evicted."""
        slot, names = self._slots[worker], np.unique(_array(granules))
        buckets = self._buckets(names)
        is_here = self._hashes[buckets] == names[:, None]
        found = np.flatnonzero(is_here.any(1))
        buckets, ways = buckets[found], is_here[found].argmax(1)
        owners = self._owners[buckets, ways]
        owners[owners == slot] = 0
        self._owners[buckets, ways] = owners
        empty = np.flatnonzero(~self._is_owner[owners].any(1))
        self._hashes[buckets[empty], ways[empty]] = 0
        self._size -= empty.size

    def expect(self, worker: str, granules: Sequence[int], now: float) -> None:
        """Notes that a worker is being sent a prompt with these granules, first to last."""
        self._expected.add(self._slots[worker], granules, now)

    def longest(self, granules: Sequence[int], now: float) -> tuple[int, list[str]]:
        """Length of the longest prefix that a worker holds or is expected to hold, in granules, and its workers.

        (0, []) if no worker holds the first granule.
        """
        told = _deepest(range(1, len(granules) + 1), lambda i: bool(self._owners_of(granules[i - 1])))
        marks = _marks(len(granules))
        sent = _deepest(marks, lambda i: bool(self._sent_to(granules[i - 1], now)))
        slots = self._owners_of(granules[told - 1]) if told and told >= sent else []
        if sent and sent >= told:
            slots = [*slots, *(slot for slot in self._sent_to(granules[sent - 1], now) if slot not in slots)]
        return max(told, sent), [name for slot in slots if (name := self._names[slot])]

    def depth(self, worker: str, granules: Sequence[int], now: float) -> int:
        """Length of the prefix that a worker holds or is expected to hold, in granules: O(log n)."""
        slot = self._slots[worker]
        sent = _deepest(_marks(len(granules)), lambda i: slot in self._sent_to(granules[i - 1], now))
        return max(sent, self._told_depth(slot, granules))

    def knows(self, granule: int, now: float) -> bool:
        """True if a worker holds a granule or is expected to hold it."""
        return bool(self._owners_of(granule) or self._sent_to(granule, now))

    def run(self, worker: str, granules: Sequence[int]) -> int:
        """Number of granules before the first one that a worker does not hold: O(n)."""
        slot = self._slots[worker]
        first = self._owners_of(granules[0]) if granules else []
        if slot not in first and len(first) < _OWNERS:
            return 0
        owners = self._owners_of_each(granules)
        is_held = (owners == slot).any(1)
        # As in `_told_depth`: a worker may hold a granule of eight others without being listed.
        ends = np.flatnonzero(~(is_held | owners.all(1)))
        held = np.flatnonzero(is_held[: ends[0]] if ends.size else is_held)
        return int(held[-1]) + 1 if held.size else 0

    def holders(self, granules: Sequence[int]) -> list[str]:
        """At most 8 workers that have reported any of the granules: those with the last ones."""
        slots, places = np.unique(self._owners_of_each(granules)[::-1], return_index=True)
        return [self._names[slot] for slot in slots[places.argsort()].tolist() if slot][:_OWNERS]

    def held(self, worker: str) -> set[int]:
        """All granules that a worker has reported as held. O(capacity): for tests."""
        used = slice(self._num_buckets)
        return {int(name) for name in self._hashes[used][(self._owners[used] == self._slots[worker]).any(2)]}

    def _told_depth(self, slot: int, granules: Sequence[int]) -> int:
        def may_own(i: int) -> bool:
            owners = self._owners_of(granules[i - 1])
            # If all owner places are taken, this worker may hold the granule without being listed.
            return slot in owners or len(owners) == _OWNERS

        depth = _deepest(range(1, len(granules) + 1), may_own)
        if not depth or slot in self._owners_of(granules[depth - 1]):
            return depth
        return _deepest(range(1, depth), lambda i: slot in self._owners_of(granules[i - 1]))

    def _owners_of(self, granule: int) -> list[int]:
        """Slots of the workers that have reported a granule."""
        bucket = granule & (2 * self._low - 1)
        start = (bucket if bucket < self._num_buckets else bucket - self._low) * _WAYS
        names = self._hash_at[start : start + _WAYS].tolist()
        if not granule or granule not in names:
            return []
        at = (start + names.index(granule)) * _OWNERS
        return [slot for slot in self._owner_at[at : at + _OWNERS].tolist() if self._names[slot]]

    def _owners_of_each(self, granules: Sequence[int]) -> npt.NDArray[np.uint16]:
        """Slots of the workers that have reported each granule, [number of granules, _OWNERS]; 0 for none."""
        names = np.array(granules, np.uint64)
        buckets = self._buckets(names)
        is_here = (self._hashes[buckets] == names[:, None]) & (names[:, None] != 0)
        owners = self._owners[buckets, is_here.argmax(1)]
        return np.where(is_here.any(1)[:, None] & self._is_owner[owners], owners, np.uint16(0))

    def _sent_to(self, granule: int, now: float) -> list[int]:
        """Slots of the workers that were sent a granule lately."""
        return [slot for slot in self._expected.slots(granule, now) if self._names[slot]]

    def _grow(self, num_buckets: int) -> None:
        """Splits buckets until there are `num_buckets`; the cost is that of the new buckets alone."""
        while self._num_buckets < num_buckets:
            first = self._num_buckets - self._low
            count = min(num_buckets - self._num_buckets, self._low - first)
            old, new = slice(first, first + count), slice(self._num_buckets, self._num_buckets + count)
            moves = (self._hashes[old] & np.uint64(self._low)) != 0
            for array in (self._hashes, self._owners):
                array[new][moves] = array[old][moves]
                array[old][moves] = 0
            self._num_buckets += count
            if self._num_buckets == 2 * self._low:
                self._low *= 2

    def _buckets(self, names: _Names) -> _Positions:
        buckets: _Positions = (names & np.uint64(2 * self._low - 1)).astype(np.intp)
        buckets[buckets >= self._num_buckets] -= self._low
        return buckets

    def _store_apart(self, slot: int, names: _Names, buckets: _Positions) -> None:
        """Stores granules that are all in different buckets."""
        rows = self._hashes[buckets]
        is_here = rows == names[:, None]
        ways = is_here.argmax(1)
        new = np.flatnonzero(~is_here.any(1))
        if new.size:
            ways[new] = self._make_room(buckets[new], rows[new])
            self._hashes[buckets[new], ways[new]] = names[new]
            self._owners[buckets[new], ways[new]] = 0
        owners = self._owners[buckets, ways]
        lacks = ~(owners == slot).any(1)
        free = ~self._is_owner[owners]
        has_room = free.any(1)
        at = np.flatnonzero(lacks & has_room)
        self._owners[buckets[at], ways[at], free[at].argmax(1)] = slot
        self._forgotten += int((lacks & ~has_room).sum())

    def _make_room(self, buckets: _Positions, rows: _Names) -> _Positions:
        """The entry to overwrite in each bucket."""
        empty = rows == 0
        ways: _Positions = empty.argmax(1)
        full = np.flatnonzero(~empty.any(1))
        self._size += buckets.size - full.size
        if full.size:
            is_owned = np.any(self._is_owner[self._owners[buckets[full]]], axis=2)
            all_owned = np.all(is_owned, axis=1)
            self._hand += 1
            ways[full] = np.where(all_owned, self._hand % _WAYS, np.argmin(is_owned, axis=1))
            self._forgotten += int(all_owned.sum())
        return ways

    def _renumber(self) -> None:
        """Gives the current workers new slots, because all 65,535 have been used."""
        new_slots = np.zeros(_MAX_WORKERS + 1, np.uint16)
        for number, old in enumerate(self._slots.values(), 1):
            new_slots[old] = number
        # In place, because views of the array exist.
        for start in range(0, self._num_buckets, _PIECE):
            piece = self._owners[start : min(start + _PIECE, self._num_buckets)]
            piece[:] = new_slots[piece]
        self._slots = {name: number for number, name in enumerate(self._slots, 1)}
        self._names = ["", *self._slots]
        self._is_owner[:] = False
        self._is_owner[1 : len(self._names)] = True
        self._expected = _ExpectedPrefixes()


class LongestPrefix(NamedTuple):
    """Longest cached beginnings of a prompt, in granules.

    Attributes:
        depth: in any worker's KV cache and, behind that, its memory tier.
        pool_depth: in any worker's KV cache, or expected there.
        pool_owners: workers with `pool_depth` granules in their KV caches.
        memory_owners: workers with the longest beginning, among those whose memory tier continues their KV cache's.
    """

    depth: int = 0
    pool_depth: int = 0
    pool_owners: Sequence[str] = ()
    memory_owners: Sequence[str] = ()


class TieredIndex:
    """Prefixes of one model in the workers' KV caches and in their memory tiers.

    Tiers that workers share have no entries, because they serve all these workers alike.

    Args:
        capacity: most entries of each of the two indexes.

    Attributes:
        pool: prefixes in KV caches.
        memory: prefixes in memory tiers.
    """

    def __init__(self, capacity: int) -> None:
        self.pool, self.memory = PrefixIndex(capacity), PrefixIndex(capacity)

    def add_worker(self, worker: str) -> None:
        """Adds a worker with an empty KV cache and memory tier."""
        self.pool.add_worker(worker)
        self.memory.add_worker(worker)

    def remove_worker(self, worker: str) -> None:
        """Removes a worker; a no-op if it is not in the index."""
        self.pool.remove_worker(worker)
        self.memory.remove_worker(worker)

    def longest(self, granules: Sequence[int], now: float) -> LongestPrefix:
        """The longest cached beginnings of a prompt with these granules."""
        pool_depth, pool_owners = self.pool.longest(granules, now)
        deepest, owners = 0, list[str]()
        for worker in self.memory.holders(granules) if len(self.memory) else ():
            depth, below = self.depths(worker, granules, now)
            if below > depth and below >= deepest:
                owners = [*owners, worker] if below == deepest else [worker]
                deepest = below
        return LongestPrefix(max(pool_depth, deepest), pool_depth, pool_owners, owners)

    def depths(self, worker: str, granules: Sequence[int], now: float) -> tuple[int, int]:
        """Granules of a prompt in a worker's KV cache; and in that continued by its memory tier."""
        depth = self.pool.depth(worker, granules, now)
        return depth, depth + (self.memory.run(worker, granules[depth:]) if len(self.memory) else 0)

    def knows(self, granule: int, now: float) -> bool:
        """True if a worker holds a granule in any tier or is expected to hold it."""
        return self.pool.knows(granule, now) or (len(self.memory) > 0 and self.memory.knows(granule, now))


class _ExpectedPrefixes:
    """Prefixes sent in the last EXPECTED_S: by granule, the slots and when each expires."""

    def __init__(self) -> None:
        self._until: dict[int, dict[int, float]] = {}
        self._sent: deque[tuple[float, int, list[int]]] = deque()
        self._marks = 0

    def add(self, slot: int, granules: Sequence[int], now: float) -> None:
        marked = [granules[i - 1] for i in _marks(len(granules))]
        until = now + EXPECTED_S
        for granule in marked:
            self._until.setdefault(granule, {})[slot] = until
        self._sent.append((until, slot, marked))
        self._marks += len(marked)
        while self._sent and (self._sent[0][0] <= now or self._marks > MAX_EXPECTED_GRANULES):
            self._drop_oldest()

    def slots(self, granule: int, now: float) -> list[int]:
        found = self._until.get(granule)
        return [slot for slot, until in found.items() if until > now] if found else []

    def _drop_oldest(self) -> None:
        end, slot, marked = self._sent.popleft()
        self._marks -= len(marked)
        for granule in marked:
            found = self._until.get(granule, {})
            # It may have been sent again since.
            if found.get(slot) == end:
                del found[slot]
                if not found:
                    del self._until[granule]


def _zeros(nbytes: int) -> mmap.mmap:
    """Zeroed memory that the system provides page by page on the first write.

    In small pages, because clearing a huge page takes milliseconds on some hosts.
    """
    space = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        space.madvise(mmap.MADV_NOHUGEPAGE)
    return space


def _marks(count: int) -> list[int]:
    """The marked positions of a prompt of `count` granules, including its last one."""
    marks = _MARKS[: bisect_right(_MARKS, count)]
    return [*marks, count] if count and marks[-1] != count else marks


def _deepest(positions: Sequence[int], holds: Callable[[int], bool]) -> int:
    """The last of ascending `positions` for which `holds` is true, by binary search; 0 if none is."""
    low, high = 0, len(positions)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(positions[middle - 1]) else (low, middle - 1)
    return positions[low - 1] if low else 0


def _array(granules: Iterable[int]) -> _Names:
    """The granules as an array, without zeros: 0 means "no granule"."""
    names: _Names = np.fromiter(granules, np.uint64)
    return np.asarray(names[names != 0], np.uint64)
