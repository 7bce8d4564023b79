"""Assignment of each waiting request to a lane, from its arrival to its release.

Pure. `LaneAssignment` binds one request. `ReassignmentQueue` and `Rebalancer` bind many again, when lanes come or go
and from time to time; they work in pieces of `_PER_CALL` requests, so that no call holds the event loop for long.
Invariants:
  * A bound request is in one lane, and not parked.
  * Until `ReassignmentQueue` is empty, a request may be bound to a lane that is not ready, which releases nothing, or
    be parked although a lane could serve it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.limits import MAX_REPLACED_REQUESTS, REPLACE_IDLE_S, REPLACE_S
from router.scheduling.admission import AdmissionQueue
from router.scheduling.lane import Lane, lane_of
from router.scheduling.lanes import LaneAgenda, LaneTable
from router.scheduling.placement import Move, Placement
from router.scheduling.queued_request import QueuedRequest

# Waiting requests that one call looks at: about 2 ms.
_PER_CALL = 48
# Each 16 waiting requests add REPLACE_S to the interval between two passes of the rebalancer.
_REQUESTS_PER_INTERVAL = 16


class ParkedRequests:
    """Waiting requests that no worker can serve, in the order in which they were parked.

    Args:
        wait_s: how long a request may be parked, seconds.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._requests: dict[int, QueuedRequest] = {}
        self._to_review: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The requests, the longest parked first."""
        return iter(self._requests.values())

    def add(self, request: QueuedRequest, now: float) -> None:
        """Parks a request."""
        request.parked = now
        self._requests[request.key] = request
        self._to_review.append(request.key)

    def get(self, key: int) -> QueuedRequest | None:
        """The parked request with this key; None if it is not parked."""
        return self._requests.get(key)

    def discard(self, request: QueuedRequest) -> None:
        """Removes a request; a no-op if it is not parked."""
        self._requests.pop(request.key, None)

    def is_overdue(self, request: QueuedRequest, now: float) -> bool:
        """True if a request has been parked for `wait_s` or longer."""
        return self._until(request) <= now

    def next_overdue(self) -> float | None:
        """Time at which the first request becomes overdue, monotonic seconds; None when nothing is parked."""
        return next(map(self._until, self), None)

    @property
    def has_to_review(self) -> bool:
        """True if `take_to_review` has more keys."""
        return bool(self._to_review)

    def review_all(self) -> None:
        """Marks all parked requests for review, because the set of ready workers has changed."""
        self._to_review = deque(self._requests)

    def take_to_review(self, most: int) -> list[int]:
        """Takes up to `most` marked keys and returns those that are still parked. `add` and `review_all` mark."""
        keys = [self._to_review.popleft() for _ in range(min(most, len(self._to_review)))]
        return [key for key in keys if key in self._requests]

    def _until(self, request: QueuedRequest) -> float:
        assert request.parked is not None
        return request.parked + self._wait_s


class LaneAssignment:
    """Binds waiting requests to lanes, and parks those without one.

    Each change is passed on to the lane table, the agenda of the next decision, the placement, and the set of workers
    whose lane record has changed.

    Attributes:
        placement: chooses among the lanes that can serve a request.
        parked: the requests without a lane.

    Args:
        lanes: the lanes of all workers.
        agenda: lanes that the next decision looks at.
        placement: as the attribute.
        worker_wait_s: how long a request may be parked, seconds.
    """

    def __init__(self, lanes: LaneTable, agenda: LaneAgenda, placement: Placement, worker_wait_s: float) -> None:
        self.placement = placement
        self.parked = ParkedRequests(worker_wait_s)
        self._lanes = lanes
        self._agenda = agenda
        self._changed_records: set[str] = set()

    def choose(self, request: QueuedRequest, now: float) -> Lane | None:
        """Chooses a lane for a request and sets `request.work`; None if no lane can serve it."""
        lanes = self._lanes.candidates(request)
        request.work = request.tokens
        if (move := _beside_lead(request, lanes)) is not None:
            request.work = move.work
            return move.lane
        return self.placement.choose(request, lanes, now) if lanes else None

    def find_better_lane(self, request: QueuedRequest, lane: Lane, ahead: Mapping[str, int], now: float) -> Move | None:
        """Finds a better lane for a waiting request, as `Placement.find_better_lane`.

        A further answer to a prompt goes to the worker of the first answer while that worker has places.
        """
        if request.lead is not None and not lane.is_blocked:
            if request.lead.worker == lane.worker and lane.places >= 0:
                return None
            if (move := _beside_lead(request, self._lanes.candidates(request))) is not None:
                return move
        return self.placement.find_better_lane(request, lane, ahead, now)

    def bind(self, request: QueuedRequest, now: float, lane: Lane | None, *, first: bool = False) -> None:
        """Binds a waiting request to a lane, or parks it without one. `first`: ahead of the lane's other retries."""
        if lane is None:
            self.parked.add(request, now)
            return
        if request.parked is not None:
            request.wait.parked_s += now - request.parked
        request.parked = None
        lane.bind(request, first=first)
        lane.waits.enter(request.wait, now)
        self.update(lane)

    def unbind(self, request: QueuedRequest) -> None:
        """Removes a request from its lane, or from the parked requests."""
        lane = lane_of(request)
        if lane is None:
            self.parked.discard(request)
            return
        lane.unbind(request)
        self.update(lane)

    def leave(self, request: QueuedRequest, now: float) -> None:
        """Removes a request from its lane, or from the parked ones; it keeps the causes of its wait."""
        if (lane := lane_of(request)) is not None:
            lane.waits.leave(request.wait, now)
        elif request.parked is not None:
            request.wait.parked_s += now - request.parked
            request.parked = None
        self.unbind(request)

    def place(self, request: QueuedRequest, now: float, *, first: bool = False) -> None:
        """Binds a waiting request to the lane that `choose` gives, or parks it."""
        self.bind(request, now, self.choose(request, now), first=first)

    def place_again(self, request: QueuedRequest, now: float) -> None:
        """Places a waiting request again."""
        self.leave(request, now)
        self.place(request, now)

    def move(self, request: QueuedRequest, move: Move, now: float) -> None:
        """Binds a request to the lane of `move`, which may be its own lane with other work."""
        self.leave(request, now)
        request.work = move.work
        self.bind(request, now, move.lane)

    def update(self, lane: Lane) -> None:
        """Passes on that the requests of a lane have changed."""
        self.placement.load_changed(lane)
        if self._lanes.update(lane):
            self._agenda.touch(lane)
            self._changed_records.add(lane.worker)

    def take_changed_records(self) -> set[str]:
        """Takes the workers whose lane record may have changed since the last call; some may be gone."""
        taken, self._changed_records = self._changed_records, set()
        return taken


