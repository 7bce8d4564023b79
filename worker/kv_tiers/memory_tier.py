"""Tier in host memory: an area of fixed slots, least recently used chain ends first."""

from __future__ import annotations

import heapq
import itertools
import mmap
import threading
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    """One value: its slot, the name of the block before, how many kept blocks follow it, and when it was used last."""

    slot: int
    parent: bytes
    num_children: int = 0
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
            # Only a parent that is here now counts its children, and stays as long as it has any.
            entry = self._entries[name] = _Entry(slot, parent if parent in self._entries else b"")
            self._note(name, True)
            self._touch(name, entry)
            if entry.parent:
                self._entries[parent].num_children += 1
            return True

    def watch(self) -> None:
        """Makes `take_changes` report changes from now on."""
        self._changes = []

    @property
    def has_changes(self) -> bool:
        """True if `take_changes` has changes."""
        return bool(self._changes)

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Changes since the last call, in order: a name, and True if it has a value now."""
        if not self._changes:
            return []
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def drop(self, name: bytes) -> None:
        """Forgets a value; blocks behind it stay until they are the least recently used."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return
            for each in self._entries.values() if entry.num_children else ():
                if each.parent == name:
                    each.parent = b""
            self._remove(name, entry)

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._free += [entry.slot for entry in self._entries.values()]
            for name in self._entries:
                self._note(name, False)
            self._entries.clear()
            self._ends.clear()

    def close(self) -> None:
        """Forgets all values."""
        self.clear()

    def _note(self, name: bytes, is_kept: bool) -> None:
        if self._changes is not None:
            self._changes.append((name, is_kept))

    def _touch(self, name: bytes, entry: _Entry) -> None:
        entry.used = next(self._ticks)
        heapq.heappush(self._ends, (entry.used, name))
        if len(self._ends) > 4 * len(self._entries) + 64:
            self._ends = [(each.used, key) for key, each in self._entries.items() if not each.num_children]
            heapq.heapify(self._ends)

    def _evict(self, kept: bytes) -> bool:
        """Frees the slot of the least recently used end of a chain, but not that of `kept`. False without one."""
        stale: list[tuple[int, bytes]] = []
        while self._ends:
            used, name = heapq.heappop(self._ends)
            entry = self._entries.get(name)
            if entry is None or entry.num_children or entry.used != used:
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
        self._note(name, False)
        self._free.append(entry.slot)
        if entry.parent:
            before = self._entries[entry.parent]
            before.num_children -= 1
            if not before.num_children:
                heapq.heappush(self._ends, (before.used, entry.parent))
