"""KV tiers of an engine: its threads read blocks ahead of prompts and write blocks behind steps.

No step waits for a tier. Whatever a tier does (it fails, hangs, lies, is full), the worst result is a block that is
computed again, and a count that says so.

A tier keeps a value for each block: its bytes behind a header with a digest of name and bytes. A value that is damaged,
cut off or kept under another name is none. The digest finds accidents. It does not stop an attacker who can write to a
tier, because it has no key.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

import structlog
import xxhash

from worker.kv_tiers.memory_tier import MemoryTier

T = TypeVar("T")

log = structlog.get_logger(__name__)

# Bytes of blocks that are read but not yet in the pool, and as many that are not yet written: 256 MiB, or one block.
MAX_WAITING_BYTES: Final = 256 << 20
_READERS: Final = 4
# A tier that failed is left alone for this time, then for twice as long, up to the longest.
_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 30.0
# Fetches that took too long, one after another, after which prompts do not wait for the longest rest.
_MOST_LATE: Final = 3

_MAGIC: Final = b"FKV1"
# Magic, bytes of the block, digest of name and block.
_HEADER: Final = struct.Struct("<4sQ16s")
HEADER_BYTES: Final = _HEADER.size

# What became of blocks, for metrics.
HIT: Final = "hit"
MISS: Final = "miss"
DAMAGED: Final = "damaged"
FAILED: Final = "failed"
STORED: Final = "stored"
DROPPED: Final = "dropped"
LATE: Final = "late"
EQUAL: Final = "equal"
DIFFERENT: Final = "different"
# Operations of a tier.
READ: Final = "read"
WRITE: Final = "write"


def pack(name: bytes, block: bytes) -> bytes:
    """The value that keeps a block under a name."""
    return _HEADER.pack(_MAGIC, len(block), _checksum(name, block)) + block


def unpack(name: bytes, value: bytes, size: int) -> bytes | None:
    """The block in a value, or None if the value is not of this name or not `size` bytes of a whole block."""
    if len(value) != HEADER_BYTES + size:
        return None
    magic, length, checksum = _HEADER.unpack_from(value)
    block = value[HEADER_BYTES:]
    if magic != _MAGIC or length != size or checksum != _checksum(name, block):
        return None
    return block


def _checksum(name: bytes, block: bytes) -> bytes:
    digest = xxhash.xxh3_128(name)
    digest.update(block)
    return digest.digest()


class KvTier(Protocol):
    """Keeps values under names. May raise anything; called by several threads."""

    def get(self, name: bytes) -> bytes | None:
        """The value, None without one."""
        ...

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        """Keeps a value; `parent` names the block before. False if there is no room for it now."""
        ...

    def drop(self, name: bytes) -> None:
        """Forgets a value."""
        ...

    def close(self) -> None:
        """Gives back what the tier holds. No call succeeds afterwards."""
        ...


class KvFetch:
    """Blocks that a thread reads.

    Args:
        names: of the blocks, each behind the one before.
        parent: name of the block before the first; empty without one.
        release: called once the blocks' memory is given back.

    Attributes:
        num_names: blocks asked for.
        blocks: what was found, up to the first block that no tier has; complete once `is_done`.
        results: number of blocks by tier and result (`hit`, `miss`, `damaged`).
        is_done: True once reading has ended.
    """

    def __init__(self, names: Sequence[bytes], parent: bytes, release: Callable[[], None]) -> None:
        self._names = names
        self._parent = parent
        self._release = release
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_names = len(names)
        self.blocks: list[bytes] = []
        self.results = Counter[tuple[str, str]]()
        self.is_done = False

    def read(self, get: Callable[[bytes, bytes, Counter[tuple[str, str]]], bytes | None]) -> bool:
        """Reads the blocks, unless the fetch is closed meanwhile; returns False if it was."""
        try:
            for parent, name in pairwise((self._parent, *self._names)):
                if self._is_closed or (block := get(name, parent, self.results)) is None:
                    break
                self.blocks.append(block)
        finally:
            with self._lock:
                self.is_done = True
                was_closed = self._is_closed
                if was_closed:
                    self._release()
        return not was_closed

    def close(self) -> None:
        """Gives the blocks' memory back: they are taken, or no longer wanted. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                if self.is_done:
                    self._release()