def _beside_lead(request: QueuedRequest, lanes: Sequence[Lane]) -> Move | None:
    """Move to the worker of the prompt's first answer; None if that has no place or shares no prefixes."""
    lead = request.lead
    if lead is None or not request.shared_tokens:
        return None
    lane = next((lane for lane in lanes if lane.worker == lead.worker), None)
    if lane is None or lane.places <= 0 or not lane.caches_prefixes:
        return None
    return Move(lane, request.tokens - request.shared_tokens)


class ReassignmentQueue:
    """Requests to place again because a lane has come or gone, or because many returned from workers at once.

    Requests that another lane could already serve, but a new one would serve sooner, are left to `Rebalancer`.

    Args:
        assignment: places the requests.
        queue: all waiting requests; a request that has left it is skipped.
    """

    def __init__(self, assignment: LaneAssignment, queue: AdmissionQueue) -> None:
        self._assignment = assignment
        self._queue = queue
        # Lanes that accept no more work, parked requests that may be served now, and requests to place again.
        self._vacating: deque[Lane] = deque()
        self._waking: deque[int] = deque()
        self._placing: deque[QueuedRequest] = deque()
        # Returned requests that were not placed at once, and the number of returns since the last decision.
        self._returning: deque[QueuedRequest] = deque()
        self._num_returned = 0

    def __bool__(self) -> bool:
        """True while a request or lane is left."""
        return bool(self._returning or self._vacating or self._waking or self._placing)

    def add_returned(self, request: QueuedRequest, now: float) -> None:
        """Places a request that returned from a worker; after the first `_PER_CALL` between decisions, queues it."""
        self._num_returned += 1
        if self._returning or self._num_returned > _PER_CALL:
            self._returning.append(request)
        else:
            self._assignment.place(request, now, first=True)

    def vacate(self, lane: Lane) -> None:
        """Queues the requests of a lane that accepts no more work."""
        if len(lane) and lane not in self._vacating:
            self._vacating.append(lane)

    def refill(self, lane: Lane) -> None:
        """Queues parked requests that a newly ready lane may serve, and requests that the rebalancer does not move."""
        if lane in self._vacating:
            self._vacating.remove(lane)
        # In the order of service, not of parking: retries go first.
        self._waking = deque(request.key for request in self._queue if request.key in self._assignment.parked)
        # The rebalancer moves no suspects, and they need an empty lane.
        self._placing = deque(request for request in self._queue if request.alone)
        if not self._assignment.placement.moves_waiting:
            self._placing.extend(request for request in self._queue if not request.alone)

    def work_off(self, now: float, *, is_decision: bool = False) -> bool:
        """Places up to `_PER_CALL` requests; False if the queue was empty."""
        if is_decision:
            self._num_returned = 0
        room = _PER_CALL
        while room and self._returning:
            returned = self._returning.popleft()
            if returned.key in self._queue and returned.lane is None and returned.key not in self._assignment.parked:
                self._assignment.place(returned, now, first=True)
            room -= 1
        while room and self._vacating:
            lane = self._vacating[0]
            for request in list(itertools.islice(lane, room)):
                self._assignment.place_again(request, now)
                room -= 1
            if not len(lane):
                self._vacating.popleft()
        while room and self._waking:
            parked = self._assignment.parked.get(self._waking.popleft())
            if parked is not None and (chosen := self._assignment.choose(parked, now)) is not None:
                self._assignment.unbind(parked)
                self._assignment.bind(parked, now, chosen)
            room -= 1
        while room and self._placing:
            request = self._placing.popleft()
            if (bound := lane_of(request)) is not None and bound.ready:
                self._assignment.place_again(request, now)
            room -= 1
        return room < _PER_CALL


