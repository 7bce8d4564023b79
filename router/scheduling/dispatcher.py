"""Dispatcher: decides which request goes to which worker, and when, by queue, lanes, gate and placement together.

Pure: events and `now` (monotonic seconds) come in, decisions go out (docs/explanation/architecture.md), with
the placement as a policy object. No call takes long, however many wait and however large the fleet is: what a lane that
comes or goes means for those that wait is worked off in pieces (`rebinding`, `rebalancing`), and a decision looks at
the lanes that have changed or whose time has come (`lane_agenda`). Invariants, checked by the property test:
  * A request is waiting, or released, or gone; it is released at most once per arrival or return.
  * Every waiting request is bound to exactly one ready lane of its model and numerics class that is long enough for its
    prompt and all of its answer, or parked while there is none; it is parked for at most `worker_wait_s`. What is still
    to be worked off may be bound to a lane that is not ready, from which nothing is released, or parked with one there.
  * Nothing waits while its lane is idle, unless another request has the worker for itself.
  * A lane releases in the order of service of `fair_queue`; a request that changes its lane keeps its place in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.errors import HopelessDeadlineError, QueueFullError
from common.limits import MAX_QUEUE_RETRY_S, MAX_QUEUED_REQUESTS, MIN_QUEUE_RETRY_S, WORKER_WAIT_S
from router.scheduling.admission import AdmissionQueue
from router.scheduling.binding import Binding
from router.scheduling.fair_queue import TenantShares
from router.scheduling.lane import Lane
from router.scheduling.lane_agenda import LaneAgenda
from router.scheduling.lane_table import LaneCounts, LaneTable
from router.scheduling.placement import Placement
from router.scheduling.queued_request import CLASS_NAMES, CLASSES, QueuedRequest
from router.scheduling.rebalancing import Rebalancing
from router.scheduling.rebinding import Rebinding
from router.scheduling.worker_load import LoadReport

# Requests after which a decision leaves the other lanes to the next one; a group goes as a whole.
_RELEASED_PER_DECISION = 64
# Requests that one call ends: their deadline has passed, or nobody could serve them for too long.
_ENDED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Release:
    """A group of requests that goes to one worker as one prefill batch.

    `serial` numbers the groups of a lane from 1; the worker echoes it as `submit_seen`.
    """

    worker: str
    serial: int
    requests: tuple[QueuedRequest, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A waiting request whose place another tenant's has taken, and the error that its client gets."""

    request: QueuedRequest
    error: QueueFullError


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Load of one priority class: the number of waiting requests, and the age of the oldest in seconds."""

    name: str
    waiting: int
    oldest_age_s: float


class Dispatcher:
    """The requests that wait at this router, and the lanes of the workers.

    Attributes:
        shares: what the tenants have had.
        lanes: the lanes of the workers that are up.
        binding: which lane each waiting request waits for.

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
        self.shares = TenantShares() if shares is None else shares
        self._queue = AdmissionQueue(capacity, self.shares)
        self._agenda = LaneAgenda()
        self.lanes = LaneTable()
        self.binding = Binding(self.lanes, self._agenda, placement, worker_wait_s)
        self._rebinding = Rebinding(self.binding, self._queue)
        self._rebalancing = Rebalancing(self.binding, self._queue)
        # True if the last decision has left lanes to the next one.
        self._is_short = False

    def __len__(self) -> int:
        return len(self._queue)

    def configure(
        self, gate: DelayGate, placement: Placement | None, capacity: int, weights: Mapping[str, float]
    ) -> None:
        """Other rules from now on, for what waits too.

        Args:
            gate: of all lanes.
            placement: without lanes so far; None keeps the one there is, and what it has learnt.
            capacity: most requests of one class that wait; those that wait already stay.
            weights: of tenants that are not like the others.
        """
        self._gate = gate
        self._queue.configure(capacity, weights)
        self._agenda.add(self.lanes.busy.values())
        if placement is None:
            return
        self.binding.placement = placement
        for lane in self.lanes:
            # One that takes no work has a cache all the same, with which it may take work again.
            placement.lane_up(lane)
            if not lane.ready:
                placement.lane_down(lane)

    def waiting(self, now: float) -> list[ClassLoad]:
        """Waiting requests by class, the highest first."""
        arrivals: dict[int, list[float]] = {priority: [] for priority in CLASSES}
        for request in self._queue:
            arrivals[request.priority].append(request.arrival)
        return [
            ClassLoad(CLASS_NAMES[priority], len(each), now - min(each, default=now))
            for priority, each in arrivals.items()
        ]

    # Requests.

    def is_full(self, priority: int) -> bool:
        """True if a new request of a class is refused, or takes the place of another."""
        return self._queue.is_full(priority)

    def arrive(self, request: QueuedRequest, now: float) -> Dropped | None:
        """Takes a request in.

        Returns:
            The request whose place it took, which waits no more; None for none.

        Raises:
            QueueFullError: too many requests of its class wait, and no tenant has more of them for its weight.
            HopelessDeadlineError: its deadline would pass before its prompt is computed.
        """
        yields = self._queue.place_for(request.priority, request.tenant, now)
        lane = self.binding.choose(request, now)
        if lane is not None:
            _check_deadline(request, lane, now)
        dropped = None
        if yields is not None:
            dropped = Dropped(yields, self._queue.full(yields.priority, yields.tenant, now))
            self.cancel(yields.key)
        self._queue.push(request)
        self.binding.bind(request, now, lane)
        return dropped

    def rejoin(self, request: QueuedRequest, now: float) -> None:
        """Takes a request in again that waited, and was made for another model meanwhile: its key keeps its place."""
        self._queue.push(request)
        self.binding.place(request, now)

    def requeue(self, request: QueuedRequest, now: float, *, excluded_worker: str = "") -> None:
        """Takes back, at the head, a request that a worker returned (rule S9) or was lost with.

        Args:
            request: the request.
            now: monotonic seconds.
            excluded_worker: a worker that it does not go to if there is another.
        """
        self._queue.push_front(request)
        request.excluded_worker = excluded_worker
        self._rebinding.add_returned(request, now)

    def cancel(self, key: int) -> bool:
        """Drops a waiting request; False when it does not wait."""
        request = self._queue.remove(key)
        if request is None:
            return False
        self.binding.unbind(request)
        return True

    def expire(self, now: float) -> list[int]:
        """Drops waiting requests whose deadline has passed and returns their keys; the rest at the next call."""
        expired: list[int] = []
        while len(expired) < _ENDED_AT_ONCE and (request := self._queue.pop_expired(now)) is not None:
            self.binding.unbind(request)
            expired.append(request.key)
        return expired

    def abandon(self, now: float) -> list[int]:
        """Drops requests for which there has been no worker for too long and returns their keys; the rest at the next
        call. Those that can be served by now are to be placed still."""
        first = itertools.islice(self.binding.parked, _ENDED_AT_ONCE)
        overdue = itertools.takewhile(lambda request: self.binding.parked.is_overdue(request, now), first)
        abandoned = [request.key for request in overdue if not self.lanes.is_servable(request)]
        for key in abandoned:
            self.cancel(key)
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
    ) -> None:
        """A worker takes work: a clean lane, to which of what waits goes what it would serve sooner."""
        lane = Lane(
            worker,
            model,
            report,
            numerics,
            self.shares,
            max_model_len=max_model_len,
            caches_prefixes=caches_prefixes,
            grammar_engine=grammar_engine,
        )
        self.lanes.add(lane)
        self.lane_ready(worker, now)

    def lane_ready(self, worker: str, now: float) -> None:
        """A worker takes work that took none until now."""
        lane = self.lanes[worker]
        self.lanes.set_ready(lane, True)
        self.binding.parked.review_all()
        self.binding.placement.lane_up(lane)
        self._rebinding.refill(lane)
        if self.binding.placement.moves_waiting:
            self._rebalancing.begin(now)
        self._agenda.touch(lane)
        self._rebinding.work_off(now)

    def lane_draining(self, worker: str, now: float) -> None:
        """A worker takes no more work; what waits for it goes to others, or is parked."""
        lane = self.lanes[worker]
        self.lanes.set_ready(lane, False)
        self.binding.parked.review_all()
        self.binding.placement.lane_down(lane)
        self._rebinding.vacate(lane)
        self._rebinding.work_off(now)

    def lane_down(self, worker: str, now: float) -> None:
        """A worker is gone."""
        self.lane_draining(worker, now)
        self._agenda.forget(self.lanes.pop(worker))

    def limit(self, worker: str, most_seqs: int | None) -> None:
        """Gives a worker no more sequences at a time than these; None: as many as it reports room for."""
        self._agenda.touch(self.lanes.limit(worker, most_seqs))

    def share(self, worker: str, key: int) -> None:
        """A request that had a worker for itself does not need it any more; both may be unknown."""
        if (lane := self.lanes.get(worker)) is not None:
            lane.share(key)
            self.lanes.update(lane)
            self._agenda.touch(lane)

    def report(self, worker: str, load: LoadReport) -> None:
        """A worker's load after a step, or its heartbeat."""
        lane = self.lanes[worker]
        lane.load.take(load)
        self.binding.placement.load_changed(lane)
        self._agenda.touch(lane)
        if lane.load.is_idle and not len(lane):
            self._rebalancing.begin_early()

    # Decisions.

    def decide(self, now: float) -> list[Release]:
        """Releases what may go now, lane by lane, in order of service."""
        if not self._rebinding.work_off(now, is_decision=True) and self._rebalancing.is_due(now):
            self._rebalancing.run(now)
        releases: list[Release] = []
        lanes, num_released = self._agenda.take(now), 0
        while lanes and num_released < _RELEASED_PER_DECISION:
            lane = lanes.popleft()
            group: list[QueuedRequest] = []
            if lane.ready and len(lane) and lane.is_open(now, self._gate):
                group, serial = lane.release(now)
            for request in group:
                self._queue.remove(request.key)
                self.binding.placement.sent(request, lane, now)
            if group:
                self._queue.speed.departed(len(group), now)
                num_released += len(group)
                releases.append(Release(lane.worker, serial, tuple(group)))
                # There may be room for one more, which the worker chunks.
                self.binding.update(lane)
            self._agenda.set_time(lane, self._opens_at(lane, now))
        self._is_short = bool(lanes)
        self._agenda.add(lanes)
        return releases

    def next_timer(self, now: float) -> float | None:
        """Time at which `expire`, `abandon` and `decide` must run again if no event comes before; None when only events
        matter, `now` when there is something left to be worked off.
        """
        if self._is_short or self._rebinding:
            return now
        times = self.binding.parked.next_overdue(), self._agenda.next_time(), self._queue.next_deadline()
        return min((time for time in times if time is not None), default=None)

    def _opens_at(self, lane: Lane, now: float) -> float | None:
        """Time at which a lane is to be looked at again; None when only events matter, as for one that is open."""
        if not lane.ready or not len(lane):
            return None
        return now + wait_s if (wait_s := lane.opens_in(now, self._gate)) else None

    def lane_counts(self, now: float) -> LaneCounts:
        """Number of lanes in each state."""
        return self.lanes.counts(now, self._gate)

    def tables(self) -> dict[str, int]:
        """Entries of the tables that grow with requests, tenants and sessions."""
        queue = {"queue": len(self._queue), "parked": len(self.binding.parked), "tenants_waiting": len(self.shares)}
        return {**queue, **self.binding.placement.tables()}


def _check_deadline(request: QueuedRequest, lane: Lane, now: float) -> None:
    if request.deadline is None:
        return
    needed_s, left_s = lane.seconds_to_serve(request), request.deadline - now
    if needed_s > left_s:
        retry_s = min(max(needed_s - left_s, MIN_QUEUE_RETRY_S), MAX_QUEUE_RETRY_S)
        raise HopelessDeadlineError(needed_s, left_s, retry_s)