class _Shelf:
    """A tier with its name and counts. It rests after a failure. Its methods never raise."""

    def __init__(self, name: str, tier: KvTier, clock: Callable[[], float]) -> None:
        self.name = name
        self.tier = tier
        self.counts = Counter(dict.fromkeys((HIT, MISS, DAMAGED, FAILED, STORED, DROPPED, EQUAL, DIFFERENT), 0))
        # Bytes and seconds.
        self.traffic = {READ: (0, 0.0), WRITE: (0, 0.0)}
        self._lock = threading.Lock()
        self._clock = clock
        self._rest_s = _REST_S
        self._rests_until = 0.0

    def get(self, name: bytes, size: int) -> tuple[bytes | None, str]:
        """The block of this name if the tier has it undamaged, and the result. A damaged one leaves the tier."""
        began = self._clock()
        value, block = self._read(name, size)
        result = MISS if value is None else DAMAGED if block is None else HIT
        if result != DAMAGED:
            self._count(result)
        self._add_traffic(READ, len(value or b""), began)
        return block, result

    def put(self, name: bytes, parent: bytes, value: bytes) -> None:
        """Keeps a value if the tier works."""
        began = self._clock()
        is_stored = self._try(lambda: self.tier.put(name, parent, value), False)
        self._count(STORED if is_stored else DROPPED)
        self._add_traffic(WRITE, len(value) if is_stored else 0, began)

    def audit(self, name: bytes, block: bytes, compared: Sequence[slice]) -> bool:
        """Compares slices of a block that this worker has computed with the tier's. Drops the tier's if they differ.

        Returns:
            True if they are equal, or if the tier has none that is undamaged.
        """
        _, kept = self._read(name, len(block))
        if kept is None:
            return True
        is_equal = all(kept[part] == block[part] for part in compared)
        if not is_equal:
            self.drop(name)
        self._count(EQUAL if is_equal else DIFFERENT)
        if not is_equal:
            log.error("KV tier has another block than this worker computes", tier=self.name, name=name.hex())
        return is_equal

    def drop(self, name: bytes) -> None:
        """Forgets a block if the tier works."""
        self._try(lambda: self.tier.drop(name), None)

    def close(self) -> None:
        """Gives back what the tier holds."""
        self._try(self.tier.close, None)

    def _read(self, name: bytes, size: int) -> tuple[bytes | None, bytes | None]:
        """A value and the block in it. A damaged value is counted and leaves the tier."""
        value = self._try(lambda: self.tier.get(name), None)
        block = None if value is None else unpack(name, value, size)
        if value is not None and block is None:
            self._count(DAMAGED)
            log.error("KV tier returned a damaged block", tier=self.name, block=name.hex())
            self.drop(name)
        return value, block

    def _count(self, result: str) -> None:
        with self._lock:
            self.counts[result] += 1

    def _add_traffic(self, operation: str, num_bytes: int, began: float) -> None:
        seconds = self._clock() - began
        with self._lock:
            before = self.traffic[operation]
            self.traffic[operation] = before[0] + num_bytes, before[1] + seconds

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        if self._clock() < self._rests_until:
            return otherwise
        try:
            result = call()
        except Exception as error:
            self._count(FAILED)
            log.warning("KV tier fails", tier=self.name, why=f"{type(error).__name__}: {error}", rests_s=self._rest_s)
            self._rests_until = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
            return otherwise
        self._rest_s = _REST_S
        return result


