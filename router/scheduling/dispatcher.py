"""Dispatcher: decides which request goes to which worker, and when, by queue, lanes, gate and placement together.

Pure: events and `now` (monotonic seconds) come in, decisions go out. `decide` implements docs/architecture.md with
the placement as a policy object. No call takes long, however many wait and however large the fleet is: what a lane that
comes or goes means for those that wait is worked off in pieces, and a decision looks at the lanes that have changed or
whose time has come. Invariants, checked by the property test:
  * A request is waiting, or released, or gone; it is released at most once per arrival or return.
  * Every waiting request is bound to exactly one ready lane of its model and numerics class that is long enough for its
    prompt and all of its answer, or parked while there is none; it is parked for at most `worker_wait_s`. What is still
    to be worked off may be bound to a lane that is not ready, from which nothing is released, or parked with one there.
  * Nothing waits while its lane is idle, unless another request has the worker for itself.
  * A lane releases in the order of service of `fair_queue`; a request that changes its lane keeps its place in it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.delay_gate import DelayGate
from common.errors import HopelessDeadlineError, QueueFullError
from common.limits import (
    MAX_QUEUE_RETRY_S,
    MAX_QUEUED_REQUESTS,
    MAX_REPLACED_REQUESTS,
    MIN_QUEUE_RETRY_S,
    REPLACE_IDLE_S,
    REPLACE_S,
    WORKER_WAIT_S,
)
from router.scheduling.admission import AdmissionQueue, QueuedRequest
from router.scheduling.fair_queue import CLASS_NAMES, CLASSES, TenantShares
from router.scheduling.placement import CacheChange, Placement
from router.scheduling.worker_queue import Lane, LaneLoad, LaneRecord, LoadReport

# So many more waiting requests double the time until their lanes are looked at again.
_REPLACED_AT_ONCE = 16
# Waiting requests that one decision looks at: about 2 ms.
_REPLACED_PER_DECISION = 48
# Requests after which a decision leaves the other lanes to the next one; a group goes as a whole.
_RELEASED_PER_DECISION = 64
# Requests that one call ends: their deadline has passed, or nobody could serve them for too long.
_ENDED_AT_ONCE = 128
_SPARE_TIMERS = 64


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


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Lanes for which nothing waits, those that release as far as there is room, and those that the gate holds."""

    idle: int = 0
    open: int = 0
    held: int = 0


@dataclass(slots=True)
class _Look:
    """A look at waiting requests that has begun.

    Attributes:
        requests: those to come; one without a lane is parked, or has gone meanwhile.
        ahead: prompt tokens, by worker, of those that have been looked at.
        seen: how many that were.
    """

    requests: deque[QueuedRequest]
    ahead: dict[str, int] = field(default_factory=dict)
    seen: int = 0


