"""The lane that each waiting request waits for: it is bound to one, or parked while there is none.

Pure. Whatever is bound or unbound is told to all who follow it: the table of lanes, the agenda of the next decision,
the placement, and the records that workers get. Invariant: a bound request is on one lane, and not parked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.scheduling.lane import Lane, lane_of
from router.scheduling.lane_agenda import LaneAgenda
from router.scheduling.lane_table import LaneTable
from router.scheduling.parked import ParkedRequests
from router.scheduling.placement import Move, Placement
from router.scheduling.queued_request import QueuedRequest


class Binding:
    """Binds waiting requests to lanes.

    Attributes:
        placement: chooses among the lanes that could serve a request.
        parked: the requests without a lane.

    Args:
        lanes: the lanes there are.
        agenda: lanes that the next decision looks at.
        placement: as the attribute.
        worker_wait_s: how long a request waits while there is no worker for it, seconds.
    """

    def __init__(self, lanes: LaneTable, agenda: LaneAgenda, placement: Placement, worker_wait_s: float) -> None:
        self.placement = placement
        self.parked = ParkedRequests(worker_wait_s)
        self._lanes = lanes
        self._agenda = agenda
        self._changed_records: set[str] = set()

    def choose(self, request: QueuedRequest, now: float) -> Lane | None:
        """The lane for a request; None when there is none."""
        lanes = self._lanes.candidates(request)
        request.work = request.tokens
        if (move := _beside_lead(request, lanes)) is not None:
            request.work = move.work
            return move.lane
        return self.placement.choose(request, lanes, now) if lanes else None

    def find_better_lane(self, request: QueuedRequest, lane: Lane, ahead: Mapping[str, int], now: float) -> Move | None:
        """A better place for a waiting request, as `Placement.find_better_lane`: for a further answer to a prompt the
        worker that computes it, while that has places."""
        if request.lead is not None and not lane.is_blocked:
            if request.lead.worker == lane.worker and lane.places >= 0:
                return None
            if (move := _beside_lead(request, self._lanes.candidates(request))) is not None:
                return move
        return self.placement.find_better_lane(request, lane, ahead, now)

    def bind(self, request: QueuedRequest, now: float, lane: Lane | None, *, first: bool = False) -> None:
        """Binds a waiting request to a lane, before others that have been with a worker if `first`, or parks it."""
        if lane is None:
            self.parked.add(request, now)
            return
        request.parked = None
        lane.bind(request, first=first)
        self.update(lane)

    def unbind(self, request: QueuedRequest) -> None:
        """Takes a request off its lane, or out of the parked ones."""
        lane = lane_of(request)
        if lane is None:
            self.parked.discard(request)
            return
        lane.unbind(request)
        self.update(lane)

    def place(self, request: QueuedRequest, now: float, *, first: bool = False) -> None:
        """Binds a waiting request to the lane that the placement chooses, or parks it."""
        self.bind(request, now, self.choose(request, now), first=first)

    def rebind(self, request: QueuedRequest, now: float) -> None:
        """Asks the placement again for a request that waits."""
        self.unbind(request)
        self.place(request, now)

    def move(self, request: QueuedRequest, move: Move, now: float) -> None:
        """Binds a request to another lane, or to its own with other work."""
        self.unbind(request)
        request.work = move.work
        self.bind(request, now, move.lane)

    def update(self, lane: Lane) -> None:
        """Notes that something else waits for a lane than before."""
        self.placement.load_changed(lane)
        if self._lanes.update(lane):
            self._agenda.touch(lane)
            self._changed_records.add(lane.worker)

    def take_changed_records(self) -> set[str]:
        """Workers whose record may have changed since this was asked last; some may have gone since."""
        taken, self._changed_records = self._changed_records, set()
        return taken


def _beside_lead(request: QueuedRequest, lanes: Sequence[Lane]) -> Move | None:
    """The worker of the first answer to the same prompt; None where that has no place, or keeps nothing of it."""
    lead = request.lead
    if lead is None or not request.shared_tokens:
        return None
    lane = next((lane for lane in lanes if lane.worker == lead.worker), None)
    if lane is None or lane.places <= 0 or not lane.caches_prefixes:
        return None
    return Move(lane, request.tokens - request.shared_tokens)