class KvTiers:
    """The tiers of one engine, fastest first.

    Args:
        tiers: by name.
        block_bytes: of a block.
        clock: monotonic seconds.
        audited_slices: of a block's bytes, those that depend on its tokens alone. The bytes of a draft model depend on
            which steps made drafts, so they differ between workers. That is harmless: drafts never change tokens.

    Attributes:
        most_waiting: most blocks that are read but not yet in the pool, and most that are not yet written.
    """

    def __init__(
        self,
        tiers: Mapping[str, KvTier],
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        audited_slices: Sequence[slice] = (slice(None),),
    ) -> None:
        self._shelves = [_Shelf(name, tier, clock) for name, tier in tiers.items()]
        self._memory = [tier for tier in tiers.values() if isinstance(tier, MemoryTier)]
        self._block_bytes, self._audited_slices = block_bytes, audited_slices
        self.most_waiting = max(1, MAX_WAITING_BYTES // block_bytes)
        self._lock = threading.Lock()
        self._num_read = self._num_unwritten = self._num_dropped = self._num_late = 0
        self._clock = clock
        self._late_in_row, self._rests_until = 0, 0.0
        self._audited: frozenset[bytes] = frozenset()
        self._fetches: queue.SimpleQueue[KvFetch | None] = queue.SimpleQueue()
        self._values: queue.SimpleQueue[tuple[bytes, bytes, bytes | None] | None] = queue.SimpleQueue()
        # Daemons, because a tier may hang for ever.
        threads = [threading.Thread(target=self._read, name="kv reader", daemon=True) for _ in range(_READERS)]
        for thread in (*threads, threading.Thread(target=self._write, name="kv writer", daemon=True)):
            thread.start()

    def audit(self, names: Iterable[bytes]) -> None:
        """Compares these blocks, and no longer earlier ones, with the tiers' when they are stored."""
        self._audited = frozenset(names)

    def has(self, name: bytes) -> bool:
        """True if host memory keeps this block, so that it need not be stored."""
        return name not in self._audited and any(tier.has(name) for tier in self._memory)

    def watch_memory(self) -> bool:
        """Makes `take_memory_changes` report changes of host memory. False if no tier is in host memory."""
        for tier in self._memory:
            tier.watch()
        return bool(self._memory)

    @property
    def has_memory_changes(self) -> bool:
        """True if `take_memory_changes` has changes."""
        return any(tier.has_changes for tier in self._memory)

    def take_memory_changes(self) -> list[tuple[bytes, bool]]:
        """Changes of host memory since the last call, in order: a name, and True if its granule is whole now."""
        return [change for tier in self._memory for change in tier.take_changes()]

    @property
    def memory_rate(self) -> float:
        """Blocks that one thread reads from host memory per second; 0 until it has read some."""
        found = [shelf for shelf in self._shelves if shelf.tier in self._memory]
        seconds = sum(shelf.traffic[READ][1] for shelf in found)
        return sum(shelf.counts[HIT] for shelf in found) / seconds if seconds > 0 else 0.0

    def fetch(self, names: Sequence[bytes], parent: bytes = b"") -> KvFetch | None:
        """Begins to read blocks behind `parent`, as many as there is room for. None if there is no room now."""
        with self._lock:
            count = min(len(names), self.most_waiting - self._num_read)
            if count <= 0:
                return None
            self._num_read += count
        fetch = KvFetch(names[:count], parent, lambda: self._release(count))
        self._fetches.put(fetch)
        return fetch

    def note_late(self) -> None:
        """Counts a fetch that took longer than computing its blocks."""
        self._num_late += 1
        self._late_in_row += 1
        if self._late_in_row >= _MOST_LATE:
            self._late_in_row, self._rests_until = 0, self._clock() + _LONGEST_REST_S

    def note_dropped(self) -> None:
        """Counts a block for which there was no room before it was read."""
        with self._lock:
            self._num_dropped += 1

    @property
    def is_resting(self) -> bool:
        """True if prompts do not wait now, because the last fetches took too long."""
        return self._clock() < self._rests_until

    def drop(self, names: Sequence[bytes]) -> None:
        """Forgets blocks in the background, after those that were to be written before."""
        for name in names:
            self._values.put((name, b"", None))

    def store(self, blocks: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Writes blocks in the background: each with its name and that of the block before. Drops what is too much."""
        for name, parent, block in blocks:
            with self._lock:
                if self._num_unwritten >= self.most_waiting:
                    self._num_dropped += 1
                    continue
                self._num_unwritten += 1
            self._values.put((name, parent, block))

    def flush(self) -> None:
        """Empties host memory. Tiers that others share keep their blocks."""
        for tier in self._memory:
            tier.clear()

    def counts(self) -> dict[tuple[str, str], int]:
        """Blocks since the start, by tier and by what became of them; the tier of those that reached none is empty."""
        found = {(each.name, result): count for each in self._shelves for result, count in dict(each.counts).items()}
        return {**found, ("", DROPPED): self._num_dropped, ("", LATE): self._num_late}

    def traffic(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Bytes and seconds since the start, by tier and operation. Threads that read at once each count their time."""
        return {(each.name, operation): done for each in self._shelves for operation, done in each.traffic.items()}

    def close(self) -> None:
        """Ends the threads once what they do now is done, then closes the tiers."""
        self._values.put(None)
        for _ in range(_READERS):
            self._fetches.put(None)

    def _release(self, count: int) -> None:
        with self._lock:
            self._num_read -= count

    def _read(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            try:
                if fetch.read(self._get):
                    self._late_in_row = 0
            except Exception as error:
                log.warning("KV blocks are not read", why=f"{type(error).__name__}: {error}")

    def _get(self, name: bytes, parent: bytes, results: Counter[tuple[str, str]]) -> bytes | None:
        for place, shelf in enumerate(self._shelves):
            block, result = shelf.get(name, self._block_bytes)
            results[shelf.name, result] += 1
            if block is not None:
                if place and self._memory:
                    self._memory[0].put(name, parent, pack(name, block))
                return block
        return None

    def _write(self) -> None:
        while (value := self._values.get()) is not None:
            try:
                self._write_one(*value)
            except Exception as error:
                log.warning("KV block is not written", why=f"{type(error).__name__}: {error}")
            if value[2] is not None:
                with self._lock:
                    self._num_unwritten -= 1
        for shelf in self._shelves:
            shelf.close()

    def _write_one(self, name: bytes, parent: bytes, block: bytes | None) -> None:
        packed = b"" if block is None else pack(name, block)
        for shelf in self._shelves:
            if block is not None:
                # Which of two different blocks is wrong is unknown, so neither stays.
                if name not in self._audited or shelf.audit(name, block, self._audited_slices):
                    shelf.put(name, parent, packed)
            else:
                shelf.drop(name)
