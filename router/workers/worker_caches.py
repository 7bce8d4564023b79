"""State of each worker's prefix cache at this router; passes changes on to the placement.

A cursor outlives the streams to one instance: the next stream continues where the last one broke.
Invariants:
  * A worker has a cursor while it is up or may resume a broken stream. Without one, the placement knows nothing of its
    cache.
  * The frames that `KvEventCursor.accept` passes add up to the instance's cache after change `seq`; with `seq` 0 they
    may be incomplete, as in the middle of a snapshot. After an `ask` no frame passes until its snapshot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from fissile.worker.v1 import worker_pb2 as wpb

from common.wire.protocol import KV_EPOCH_MINOR
from router.scheduling.assignment import LaneAssignment
from router.scheduling.placement import CacheChange
from router.workers.session import Fault, Session, SessionLostError


class Continuity(enum.Enum):
    """Fit of a frame of KV events with those before it."""

    NEXT = enum.auto()
    """The frame continues them, or starts a snapshot."""
    OUTDATED = enum.auto()
    """The worker wrote the frame before it read the newest ask; the frame is ignored."""
    GAP = enum.auto()
    """Events are missing: a new stream must start from an empty cache."""


class KvEventCursor:
    """Position in the KV events of one worker instance, over all streams to it."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._seq = 0
        # Granules of the current snapshot that are still to come.
        self._left = 0
        # Number of asks on this stream, and whether the newest one has no snapshot yet.
        self._epoch = 0
        self._awaits = False

    @property
    def seq(self) -> int:
        """Sequence number for the next Hello (`Hello.kv_seq`)."""
        return 0 if self._left else self._seq

    def goes_on_with(self, instance_id: str) -> bool:
        """True if a stream to this instance continues the known events; otherwise they must be forgotten."""
        return instance_id == self._instance_id and self.seq > 0

    def open(self) -> None:
        """Starts a new stream, on which nothing has been asked."""
        self._epoch, self._awaits = 0, False

    def reset(self) -> None:
        """Discards the known events: the next frame is a gap unless it starts a snapshot."""
        self._seq = self._left = 0

    def ask(self) -> int:
        """Discards the known events and waits for a snapshot; returns the `Lane.kv_epoch` to send."""
        self.reset()
        self._epoch, self._awaits = self._epoch + 1, True
        return self._epoch

    def accept(self, events: wpb.KvEvents) -> Continuity:
        """Counts a frame unless it is outdated."""
        if events.epoch < self._epoch:
            return Continuity.OUTDATED
        if not (events.snapshot or self._continues(events)):
            self.reset()
            return Continuity.GAP
        self._seq, self._left, self._awaits = events.seq, events.left + events.memory_left, False
        return Continuity.NEXT

    def _continues(self, events: wpb.KvEvents) -> bool:
        if self._awaits or events.after != self._seq:
            return False
        is_piece = events.after == events.seq
        left = events.left + events.memory_left + len(events.stored) + len(events.memory_stored)
        return self._left == (left if is_piece else 0)


class WorkerCaches:
    """The KV event cursors of all workers; passes their changes to the placement of `assignment`."""

    def __init__(self, assignment: LaneAssignment) -> None:
        self._assignment = assignment
        self._cursors: dict[str, KvEventCursor] = {}

    def opening(self, session: Session) -> None:
        """Makes the Hello of a new stream say up to which event the cache is known."""
        cursor = self._cursors.get(session.address)
        if cursor is None or not cursor.goes_on_with(session.instance_id):
            self._assignment.placement.cache_gone(session.address)
            cursor = self._cursors[session.address] = KvEventCursor(session.instance_id)
        cursor.open()
        session.state.know_cache(cursor.seq)

    def welcomed(self, session: Session) -> None:
        """Asks for the whole cache if the placement was replaced since the Hello."""
        if self._cursors[session.address].seq != session.state.kv_seq:
            self._ask(session)

    def accept(self, session: Session, events: wpb.KvEvents) -> None:
        """Passes events to the placement, unless a snapshot is about to come.

        Raises:
            SessionLostError: events are missing.
        """
        continuity = self._cursors[session.address].accept(events)
        if continuity is Continuity.GAP:
            raise SessionLostError(Fault.BROKEN, "KV events are missing")
        if continuity is Continuity.NEXT:
            in_memory = events.memory_stored, events.memory_evicted
            change = CacheChange(events.stored, events.evicted, events.snapshot, *in_memory)
            self._assignment.placement.cache_changed(session.address, change)

    def forget(self, address: str) -> None:
        """Forgets a lost cache; a no-op if it is not known."""
        self._cursors.pop(address, None)
        self._assignment.placement.cache_gone(address)

    def learn_anew(self, sessions: Iterable[Session]) -> None:
        """Discards the known events, for a new placement, and asks the workers that are up for their whole caches.

        Other workers send their whole caches on their next stream.
        """
        for cursor in self._cursors.values():
            cursor.reset()
        for session in sessions:
            self._ask(session)

    def _ask(self, session: Session) -> None:
        """Asks a worker for its whole cache on the current stream.

        A worker with an older protocol sends it on a new stream, after the gap at its next event.
        """
        if session.proto_minor >= KV_EPOCH_MINOR:
            session.state.ask_for_cache(self._cursors[session.address].ask())
            session.notify()
