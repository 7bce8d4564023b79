"""Decides which request goes to which worker, and when, from queue, lanes, delay gate and placement.

Pure: takes events and `now` (monotonic seconds), returns decisions (docs/explanation/architecture.md); the
placement is a policy object. No call takes long, however long the queue and however large the fleet: when a lane comes
or goes, its requests are placed again in pieces (`assignment`), and a decision looks only at the lanes on the agenda
(`lanes`). Invariants, checked by the property test:
  * A request is waiting, or released, or gone; it is released at most once per arrival or return.
  * Every waiting request is bound to exactly one ready lane of its model and numerics class that is long enough for its
    prompt and all of its answer, or parked while there is none. It is parked for at most `worker_wait_s`. Requests in
    the reassignment queue are excepted (see `assignment`).
  * No request waits while its lane is idle, unless the worker is reserved for another request.
  * A lane releases in the order of service of `fair_queue`; a request that changes its lane keeps its place in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.errors import HopelessDeadlineError, QueueFullError
from common.limits import MAX_QUEUE_RETRY_S, MAX_QUEUED_REQUESTS, MIN_QUEUE_RETRY_S, WORKER_WAIT_S
from common.telemetry.names import Stage
from router.scheduling.admission import AdmissionQueue
from router.scheduling.assignment import LaneAssignment, ReassignmentQueue, Rebalancer
from router.scheduling.fair_queue import TenantShares
from router.scheduling.lane import Lane, LaneKind, LaneStatus
from router.scheduling.lanes import LaneAgenda, LaneCounts, LaneTable
from router.scheduling.placement import Placement
from router.scheduling.queued_request import CLASS_NAMES, CLASSES, QueuedRequest
from router.scheduling.worker_load import LoadReport

# After this many released requests a decision leaves the other lanes to the next one. Groups are never split.
_RELEASED_PER_DECISION = 64
# Most requests that one call drops, because their deadline has passed or they were parked for too long.
_ENDED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Release:
    """A group of requests that is sent to one worker as one prefill batch.

    `serial` numbers the groups of a lane from 1; the worker echoes it as `submit_seen`.
    """

    worker: str
    serial: int
    requests: tuple[QueuedRequest, ...]


@dataclass(frozen=True, slots=True)
class DroppedRequest:
    """A waiting request that lost its place to another tenant's request, and the error for its client."""

    request: QueuedRequest
    error: QueueFullError


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Load of one priority class: the number of waiting requests, and the age of the oldest in seconds."""

    name: str
    waiting: int
    oldest_age_s: float


class Dispatcher:
    """The waiting requests of this router and the lanes of its workers.

    Attributes:
        shares: service that each tenant has received.
        lanes: the lanes of the workers that are up.
        assignment: binds each waiting request to a lane.

    Args:
        gate: the delay gate of all lanes.
        placement: chooses among the lanes that can serve a request.
        shares: as the attribute; has the tenants' weights.
        capacity: most waiting requests of one class.
        worker_wait_s: how long a request waits while no worker can serve it, seconds.
    """

    def __init__(
        self,
        gate: DelayGate,
        placement: Placement,
        shares: TenantShares,
        capacity: int = MAX_QUEUED_REQUESTS,
        worker_wait_s: float = WORKER_WAIT_S,
    ) -> None:
        self._gate = gate
        self.shares = shares
        self._queue = AdmissionQueue(capacity, self.shares)
        self._agenda = LaneAgenda()
        self.lanes = LaneTable()
        self.assignment = LaneAssignment(self.lanes, self._agenda, placement, worker_wait_s)
        self._reassignments = ReassignmentQueue(self.assignment, self._queue)
        self._rebalancer = Rebalancer(self.assignment, self._queue)
        # True if the last decision left lanes to the next one.
        self._is_short = False

    def __len__(self) -> int:
        return len(self._queue)

    def configure(
        self, gate: DelayGate, placement: Placement | None, capacity: int, weights: Mapping[str, float]
    ) -> None:
        """Replaces the settings, for waiting requests too.

        Args:
            gate: the delay gate of all lanes.
            placement: a new placement without lanes; None keeps the current one with what it has learnt.
            capacity: most waiting requests of one class; requests that wait already stay.
            weights: weights of tenants that do not have the default weight.
        """
        self._gate = gate
        self._queue.configure(capacity, weights)
        self._agenda.add(self.lanes.busy.values())
        if placement is None:
            return
        self.assignment.placement = placement
        for lane in self.lanes:
            # A worker that accepts no work keeps its cache, and may accept work again.
            placement.lane_up(lane)
            if not lane.ready:
                placement.lane_down(lane)

    def waiting(self, now: float) -> list[ClassLoad]:
        """Load of each priority class, the highest first."""
        arrivals: dict[int, list[float]] = {priority: [] for priority in CLASSES}
        for request in self._queue:
            arrivals[request.priority].append(request.arrival)
        return [
            ClassLoad(CLASS_NAMES[priority], len(each), now - min(each, default=now))
            for priority, each in arrivals.items()
        ]

    def queued(self) -> Iterable[QueuedRequest]:
        """The waiting requests."""
        return self._queue

    # Requests.

    def is_full(self, priority: int) -> bool:
        """True if a class has no free place: a new request is refused or replaces another."""
        return self._queue.is_full(priority)

    def arrive(self, request: QueuedRequest, now: float) -> DroppedRequest | None:
        """Queues a new request.

        Returns:
            The request that was dropped to make room; None if there was room.

        Raises:
            QueueFullError: its class is full, and no other tenant has a larger share of it.
            HopelessDeadlineError: its deadline would pass before its prompt is computed.
        """
        yields = self._queue.place_for(request.priority, request.tenant, now)
        lane = self.assignment.choose(request, now)
        if lane is not None:
            _check_deadline(request, lane, now)
        dropped = None
        if yields is not None:
            dropped = DroppedRequest(yields, self._queue.full(yields.priority, yields.tenant, now))
            self.cancel(yields.key, now)
        self._queue.push(request)
        self.assignment.bind(request, now, lane)
        return dropped

    def rejoin(self, request: QueuedRequest, now: float) -> None:
        """Queues a request again that was prepared anew for other weights; its key keeps its place in the order."""
        self._queue.push(request)
        self.assignment.place(request, now)

    def requeue(self, request: QueuedRequest, now: float, *, excluded_worker: str = "") -> None:
        """Queues a request at the head that a worker returned (rule S9), or whose worker was lost.

        Args:
            request: the request.
            now: monotonic seconds.
            excluded_worker: a worker to avoid while another one can serve the request.
        """
        self._queue.push_front(request)
        request.excluded_worker = excluded_worker
        self._reassignments.add_returned(request, now)

    @property
    def is_reassigning(self) -> bool:
        """True if returned requests, or requests of a lost worker, still lack a lane."""
        return bool(self._reassignments)

    def cancel(self, key: int, now: float) -> bool:
        """Drops a waiting request, which keeps the causes of its wait; False if it is not waiting."""
        request = self._queue.remove(key)
        if request is None:
            return False
        self.assignment.leave(request, now)
        return True

    def expire(self, now: float) -> list[int]:
        """Drops up to _ENDED_AT_ONCE waiting requests whose deadline has passed, and returns their keys."""
        expired: list[int] = []
        while len(expired) < _ENDED_AT_ONCE and (request := self._queue.pop_expired(now)) is not None:
            self.assignment.leave(request, now)
            expired.append(request.key)
        return expired

    def abandon(self, now: float) -> list[int]:
        """Drops up to _ENDED_AT_ONCE requests that were parked for too long, and returns their keys.

        Overdue requests that a worker can serve by now stay; they are in the reassignment queue.
        """
        first = itertools.islice(self.assignment.parked, _ENDED_AT_ONCE)
        overdue = itertools.takewhile(lambda request: self.assignment.parked.is_overdue(request, now), first)
        abandoned = [request.key for request in overdue if not self.lanes.is_servable(request)]
        for key in abandoned:
            self.cancel(key, now)
        return abandoned

    # Workers.

    def lane_up(
        self,
        worker: str,
        model: str,
        report: LoadReport,
        now: float,
        numerics: str = "",
        *,
        max_model_len: float = math.inf,
        caches_prefixes: bool = True,
        grammar_engine: str = "",
        role: str = "",
        kv_stores: frozenset[str] = frozenset(),
    ) -> None:
        """Adds the lane of a worker that accepts work. Waiting requests that it would serve sooner move to it."""
        lane = Lane(
            worker,
            model,
            report,
            self.shares,
            LaneKind(numerics, max_model_len, grammar_engine, role, kv_stores),
            caches_prefixes=caches_prefixes,
        )
        self.lanes.add(lane)
        self.lane_ready(worker, now)

    def lane_ready(self, worker: str, now: float) -> None:
        """Marks a worker's lane as ready: it accepts work from now on."""
        lane = self.lanes[worker]
        self.lanes.set_ready(lane, True)
        self.assignment.parked.review_all()
        self.assignment.placement.lane_up(lane)
        self._reassignments.refill(lane)
        if self.assignment.placement.moves_waiting:
            self._rebalancer.start_now(now)
        self._agenda.touch(lane)
        self._reassignments.work_off(now)

    def lane_draining(self, worker: str, now: float) -> None:
        """Marks a worker's lane as not ready. Its waiting requests move to other lanes or are parked."""
        lane = self.lanes[worker]
        self.lanes.set_ready(lane, False)
        self.assignment.parked.review_all()
        self.assignment.placement.lane_down(lane)
        self._reassignments.vacate(lane)
        self._reassignments.work_off(now)

    def lane_down(self, worker: str, now: float) -> None:
        """Removes the lane of a worker that is gone."""
        self.lane_draining(worker, now)
        self._agenda.forget(self.lanes.pop(worker))

    def limit(self, worker: str, most_seqs: int | None) -> None:
        """Limits a worker to `most_seqs` sequences at a time; None lifts the limit."""
        self._agenda.touch(self.lanes.limit(worker, most_seqs))

    def share(self, worker: str, key: int) -> None:
        """Ends the reservation of a worker for the request `key`; a no-op if either is unknown."""
        if (lane := self.lanes.get(worker)) is not None:
            lane.share(key)
            self.lanes.update(lane)
            self._agenda.touch(lane)

    def report(self, worker: str, load: LoadReport) -> None:
        """Takes a worker's load, as reported after a step or with a heartbeat."""
        lane = self.lanes[worker]
        lane.load.take(load)
        self.assignment.placement.load_changed(lane)
        self._agenda.touch(lane)
        if lane.load.is_idle and not len(lane):
            self._rebalancer.start_early()

    # Decisions.

    def decide(self, now: float) -> list[Release]:
        """Releases the requests that may go now, lane by lane, in order of service."""
        if not self._reassignments.work_off(now, is_decision=True) and self._rebalancer.is_due(now):
            self._rebalancer.run(now)
        releases: list[Release] = []
        lanes, num_released = self._agenda.take(now), 0
        while lanes and num_released < _RELEASED_PER_DECISION:
            lane = lanes.popleft()
            group: list[QueuedRequest] = []
            if lane.ready and len(lane):
                is_open = lane.is_open(now, self._gate)
                reason = Stage.GATE_BACKLOG if lane.load.has_waiting else Stage.GATE_HOLD
                lane.waits.hold(now, None if is_open or lane.is_taken else reason)
                if is_open:
                    group, serial = lane.release(now)
                    lane.waits.release([request.wait for request in group], now)
            for request in group:
                self._queue.remove(request.key)
                self.assignment.placement.sent(request, lane, now)
            if group:
                self._queue.speed.departed(len(group), now)
                num_released += len(group)
                releases.append(Release(lane.worker, serial, tuple(group)))
                # There may be room for one more request, which the worker chunks.
                self.assignment.update(lane)
            self._agenda.set_time(lane, self._opens_at(lane, now))
        self._is_short = bool(lanes)
        self._agenda.add(lanes)
        return releases

    def next_timer(self, now: float) -> float | None:
        """Time at which `expire`, `abandon` and `decide` must run again if no event comes first.

        None if only an event can change the decision; `now` if work is left over.
        """
        if self._is_short or self._reassignments:
            return now
        times = self.assignment.parked.next_overdue(), self._agenda.next_time(), self._queue.next_deadline()
        return min((time for time in times if time is not None), default=None)

    def _opens_at(self, lane: Lane, now: float) -> float | None:
        """Time at which a lane's gate opens by time alone; None if only an event can change the decision."""
        if not lane.ready or not len(lane):
            return None
        return now + wait_s if (wait_s := lane.opens_in(now, self._gate)) else None

    def lane_counts(self, now: float) -> LaneCounts:
        """Number of lanes in each state."""
        return self.lanes.counts(now, self._gate)

    def lane_status(self, worker: str, now: float) -> LaneStatus:
        """State of a worker's lane, for operators."""
        return self.lanes[worker].status(now, self._gate)

    def tables(self) -> dict[str, int]:
        """Sizes of the tables that grow with requests, tenants and sessions, by name."""
        queue = {"queue": len(self._queue), "parked": len(self.assignment.parked), "tenants_waiting": len(self.shares)}
        return {**queue, **self.assignment.placement.tables()}


def _check_deadline(request: QueuedRequest, lane: Lane, now: float) -> None:
    if request.deadline is None:
        return
    needed_s, left_s = lane.seconds_to_serve(request), request.deadline - now
    if needed_s > left_s:
        retry_s = min(max(needed_s - left_s, MIN_QUEUE_RETRY_S), MAX_QUEUE_RETRY_S)
        raise HopelessDeadlineError(needed_s, left_s, retry_s)
