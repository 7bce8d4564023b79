"""Prefix caches of the workers: how far each is known, and what the placement learns of it.

A cursor lasts over streams to one instance: the next stream goes on where the last one broke off. Invariant: a worker
has a cursor while it is up, or may come back to a stream that broke; without one, the placement knows nothing of it.
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
    """It continues them, or begins a snapshot."""
    OUTDATED = enum.auto()
    """It was written before the worker had read the newest ask, and says nothing that is still wanted."""
    GAP = enum.auto()
    """Something is missing: a new stream has to begin from scratch."""


class KvEventCursor:
    """The KV events of one instance of a worker, over all streams to it."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._seq = 0
        # Granules that a snapshot has yet to bring.
        self._left = 0
        # Asks on this stream, and whether the newest waits for its snapshot.
        self._epoch = 0
        self._awaits = False

    @property
    def seq(self) -> int:
        """Sequence number for the next Hello (`Hello.kv_seq`)."""
        return 0 if self._left else self._seq

    def goes_on_with(self, instance_id: str) -> bool:
        """True if a stream to this instance continues what is known; otherwise that is to be forgotten."""
        return instance_id == self._instance_id and self.seq > 0

    def open(self) -> None:
        """A new stream begins, on which nothing has been asked for."""
        self._epoch, self._awaits = 0, False

    def reset(self) -> None:
        """Counts what has come as nothing: the next frame leaves a gap, unless it begins a snapshot."""
        self._seq = self._left = 0

    def ask(self) -> int:
        """Counts what has come as nothing, and waits for a snapshot. Returns what the worker must be told
        (`Lane.kv_epoch`)."""
        self.reset()
        self._epoch, self._awaits = self._epoch + 1, True
        return self._epoch

    def accept(self, events: wpb.KvEvents) -> Continuity:
        """Counts a frame, unless it is outdated."""
        if events.epoch < self._epoch:
            return Continuity.OUTDATED
        if not (events.snapshot or self._continues(events)):
            self.reset()
            return Continuity.GAP
        self._seq, self._left, self._awaits = events.seq, events.left, False
        return Continuity.NEXT

    def _continues(self, events: wpb.KvEvents) -> bool:
        if self._awaits or events.after != self._seq:
            return False
        is_piece = events.after == events.seq
        return self._left == (events.left + len(events.stored) if is_piece else 0)


class WorkerCaches:
    """The cursors of all workers, by address; what they say goes to the placement of `assignment`."""

    def __init__(self, assignment: LaneAssignment) -> None:
        self._assignment = assignment
        self._cursors: dict[str, KvEventCursor] = {}

    def opening(self, session: Session) -> None:
        """Has the Hello of a new stream say how far the cache is known."""
        cursor = self._cursors.get(session.address)
        if cursor is None or not cursor.goes_on_with(session.instance_id):
            self._assignment.placement.cache_gone(session.address)
            cursor = self._cursors[session.address] = KvEventCursor(session.instance_id)
        cursor.open()
        session.state.know_cache(cursor.seq)

    def welcomed(self, session: Session) -> None:
        """Asks for all of the cache where the placement has changed since the Hello."""
        if self._cursors[session.address].seq != session.state.kv_seq:
            self._ask(session)

    def accept(self, session: Session, events: wpb.KvEvents) -> None:
        """Hands events to the placement, unless it is about to get all of the cache.

        Raises:
            SessionLostError: something is missing.
        """
        continuity = self._cursors[session.address].accept(events)
        if continuity is Continuity.GAP:
            raise SessionLostError(Fault.BROKEN, "KV events are missing")
        if continuity is Continuity.NEXT:
            change = CacheChange(events.stored, events.evicted, events.snapshot)
            self._assignment.placement.cache_changed(session.address, change)

    def forget(self, address: str) -> None:
        """Forgets a cache that is gone; a no-op when nothing is known of it."""
        self._cursors.pop(address, None)
        self._assignment.placement.cache_gone(address)

    def learn_anew(self, sessions: Iterable[Session]) -> None:
        """Counts as nothing what is known, for a placement that knows no cache, and asks those that are up for all.

        Workers without a stream say all of their caches on the next one.
        """
        for cursor in self._cursors.values():
            cursor.reset()
        for session in sessions:
            self._ask(session)

    def _ask(self, session: Session) -> None:
        """Has a worker say all of its cache on the stream there is.

        One that is too old for that does so on a new stream, which the gap at its next event brings about.
        """
        if session.proto_minor >= KV_EPOCH_MINOR:
            session.state.ask_for_cache(self._cursors[session.address].ask())
            session.notify()
