"""Reports changes of the prefix cache to routers (docs/explanation/architecture.md).

The engine reports changes granule by granule, with IN_MEMORY for host memory. `KvLog` numbers them from 1 and
keeps the newest for all routers; each Session reads them with a `KvCursor` of its own. Invariants:
  * The changes that a router has applied up to `seq` add up to the cache's contents after change `seq`.
  * A cursor that needs forgotten changes sends the whole cache instead, in pieces. This happens to a router that was
      away for long, or that reads too slowly.
  * A router that asks for it gets the whole cache anew, even an empty one. Its requests are counted by epochs, and
      every frame names the newest one that it follows.
  * At most one frame per KV_EVENTS_S and router, of at most MAX_KV_FRAME_CHANGES changes. A granule that appears and
      disappears within a frame's changes is left out.
  * The log holds at most 2 * `capacity` changes, and each granule of the cache once.
  * Digests of blocks are not changes: a router gets the newest ones, in order, as long as the log has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import KV_EVENTS_S, MAX_KV_DIGEST_LOG, MAX_KV_FRAME_CHANGES, MAX_KV_LOG
from worker.engine.tier_lookups import IN_MEMORY


class KvLog:
    """The changes of one engine's cache.

    Args:
        capacity: the log keeps at least this many of the newest changes.
    """

    def __init__(self, capacity: int = MAX_KV_LOG) -> None:
        self._capacity = capacity
        self._present: set[int] = set()
        self._changes: list[int] = []
        self._forgotten = 0
        # The newest digests, and how many older ones have been dropped.
        self._digests: list[tuple[bytes, int]] = []
        self._forgotten_digests = 0
        # Callbacks for the next change; a dict, because it keeps their order.
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def seq(self) -> int:
        """Number of the newest change."""
        return self._forgotten + len(self._changes)

    def append(self, changes: Iterable[int]) -> None:
        """Appends changes (`PrefixCache.take_granule_changes`) and wakes the waiting callbacks."""
        before = len(self._changes)
        self._changes.extend(changes)
        new = self._changes[before:]
        if not new:
            return
        for change in new:
            if change >= 0:
                self._present.add(change)
            else:
                self._present.discard(~change)
        if len(self._changes) > 2 * self._capacity:
            self._forgotten += len(self._changes) - self._capacity
            del self._changes[: -self._capacity]
        self._wake_all()

    @property
    def num_digests(self) -> int:
        """Number of digests since the start."""
        return self._forgotten_digests + len(self._digests)

    def append_digests(self, digests: Sequence[tuple[bytes, int]]) -> None:
        """Appends names of blocks with digests of their contents, and wakes the waiting callbacks."""
        if not digests:
            return
        self._digests += digests
        if (surplus := len(self._digests) - MAX_KV_DIGEST_LOG) > 0:
            self._forgotten_digests += surplus
            del self._digests[:surplus]
        self._wake_all()

    def digests_after(self, count: int) -> list[tuple[bytes, int]]:
        """Digests after the first `count`, as far as they are kept."""
        return self._digests[max(0, count - self._forgotten_digests) :]

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()

    def remembers(self, seq: int) -> bool:
        """True if every change after `seq` is kept."""
        return self._forgotten <= seq <= self.seq

    def after(self, seq: int, limit: int) -> list[int]:
        """The first `limit` changes after `seq`, which must be kept."""
        start = seq - self._forgotten
        return self._changes[start : start + limit]

    def snapshot(self) -> list[int]:
        """All granules at change `seq`, those in host memory first: `KvEvents.left` counts the others."""
        in_memory = [granule for granule in self._present if granule >= IN_MEMORY]
        return in_memory + [granule for granule in self._present if granule < IN_MEMORY]

    def wait(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once, at the next change."""
        self._waiting[wake] = None

    def leave(self, wake: Callable[[], None]) -> None:
        """Removes a waiting callback."""
        self._waiting.pop(wake, None)


