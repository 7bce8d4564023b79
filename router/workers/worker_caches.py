"""Prefix caches of the workers: how far each is known, and what the placement learns of it.

A cursor lasts over streams to one instance: the next stream goes on where the last one broke off. Invariant: a worker
has a cursor while it is up, or may come back to a stream that broke; without one, the placement knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fissile.worker.v1 import worker_pb2 as wpb

from common.wire.protocol import KV_EPOCH_MINOR
from router.scheduling.assignment import LaneAssignment
from router.scheduling.placement import CacheChange
from router.workers.kv_cursor import Continuity, KvEventCursor
from router.workers.session import Fault, Session, SessionLostError


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
