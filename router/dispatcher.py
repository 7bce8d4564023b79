"""Which request goes to which worker, and when: queue, lanes, gate and placement put together.

Pure: events and `now` (monotonic seconds) come in, decisions go out. `decide` implements design-details section 5 with
the placement as a policy object. Invariants, checked by the property test:
  * A request is waiting, or released, or gone; it is released at most once per arrival or return.
  * Every waiting request is bound to exactly one ready lane of its model and numerics class, or parked while there is
    none; it is parked for at most `worker_wait_s`.
  * Nothing waits while its lane is idle.
  * A lane releases in the order of service of `fair_queue`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.errors import HopelessDeadlineError
from common.limits import MAX_QUEUE_RETRY_S, MAX_QUEUED_REQUESTS, MIN_QUEUE_RETRY_S, WORKER_WAIT_S
from router.fair_queue import CLASS_NAMES, CLASSES, TenantShares
from router.lane import Lane, LaneLoad, LaneRecord, LoadReport
from router.placement import Placement
from router.queue import QueuedRequest, RequestQueue


@dataclass(frozen=True, slots=True)
class Release:
    """A group of requests that goes to one worker as one prefill batch.

    `serial` numbers the groups of a lane from 1; the worker echoes it as `submit_seen`.
    """

    worker: str
    serial: int
    requests: tuple[QueuedRequest, ...]


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """What waits in one priority class: how many requests, and the age of the oldest in seconds."""

    name: str
    waiting: int
    oldest_age_s: float


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Lanes for which nothing waits, those that release as far as there is room, and those that the gate holds."""

    idle: int = 0
    open: int = 0
    held: int = 0