class KvCursor:
    """Changes that one Session has yet to send.

    Args:
        log: the cache's changes.
        seq: number of the last change that the router has; 0 for none.
        wake: called when `take` may have something again after it had nothing.
    """

    def __init__(self, log: KvLog, seq: int, wake: Callable[[], None]) -> None:
        self._log = log
        self._seq = seq
        self._wake = wake
        self._needs_snapshot = seq == 0 < log.seq
        # Rest of a snapshot that is being sent.
        self._left: list[int] | None = None
        self._epoch = 0
        self._num_digests = 0
        self._took = -math.inf

    def restart(self, epoch: int) -> None:
        """Sends a snapshot next, unless one was requested in this epoch or a later one."""
        if epoch > self._epoch:
            self._epoch, self._needs_snapshot, self._left = epoch, True, None

    def due_in(self, now: float) -> float:
        """Seconds until `take` has something; infinite if that depends on the engine."""
        return max(0.0, self._took + KV_EVENTS_S - now) if self._is_behind else math.inf

    def take(self, now: float) -> wpb.KvEvents | None:
        """The next frame; None if there is none, or not yet."""
        if not self._is_behind:
            self._log.wait(self._wake)
            return None
        if now < self._took + KV_EVENTS_S:
            return None
        self._took = now
        frame = self._take_frame()
        frame.digests.extend(wpb.KvDigest(name=n, digest=d) for n, d in self._log.digests_after(self._num_digests))
        self._num_digests = self._log.num_digests
        return frame

    def close(self) -> None:
        """Ends the cursor with its Session."""
        self._log.leave(self._wake)

    @property
    def _is_behind(self) -> bool:
        log = self._log
        is_behind = self._needs_snapshot or self._left is not None or self._seq != log.seq
        return is_behind or self._num_digests != log.num_digests

    def _take_frame(self) -> wpb.KvEvents:
        """The next frame's granules; may be empty."""
        if self._left is not None:
            return self._take_piece(self._left, after=self._seq)
        if self._needs_snapshot or not self._log.remembers(self._seq):
            return self._begin_snapshot()
        return self._take_changes()

    def _begin_snapshot(self) -> wpb.KvEvents:
        self._needs_snapshot = False
        self._seq = self._log.seq
        frame = self._take_piece(self._log.snapshot(), after=0)
        frame.snapshot = True
        return frame

    def _take_piece(self, granules: list[int], after: int) -> wpb.KvEvents:
        piece, rest = granules[:MAX_KV_FRAME_CHANGES], granules[MAX_KV_FRAME_CHANGES:]
        self._left = rest or None
        stored, in_memory = _by_tier(piece)
        memory_left = sum(granule >= IN_MEMORY for granule in rest)
        return wpb.KvEvents(
            seq=self._seq,
            after=after,
            stored=stored,
            memory_stored=in_memory,
            left=len(rest) - memory_left,
            memory_left=memory_left,
            epoch=self._epoch,
        )

    def _take_changes(self) -> wpb.KvEvents:
        frame = wpb.KvEvents(after=self._seq, epoch=self._epoch)
        changes = self._log.after(self._seq, MAX_KV_FRAME_CHANGES)
        # A granule alternately appears and disappears, so every second change undoes the one before.
        net: dict[int, bool] = {}
        for change in changes:
            granule = change if change >= 0 else ~change
            if net.pop(granule, None) is None:
                net[granule] = change >= 0
        stored, memory_stored = _by_tier(granule for granule, is_stored in net.items() if is_stored)
        evicted, memory_evicted = _by_tier(granule for granule, is_stored in net.items() if not is_stored)
        frame.stored.extend(stored)
        frame.memory_stored.extend(memory_stored)
        frame.evicted.extend(evicted)
        frame.memory_evicted.extend(memory_evicted)
        self._seq += len(changes)
        frame.seq = self._seq
        return frame


def _by_tier(granules: Iterable[int]) -> tuple[list[int], list[int]]:
    """Hashes of granules in the pool, and of those in host memory."""
    tiers: tuple[list[int], list[int]] = [], []
    for granule in granules:
        tiers[granule >= IN_MEMORY].append(granule % IN_MEMORY)
    return tiers