@dataclass(slots=True)
class _Pass:
    """One pass of the rebalancer.

    Attributes:
        requests: those not yet looked at; a request without a lane is parked or no longer waits.
        ahead: prompt tokens of the requests already looked at, by worker.
        seen: number of those requests.
    """

    requests: deque[QueuedRequest]
    ahead: dict[str, int] = field(default_factory=dict)
    seen: int = 0


class Rebalancer:
    """Late binding: from time to time moves the first waiting requests to workers that would serve them clearly sooner.

    A pass over the waiting requests may take several decisions.

    Args:
        assignment: moves the requests.
        queue: all waiting requests, in order of service.
    """

    def __init__(self, assignment: LaneAssignment, queue: AdmissionQueue) -> None:
        self._assignment = assignment
        self._queue = queue
        self._last = self._next = -math.inf
        self._pass: _Pass | None = None

    def is_due(self, now: float) -> bool:
        """True if a pass must start or continue."""
        return now >= self._next

    def start_now(self, now: float) -> None:
        """Makes the next pass due: a lane has become ready."""
        self._next = now

    def start_early(self) -> None:
        """Makes the next pass due REPLACE_IDLE_S after the last one: a worker is idle."""
        self._next = min(self._next, self._last + REPLACE_IDLE_S)

    def run(self, now: float) -> None:
        """Looks at the next `_PER_CALL` requests of a pass, and moves those that another worker would serve sooner.

        Each request is compared with the work ahead of it in every lane. The more requests wait, the longer the
        interval to the next pass, unless a worker is idle.
        """
        if self._pass is None:
            self._pass = _Pass(deque(itertools.islice(self._queue, MAX_REPLACED_REQUESTS)))
        current = self._pass
        for _ in range(min(_PER_CALL, len(current.requests))):
            request = current.requests.popleft()
            lane, is_free = lane_of(request), not request.alone and not request.only_worker
            if lane is not None and lane.ready and is_free:
                self._rebalance(request, lane, current.ahead, now)
                current.seen += 1
        if current.requests:
            return
        self._pass = None
        self._next = now + REPLACE_S * (1 + current.seen / _REQUESTS_PER_INTERVAL)
        self._last = now

    def _rebalance(self, request: QueuedRequest, lane: Lane, ahead: dict[str, int], now: float) -> None:
        better = self._assignment.find_better_lane(request, lane, ahead, now)
        if better is not None:
            self._assignment.move(request, better, now)
            lane = better.lane
        ahead[lane.worker] = ahead.get(lane.worker, 0) + request.work