class Dispatcher:
    """The requests that wait at this router, and the lanes of the workers.

    Args:
        gate: the delay gate of all lanes.
        placement: chooses among the lanes that could serve a request.
        capacity: most requests of one class that wait.
        worker_wait_s: how long a request waits while there is no worker for it, seconds.
        shares: the weights of the tenants.
    """

    def __init__(
        self,
        gate: DelayGate,
        placement: Placement,
        capacity: int = MAX_QUEUED_REQUESTS,
        worker_wait_s: float = WORKER_WAIT_S,
        shares: TenantShares | None = None,
    ) -> None:
        self._gate = gate
        self._placement = placement
        self._shares = TenantShares() if shares is None else shares
        self._queue = RequestQueue(capacity, self._shares)
        self._worker_wait_s = worker_wait_s
        self._lanes: dict[str, Lane] = {}
        self._ready: dict[str, list[Lane]] = {}
        # The lanes for which something waits.
        self._busy: dict[str, Lane] = {}
        # Waiting requests without a lane, the longest parked first.
        self._parked: dict[int, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def configure(
        self, gate: DelayGate, placement: Placement | None, capacity: int, weights: Mapping[str, float], now: float
    ) -> None:
        """Other rules from now on, for what waits too.

        Args:
            gate: of all lanes.
            placement: without lanes so far; None keeps the one there is, and what it has learnt.
            capacity: most requests of one class that wait; those that wait already stay.
            weights: of tenants that are not like the others.
            now: monotonic seconds.
        """
        self._gate = gate
        self._queue.capacity = capacity
        self._shares.set_weights(weights)
        if placement is None:
            return
        self._placement = placement
        for lanes in self._ready.values():
            for lane in lanes:
                placement.lane_up(lane)
        for model in list(self._ready):
            self._spread(model, now)

    def waiting(self, now: float) -> list[ClassLoad]:
        """What waits, by class, the highest first."""
        arrivals: dict[int, list[float]] = {priority: [] for priority in CLASSES}
        for request in self._queue:
            arrivals[request.priority].append(request.arrival)
        return [
            ClassLoad(CLASS_NAMES[priority], len(each), now - min(each, default=now))
            for priority, each in arrivals.items()
        ]

    def arrive(self, request: QueuedRequest, now: float) -> None:
        """Takes a request in.

        Raises:
            QueueFullError: too many requests of its class wait.
            HopelessDeadlineError: its deadline would pass before its prompt is computed.
        """
        self._queue.check_room(request.priority, now)
        lane = self._choose(request)
        if lane is not None:
            _check_deadline(request, lane, now)
        self._queue.push(request)
        self._place(request, now, lane)

    def requeue(self, request: QueuedRequest, now: float, *, avoid: str = "") -> None:
        """Takes back, at the head, a request that a worker returned (rule S9) or was lost with.

        Args:
            request: the request.
            now: monotonic seconds.
            avoid: a worker that it does not go to if there is another.
        """
        self._queue.push_front(request)
        self._place(request, now, self._choose(request, avoid), first=True)

    def cancel(self, key: int) -> bool:
        """Drops a waiting request; False when it does not wait."""
        request = self._queue.remove(key)
        if request is None:
            return False
        self._displace(request)
        return True

    def expire(self, now: float) -> list[int]:
        """Drops the waiting requests whose deadline has passed and returns their keys."""
        expired: list[int] = []
        while (request := self._queue.pop_expired(now)) is not None:
            self._displace(request)
            expired.append(request.key)
        return expired

    def abandon(self, now: float) -> list[int]:
        """Drops the requests for which there has been no worker for too long and returns their keys."""
        abandoned: list[int] = []
        for request in self._parked.values():
            if self._parked_until(request) > now:
                break
            abandoned.append(request.key)
        for key in abandoned:
            self.cancel(key)
        return abandoned

    def lane_up(self, worker: str, model: str, report: LoadReport, now: float, numerics: str = "") -> None:
        """A worker takes work: a clean lane, and what waits for its model is spread anew."""
        lane = self._lanes[worker] = Lane(worker, model, report, numerics, self._shares)
        self._placement.lane_up(lane)
        self._spread(model, now)

    def lane_draining(self, worker: str, now: float) -> None:
        """A worker takes no more work; what waits for it goes to others, or is parked."""
        lane = self._lanes[worker]
        lane.ready = False
        self._placement.lane_down(lane)
        self._spread(lane.model, now)

    def lane_ready(self, worker: str, now: float) -> None:
        """A worker that took no more work takes it again; what waits for its model is spread anew."""
        lane = self._lanes[worker]
        lane.ready = True
        self._placement.lane_up(lane)
        self._spread(lane.model, now)

    def lane_down(self, worker: str, now: float) -> None:
        """A worker is gone."""
        self.lane_draining(worker, now)
        del self._lanes[worker]

    def report(self, worker: str, load: LoadReport) -> None:
        """A worker's load after a step, or its heartbeat."""
        lane = self._lanes[worker]
        lane.take_report(load)
        self._placement.load_changed(lane)

    def decide(self, now: float) -> list[Release]:
        """Releases what may go now, lane by lane, in order of service."""
        releases: list[Release] = []
        for lane in list(self._busy.values()):
            if not lane.is_open(now, self._gate):
                continue
            group, serial = lane.release(now)
            for request in group:
                self._queue.remove(request.key)
                self._placement.sent(request, lane)
            if group:
                self._queue.speed.departed(len(group), now)
                releases.append(Release(lane.worker, serial, tuple(group)))
            self._settle(lane)
        return releases

    def next_timer(self, now: float) -> float | None:
        """When `expire` and `decide` must run again if no event comes before; None when only events matter."""
        opens = [now + wait for lane in self._busy.values() if (wait := lane.opens_in(now, self._gate))]
        deadline = self._queue.next_deadline()
        parked = [self._parked_until(request) for request in itertools.islice(self._parked.values(), 1)]
        return min([*opens, *parked, *([] if deadline is None else [deadline])], default=None)

    def lane_record(self, worker: str) -> LaneRecord:
        """What waits for a worker."""
        return self._lanes[worker].record()

    def lane_load(self, worker: str, now: float) -> LaneLoad:
        """The load of a worker, for operators."""
        return self._lanes[worker].load(now)

    def lane_counts(self, now: float) -> LaneCounts:
        """How many lanes are in which state."""
        opened = sum(lane.is_open(now, self._gate) for lane in self._busy.values())
        return LaneCounts(len(self._lanes) - len(self._busy), opened, len(self._busy) - opened)

    def tables(self) -> dict[str, int]:
        """Entries of the tables that grow with requests, tenants and sessions."""
        queue = {"queue": len(self._queue), "parked": len(self._parked), "tenants_waiting": len(self._shares)}
        return {**queue, **self._placement.tables()}

    def can_serve(self, model: str, numerics: str | None, *, but: str = "") -> bool:
        """Whether a worker, another one than `but`, takes work for a model in a numerics class (None: in any)."""
        return any(lane.worker != but for lane in self._lanes_for(model, numerics))

    def _lanes_for(self, model: str, numerics: str | None) -> list[Lane]:
        lanes = self._ready.get(model, [])
        return lanes if numerics is None else [lane for lane in lanes if lane.numerics == numerics]

    def _choose(self, request: QueuedRequest, avoid: str = "") -> Lane | None:
        """The lane for a request; None when there is none."""
        lanes = self._lanes_for(request.model, request.numerics)
        request.work = request.tokens
        if avoid:
            lanes = [lane for lane in lanes if lane.worker != avoid] or lanes
        return self._placement.choose(request, lanes) if lanes else None

    def _place(self, request: QueuedRequest, now: float, lane: Lane | None, *, first: bool = False) -> None:
        """Binds a waiting request to a lane, or parks it."""
        if lane is not None:
            request.parked = None
            lane.bind(request, first=first)
            self._busy[lane.worker] = lane
            self._placement.load_changed(lane)
            return
        request.parked = now
        self._parked[request.key] = request

    def _displace(self, request: QueuedRequest) -> None:
        """Takes a request off its lane, or out of the parked ones."""
        if request.lane is None:
            del self._parked[request.key]
            return
        lane = self._lanes[request.lane]
        lane.unbind(request)
        self._settle(lane)

    def _settle(self, lane: Lane) -> None:
        """What waits for a lane has become less."""
        self._placement.load_changed(lane)
        if not len(lane):
            self._busy.pop(lane.worker, None)

    def _parked_until(self, request: QueuedRequest) -> float:
        assert request.parked is not None
        return request.parked + self._worker_wait_s

    def _spread(self, model: str, now: float) -> None:
        """Binds what waits for `model` anew after its lanes changed."""
        lanes = [lane for lane in self._lanes.values() if lane.model == model and lane.ready]
        if lanes:
            self._ready[model] = lanes
        else:
            self._ready.pop(model, None)
        moving = [
            request
            for request in self._queue
            if request.model == model and (request.lane is not None or self._lanes_for(model, request.numerics))
        ]
        for request in moving:
            self._displace(request)
        for request in moving:
            self._place(request, now, self._choose(request))


def _check_deadline(request: QueuedRequest, lane: Lane, now: float) -> None:
    if request.deadline is None:
        return
    needed_s, left_s = lane.seconds_to_serve(request), request.deadline - now
    if needed_s > left_s:
        retry_s = min(max(needed_s - left_s, MIN_QUEUE_RETRY_S), MAX_QUEUE_RETRY_S)
        raise HopelessDeadlineError(needed_s, left_s, retry_s)