class _Timers:
    """Times at which each lane is to be looked at again: a heap with lazy deletion."""

    def __init__(self) -> None:
        self._at: dict[Lane, float] = {}
        self._heap: list[tuple[float, int, Lane]] = []
        self._serials = itertools.count()

    def set(self, lane: Lane, at: float | None) -> None:
        """Sets a lane's time; None for never."""
        if at is None:
            self._at.pop(lane, None)
        elif self._at.get(lane) != at:
            self._at[lane] = at
            heapq.heappush(self._heap, (at, next(self._serials), lane))
            if len(self._heap) > 2 * len(self._at) + _SPARE_TIMERS:
                self._heap = [(due, next(self._serials), each) for each, due in self._at.items()]
                heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest time; None when there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[Lane]:
        """The lanes whose time has come; they have none any more."""
        due: list[Lane] = []
        while (at := self.next()) is not None and at <= now:
            lane = heapq.heappop(self._heap)[2]
            del self._at[lane]
            due.append(lane)
        return due


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
        self._queue = AdmissionQueue(capacity, self._shares)
        self._worker_wait_s = worker_wait_s
        self._lanes: dict[str, Lane] = {}
        self._ready: dict[str, list[Lane]] = {}
        # Of them one of each numerics class and length.
        self._kinds: dict[str, list[Lane]] = {}
        # The lanes for which something waits.
        self._busy: dict[str, Lane] = {}
        # Lanes that one request has for itself, and lanes with a limit.
        self._taken: set[str] = set()
        self._limited: set[str] = set()
        # Lanes to look at in the next decision, and workers whose record may have changed.
        self._changed: dict[Lane, None] = {}
        self._changed_records: set[str] = set()
        self._timers = _Timers()
        # To be worked off: lanes that take no more, parked requests that may be served, what is to be placed anew.
        self._vacating: deque[Lane] = deque()
        self._waking: deque[int] = deque()
        self._placing: deque[QueuedRequest] = deque()
        # Those that came back behind as many as are placed at once, and how many came since the last decision.
        self._returning: deque[QueuedRequest] = deque()
        self._num_returned = 0
        # True if the last decision has left lanes to the next one.
        self._is_short = False
        # Waiting requests without a lane, the longest parked first.
        self._parked: dict[int, QueuedRequest] = {}
        self._newly_parked: list[int] = []
        self._replaced = self._replace_at = -math.inf
        self._look: _Look | None = None

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
        self._queue.configure(capacity, weights)
        self._changed.update(dict.fromkeys(self._busy.values()))
        if placement is None:
            return
        self._placement = placement
        for lane in self._lanes.values():
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
        lane = self._choose(request, now)
        if lane is not None:
            _check_deadline(request, lane, now)
        dropped = None
        if yields is not None:
            dropped = Dropped(yields, self._queue.full(yields.priority, yields.tenant, now))
            self.cancel(yields.key)
        self._queue.push(request)
        self._place(request, now, lane)
        return dropped

    def charge_output(self, request: QueuedRequest, output: int) -> None:
        """Charges a request's tenant for what has come of its answer, as `TenantShares.charge_output`."""
        self._shares.charge_output(request, output)

    def rejoin(self, request: QueuedRequest, now: float) -> None:
        """Takes a request in again that waited, and was made for another model meanwhile: its key keeps its place."""
        self._queue.push(request)
        self._place(request, now, self._choose(request, now))

    def requeue(self, request: QueuedRequest, now: float, *, excluded_worker: str = "") -> None:
        """Takes back, at the head, a request that a worker returned (rule S9) or was lost with.

        Args:
            request: the request.
            now: monotonic seconds.
            excluded_worker: a worker that it does not go to if there is another.
        """
        self._queue.push_front(request)
        request.excluded_worker = excluded_worker
        self._num_returned += 1
        if self._returning or self._num_returned > _REPLACED_PER_DECISION:
            self._returning.append(request)
        else:
            self._place(request, now, self._choose(request, now), first=True)

    def cancel(self, key: int) -> bool:
        """Drops a waiting request; False when it does not wait."""
        request = self._queue.remove(key)
        if request is None:
            return False
        self._displace(request)
        return True

    def expire(self, now: float) -> list[int]:
        """Drops waiting requests whose deadline has passed and returns their keys; the rest at the next call."""
        expired: list[int] = []
        while len(expired) < _ENDED_AT_ONCE and (request := self._queue.pop_expired(now)) is not None:
            self._displace(request)
            expired.append(request.key)
        return expired

    def abandon(self, now: float) -> list[int]:
        """Drops requests for which there has been no worker for too long and returns their keys; the rest at the next
        call. Those that can be served by now are to be placed still."""
        abandoned: list[int] = []
        for request in itertools.islice(self._parked.values(), _ENDED_AT_ONCE):
            if self._parked_until(request) > now:
                break
            if not self._is_servable(request):
                abandoned.append(request.key)
        for key in abandoned:
            self.cancel(key)
        return abandoned

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
    ) -> None:
        """A worker takes work: a clean lane, to which of what waits goes what it would serve sooner."""
        lane = Lane(
            worker,
            model,
            report,
            numerics,
            self._shares,
            max_model_len=max_model_len,
            caches_prefixes=caches_prefixes,
        )
        self._lanes[worker] = lane
        self._open(lane, now)

    def lane_draining(self, worker: str, now: float) -> None:
        """A worker takes no more work; what waits for it goes to others, or is parked."""
        lane = self._lanes[worker]
        lane.ready = False
        self._placement.lane_down(lane)
        self._know_ready(lane.model)
        if len(lane) and lane not in self._vacating:
            self._vacating.append(lane)
        self._work_off(now)

    def lane_ready(self, worker: str, now: float) -> None:
        """A worker that took no more work takes it again, as in `lane_up`."""
        lane = self._lanes[worker]
        lane.ready = True
        if lane in self._vacating:
            self._vacating.remove(lane)
        self._open(lane, now)

    def lane_down(self, worker: str, now: float) -> None:
        """A worker is gone."""
        self.lane_draining(worker, now)
        lane = self._lanes.pop(worker)
        self._busy.pop(worker, None)
        self._changed.pop(lane, None)
        self._timers.set(lane, None)
        self._taken.discard(worker)
        self._limited.discard(worker)

    def limit(self, worker: str, most_seqs: int | None) -> None:
        """Gives a worker no more sequences at a time than these; None: as many as it reports room for."""
        lane = self._lanes[worker]
        lane.limit = most_seqs
        self._changed[lane] = None
        if most_seqs is None:
            self._limited.discard(worker)
        else:
            self._limited.add(worker)

    def share(self, worker: str, key: int) -> None:
        """A request that had a worker for itself does not need it any more; both may be unknown."""
        if (lane := self._lanes.get(worker)) is not None:
            lane.share(key)
            self._note_taken(lane)
            self._changed[lane] = None

    def report(self, worker: str, load: LoadReport) -> None:
        """A worker's load after a step, or its heartbeat."""
        lane = self._lanes[worker]
        lane.take_report(load)
        self._placement.load_changed(lane)
        self._changed[lane] = None
        if lane.idle and not len(lane):
            self._replace_at = min(self._replace_at, self._replaced + REPLACE_IDLE_S)

    def cache_changed(self, worker: str, change: CacheChange) -> None:
        """Takes over what a worker that has been up reports of its prefix cache."""
        self._placement.cache_changed(worker, change)

    def cache_gone(self, worker: str) -> None:
        """A worker does not come up again with the cache that it had; it may be unknown."""
        self._placement.cache_gone(worker)

    def decide(self, now: float) -> list[Release]:
        """Releases what may go now, lane by lane, in order of service."""
        self._num_returned = 0
        if not self._work_off(now) and now >= self._replace_at:
            self._replace(now)
        releases: list[Release] = []
        lanes = deque({**dict.fromkeys(self._timers.take_due(now)), **self._changed})
        self._changed.clear()
        num_released = 0
        while lanes and num_released < _RELEASED_PER_DECISION:
            lane = lanes.popleft()
            group: list[QueuedRequest] = []
            if lane.ready and len(lane) and lane.is_open(now, self._gate):
                group, serial = lane.release(now)
            for request in group:
                self._queue.remove(request.key)
                self._placement.sent(request, lane, now)
            if group:
                self._queue.speed.departed(len(group), now)
                num_released += len(group)
                releases.append(Release(lane.worker, serial, tuple(group)))
                # There may be room for one more, which the worker chunks.
                self._settle(lane)
            self._timers.set(lane, self._opens_at(lane, now))
        self._is_short = bool(lanes)
        self._changed.update(dict.fromkeys(lanes))
        return releases

    def next_timer(self, now: float) -> float | None:
        """Time at which `expire`, `abandon` and `decide` must run again if no event comes before; None when only events
        matter.

        `now` when there is something left to be worked off.
        """
        if self._is_short or self._returning or self._vacating or self._waking or self._placing:
            return now
        parked = [self._parked_until(request) for request in itertools.islice(self._parked.values(), 1)]
        return min([*parked, *_given(self._timers.next(), self._queue.next_deadline())], default=None)

    def take_changed_records(self) -> set[str]:
        """Workers whose record may have changed since this was asked last; some may have gone since."""
        taken, self._changed_records = self._changed_records, set()
        return taken

    def parked(self) -> list[int]:
        """Keys of the requests that nobody can serve now, the longest parked first."""
        return list(self._parked)

    def is_parked(self, key: int) -> bool:
        """True if a request waits that nobody can serve now."""
        return key in self._parked

    def take_newly_parked(self) -> list[int]:
        """Keys of the requests that have been parked since this was asked last; some may have gone since."""
        taken, self._newly_parked = self._newly_parked, []
        return taken

    def lane_record(self, worker: str) -> LaneRecord:
        """Record of what waits for a worker."""
        return self._lanes[worker].record()

    def lane_load(self, worker: str, now: float) -> LaneLoad:
        """The load of a worker, for operators."""
        return self._lanes[worker].load(now)

    def lane_counts(self, now: float) -> LaneCounts:
        """Number of lanes in each state."""
        opened = sum(lane.is_open(now, self._gate) for lane in self._busy.values())
        return LaneCounts(len(self._lanes) - len(self._busy), opened, len(self._busy) - opened)

    def tables(self) -> dict[str, int]:
        """Entries of the tables that grow with requests, tenants and sessions."""
        queue = {"queue": len(self._queue), "parked": len(self._parked), "tenants_waiting": len(self._shares)}
        return {**queue, **self._placement.tables()}

    def can_serve(self, model: str, numerics: str | None, most_tokens: int = 0, *, but: str = "") -> bool:
        """True if a worker, another one than `but`, takes work for a model and can serve it.

        Args:
            model: identity of the model.
            numerics: class that the worker must be of, None for any.
            most_tokens: tokens that the sequence has at its end at most.
            but: a worker that does not count, "" for none.
        """
        lanes = self._ready.get(model, ())
        return any(lane.worker != but and lane.can_serve(numerics, most_tokens) for lane in lanes)

    def _is_servable(self, request: QueuedRequest) -> bool:
        kinds = self._kinds.get(request.model, ())
        return any(lane.can_serve(request.numerics, request.most_tokens) for lane in kinds)

    def _lanes_for(self, request: QueuedRequest) -> list[Lane]:
        """The lanes that can serve a request; all of its model's are one and the same list."""
        lanes = self._ready.get(request.model, [])
        if all(lane.can_serve(request.numerics, request.most_tokens) for lane in self._kinds.get(request.model, ())):
            return lanes
        return [lane for lane in lanes if lane.can_serve(request.numerics, request.most_tokens)]

    def _choose(self, request: QueuedRequest, now: float) -> Lane | None:
        """The lane for a request; None when there is none."""
        lanes = self._lanes_for(request)
        request.work = request.tokens
        if request.excluded_worker:
            lanes = [lane for lane in lanes if lane.worker != request.excluded_worker] or lanes
        if self._taken or self._limited:
            shut = {
                name for name in self._taken | self._limited if (lane := self._lanes[name]).is_taken or lane.is_full
            }
            lanes = [lane for lane in lanes if lane.worker not in shut] or lanes
        if request.alone:
            lanes = [lane for lane in lanes if lane.idle and not len(lane)] or lanes
        return self._placement.choose(request, lanes, now) if lanes else None

    def _place(self, request: QueuedRequest, now: float, lane: Lane | None, *, first: bool = False) -> None:
        """Binds a waiting request to a lane, or parks it."""
        if lane is not None:
            request.parked = None
            lane.bind(request, first=first)
            self._note_taken(lane)
            self._busy[lane.worker] = lane
            self._note_change(lane)
            return
        request.parked = now
        self._parked[request.key] = request
        self._newly_parked.append(request.key)

    def _replace(self, now: float) -> None:
        """Late binding: moves those of the first waiting requests that another worker would serve clearly sooner.

        Each sees what is before it on a lane. A look takes as many decisions as it needs, so that none holds the event
        loop for long. The more there are, the longer until the next look, unless a worker has nothing to do.
        """
        if self._look is None:
            self._look = _Look(deque(itertools.islice(self._queue, MAX_REPLACED_REQUESTS)))
        look = self._look
        for _ in range(min(_REPLACED_PER_DECISION, len(look.requests))):
            request = look.requests.popleft()
            if request.lane is not None and request.lane.ready and not request.alone:
                self._replace_one(request, request.lane, look.ahead, now)
                look.seen += 1
        if look.requests:
            return
        self._look = None
        self._replace_at = now + REPLACE_S * (1 + look.seen / _REPLACED_AT_ONCE)
        self._replaced = now

    def _replace_one(self, request: QueuedRequest, lane: Lane, ahead: dict[str, int], now: float) -> None:
        better = self._placement.find_better_lane(request, lane, ahead, now)
        if better is not None:
            lane.unbind(request)
            request.work = better.work
            self._settle(lane)
            lane = better.lane
            self._place(request, now, lane)
        ahead[lane.worker] = ahead.get(lane.worker, 0) + request.work

    def _displace(self, request: QueuedRequest) -> None:
        """Takes a request off its lane, or out of the parked ones."""
        lane = request.lane
        if lane is None:
            self._parked.pop(request.key, None)
            return
        lane.unbind(request)
        self._settle(lane)

    def _settle(self, lane: Lane) -> None:
        """Updates a lane whose waiting requests have become fewer."""
        self._note_taken(lane)
        if not len(lane) and self._busy.get(lane.worker) is lane:
            del self._busy[lane.worker]
        self._note_change(lane)

    def _note_change(self, lane: Lane) -> None:
        """Something else waits for a lane than before."""
        self._placement.load_changed(lane)
        if self._lanes.get(lane.worker) is lane:
            self._changed[lane] = None
            self._changed_records.add(lane.worker)

    def _opens_at(self, lane: Lane, now: float) -> float | None:
        """Time at which a lane is to be looked at again; None when only events matter, as for one that is open."""
        if not lane.ready or not len(lane):
            return None
        return now + wait_s if (wait_s := lane.opens_in(now, self._gate)) else None

    def _note_taken(self, lane: Lane) -> None:
        if self._lanes.get(lane.worker) is not lane:
            return
        if lane.is_taken:
            self._taken.add(lane.worker)
        else:
            self._taken.discard(lane.worker)

    def _parked_until(self, request: QueuedRequest) -> float:
        assert request.parked is not None
        return request.parked + self._worker_wait_s

    def _know_ready(self, model: str) -> None:
        """Notes which lanes of a model take work."""
        lanes = [lane for lane in self._lanes.values() if lane.model == model and lane.ready]
        self._ready.pop(model, None)
        self._kinds.pop(model, None)
        if lanes:
            self._ready[model] = lanes
            self._kinds[model] = list({(lane.numerics, lane.max_model_len): lane for lane in lanes}.values())

    def _open(self, lane: Lane, now: float) -> None:
        """A lane takes work from now on."""
        self._placement.lane_up(lane)
        self._know_ready(lane.model)
        # In the order of service, which is not the one in which they were parked: those that came back go first.
        self._waking = deque(request.key for request in self._queue if request.key in self._parked)
        # Late binding moves no suspects, and they are to find the lane empty.
        self._placing = deque(request for request in self._queue if request.alone)
        if self._placement.moves_waiting:
            self._replace_at = now
        else:
            self._placing.extend(request for request in self._queue if not request.alone)
        self._changed[lane] = None
        self._work_off(now)

    def _work_off(self, now: float) -> bool:
        """Places some of those that have come back, whose lane takes no more work, or for which one does.

        False when there was nothing to do.

        Lanes that have come are chosen by `_replace`, or by the placement, asked again in pieces.
        """
        room = _REPLACED_PER_DECISION
        while room and self._returning:
            returned = self._returning.popleft()
            if returned.key in self._queue and returned.lane is None and returned.key not in self._parked:
                self._place(returned, now, self._choose(returned, now), first=True)
            room -= 1
        while room and self._vacating:
            lane = self._vacating[0]
            for request in list(itertools.islice(lane, room)):
                self._displace(request)
                self._place(request, now, self._choose(request, now))
                room -= 1
            if not len(lane):
                self._vacating.popleft()
        while room and self._waking:
            parked = self._parked.get(self._waking.popleft())
            if parked is not None and (chosen := self._choose(parked, now)) is not None:
                self._displace(parked)
                self._place(parked, now, chosen)
            room -= 1
        while room and self._placing:
            request = self._placing.popleft()
            if request.lane is not None and request.lane.ready:
                self._displace(request)
                self._place(request, now, self._choose(request, now))
            room -= 1
        return room < _REPLACED_PER_DECISION


def _check_deadline(request: QueuedRequest, lane: Lane, now: float) -> None:
    if request.deadline is None:
        return
    needed_s, left_s = lane.seconds_to_serve(request), request.deadline - now
    if needed_s > left_s:
        retry_s = min(max(needed_s - left_s, MIN_QUEUE_RETRY_S), MAX_QUEUE_RETRY_S)
        raise HopelessDeadlineError(needed_s, left_s, retry_s)


def _given(*values: float | None) -> list[float]:
    """Values that are not None."""
    return [value for value in values if value is not None]
