"""Tier in host memory: an area of fixed slots, least recently used chain ends first."""

from __future__ import annotations

import heapq
import itertools
import mmap
import threading
from dataclasses import dataclass

from common.wire.block_hash import GRANULE_BLOCKS


@dataclass(slots=True)
class _Entry:
    """One value.

    Attributes:
        slot: its place in the area.
        parent: name of the block before, which may be absent; empty if unknown.
        run: kept blocks in a row that end with this one, at most GRANULE_BLOCKS.
        used: time of its last use.
    """

    slot: int
    parent: bytes
    run: int = 0
    used: int = 0


class MemoryTier:
    """Values of one size in an anonymous mapping, which takes memory as it fills.

    A block without the blocks before it cannot be found, so only ends of chains leave: of those the least recently
    used. Thread-safe.

    Args:
        num_bytes: of the mapping.
        value_bytes: of a value.
    """

    def __init__(self, num_bytes: int, value_bytes: int) -> None:
        self._width = value_bytes
        self._num_slots = num_bytes // self._width
        self._area = mmap.mmap(-1, max(1, self._num_slots) * self._width)
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._entries: dict[bytes, _Entry] = {}
        # Kept blocks behind each block, which may be absent.
        self._children: dict[bytes, set[bytes]] = {}
        # Ends of chains by time of use; an entry that was used later, has children or is gone is stale.
        self._ends: list[tuple[int, bytes]] = []
        self._ticks = itertools.count(1)
        self._lock = threading.Lock()
        self._changes: list[tuple[bytes, bool]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, name: bytes) -> bool:
        """True if a value is kept under the name."""
        return name in self._entries

    def get(self, name: bytes) -> bytes | None:
        """The value, None without one."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return None
            self._touch(name, entry)
            start = entry.slot * self._width
            return self._area[start : start + self._width]

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        """Keeps a value, unless the name has one. False without room for any."""
        with self._lock:
            if name in self._entries:
                return True
            if len(value) != self._width or not (self._free or self._evict(parent)):
                return False
            slot = self._free.pop()
            self._area[slot * self._width : (slot + 1) * self._width] = value
            entry = self._entries[name] = _Entry(slot, parent)
            self._touch(name, entry)
            if parent:
                self._children.setdefault(parent, set()).add(name)
            self._count_runs(name)
            return True

    def watch(self) -> None:
        """Makes `take_changes` report from now on which blocks end a granule's number of blocks in a row."""
        self._changes = []

    @property
    def has_changes(self) -> bool:
        """True if `take_changes` has changes."""
        return bool(self._changes)

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Changes since the last call, in order: a name, and True if the granule that it ends is whole now."""
        if not self._changes:
            return []
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def drop(self, name: bytes) -> None:
        """Forgets a value; blocks behind it stay until they are the least recently used."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._remove(name, entry)
                self._count_runs(*self._children.get(name, ()))

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._free += [entry.slot for entry in self._entries.values()]
            for name, entry in self._entries.items():
                self._note(name, entry, 0)
            self._entries.clear()
            self._children.clear()
            self._ends.clear()

    def close(self) -> None:
        """Forgets all values."""
        self.clear()

    def _count_runs(self, *names: bytes) -> None:
        """Updates the runs of these kept blocks and of the blocks behind them: consecutive kept blocks up to each."""
        left = list(names)
        while left:
            name = left.pop()
            entry = self._entries[name]
            before = self._entries.get(entry.parent)
            run = min(GRANULE_BLOCKS, 1 + (before.run if before else 0))
            if run != entry.run:
                self._note(name, entry, run)
                left += self._children.get(name, ())

    def _note(self, name: bytes, entry: _Entry, run: int) -> None:
        """Sets the run of a block, and notes whether it makes a granule whole."""
        if self._changes is not None and GRANULE_BLOCKS in (entry.run, run):
            self._changes.append((name, run == GRANULE_BLOCKS))
        entry.run = run

    def _touch(self, name: bytes, entry: _Entry) -> None:
        entry.used = next(self._ticks)
        heapq.heappush(self._ends, (entry.used, name))
        if len(self._ends) > 4 * len(self._entries) + 64:
            self._ends = [(each.used, key) for key, each in self._entries.items() if key not in self._children]
            heapq.heapify(self._ends)

    def _evict(self, kept: bytes) -> bool:
        """Frees the slot of the least recently used end of a chain, but not that of `kept`. False without one."""
        stale: list[tuple[int, bytes]] = []
        while self._ends:
            used, name = heapq.heappop(self._ends)
            entry = self._entries.get(name)
            if entry is None or name in self._children or entry.used != used:
                continue
            if name == kept:
                stale.append((used, name))
                continue
            self._remove(name, entry)
            break
        for each in stale:
            heapq.heappush(self._ends, each)
        return bool(self._free)

    def _remove(self, name: bytes, entry: _Entry) -> None:
        del self._entries[name]
        self._note(name, entry, 0)
        self._free.append(entry.slot)
        if siblings := self._children.get(entry.parent):
            siblings.remove(name)
            if not siblings:
                del self._children[entry.parent]
                if (before := self._entries.get(entry.parent)) is not None:
                    heapq.heappush(self._ends, (before.used, entry.parent))
