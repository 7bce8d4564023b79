"""The lanes of all workers: which ones can serve a request, and which ones the next decision looks at.

Pure. Invariants of `LaneTable`:
  * `_ready` lists the lanes that accept new work, by model; `_kinds` has their different kinds.
  * `busy` has the lanes with waiting requests, `_taken` the workers reserved for one request, `_limited` those with a
    limit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.wire.protocol import DECODE_FEATURE, PREFILL_FEATURE
from router.scheduling.lane import Lane, LaneKind
from router.scheduling.queued_request import QueuedRequest

# Stale heap entries that are kept beyond half of all entries.
_SPARE = 64


class LaneAgenda:
    """The lanes that the next decision looks at: changed ones, and those whose time has passed.

    Times are in a heap with lazy deletion.
    """

    def __init__(self) -> None:
        self._changed: dict[Lane, None] = {}
        self._at: dict[Lane, float] = {}
        self._heap: list[tuple[float, int, Lane]] = []
        self._serials = itertools.count()

    def add(self, lanes: Iterable[Lane]) -> None:
        """Adds lanes that the next decision must look at."""
        self._changed.update(dict.fromkeys(lanes))

    def touch(self, lane: Lane) -> None:
        """Adds one lane that the next decision must look at."""
        self._changed[lane] = None

    def forget(self, lane: Lane) -> None:
        """Removes a lane from the agenda."""
        self._changed.pop(lane, None)
        self._at.pop(lane, None)

    def set_time(self, lane: Lane, at: float | None) -> None:
        """Sets when a decision looks at a lane that has not changed; None for never."""
        if at is None:
            self._at.pop(lane, None)
        elif self._at.get(lane) != at:
            self._at[lane] = at
            heapq.heappush(self._heap, (at, next(self._serials), lane))
            if len(self._heap) > 2 * len(self._at) + _SPARE:
                self._heap = [(due, next(self._serials), each) for each, due in self._at.items()]
                heapq.heapify(self._heap)

    def next_time(self) -> float | None:
        """The earliest time set; None without one."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> deque[Lane]:
        """Removes and returns the lanes to look at now: first those whose time has passed, then the changed ones."""
        due: dict[Lane, None] = {}
        while (at := self.next_time()) is not None and at <= now:
            lane = heapq.heappop(self._heap)[2]
            del self._at[lane]
            due[lane] = None
        lanes = deque({**due, **self._changed})
        self._changed.clear()
        return lanes


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Number of lanes with an empty queue (`idle`), with an open gate (`open`) and with a closed gate (`held`)."""

    idle: int = 0
    open: int = 0
    held: int = 0


class LaneTable:
    """The lanes by worker. Every worker that is up has one, whether it accepts work or not.

    Attributes:
        busy: the lanes with waiting requests.
    """

    def __init__(self) -> None:
        self.busy: dict[str, Lane] = {}
        self._lanes: dict[str, Lane] = {}
        self._ready: dict[str, list[Lane]] = {}
        self._kinds: dict[str, list[LaneKind]] = {}
        self._taken: set[str] = set()
        self._limited: set[str] = set()

    def __getitem__(self, worker: str) -> Lane:
        return self._lanes[worker]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def get(self, worker: str) -> Lane | None:
        """A worker's lane; None while the worker is not up."""
        return self._lanes.get(worker)

    def add(self, lane: Lane) -> None:
        """Adds the lane of a new worker."""
        self._lanes[lane.worker] = lane

    def pop(self, worker: str) -> Lane:
        """Removes and returns the lane of a worker that is gone. The lane must not be ready."""
        lane = self._lanes.pop(worker)
        self.busy.pop(worker, None)
        self._taken.discard(worker)
        self._limited.discard(worker)
        return lane

    def set_ready(self, lane: Lane, ready: bool) -> None:
        """Sets whether a lane accepts work."""
        lane.ready = ready
        model = lane.model
        lanes = [each for each in self._lanes.values() if each.model == model and each.ready]
        self._ready.pop(model, None)
        self._kinds.pop(model, None)
        if lanes:
            self._ready[model] = lanes
            self._kinds[model] = list({each.kind for each in lanes})

    def limit(self, worker: str, most_seqs: int | None) -> Lane:
        """Limits a worker to `most_seqs` sequences at a time; None lifts the limit."""
        lane = self._lanes[worker]
        lane.limit = most_seqs
        if most_seqs is None:
            self._limited.discard(worker)
        else:
            self._limited.add(worker)
        return lane

    def update(self, lane: Lane) -> bool:
        """Updates `busy` and `_taken` after a lane's requests have changed.

        Returns:
            True for the lane that its worker has now, False for a lane that the table no longer has.
        """
        if self._lanes.get(lane.worker) is not lane:
            return False
        if len(lane):
            self.busy[lane.worker] = lane
        else:
            self.busy.pop(lane.worker, None)
        if lane.is_taken:
            self._taken.add(lane.worker)
        else:
            self._taken.discard(lane.worker)
        return True

    def can_serve(
        self,
        model: str,
        numerics: str | None,
        most_tokens: int = 0,
        *,
        grammar_engine: str = "",
        but: str = "",
    ) -> bool:
        """True if a ready worker other than `but` can serve such a request.

        Args:
            model: identity of the model.
            numerics: required numerics class, None for any.
            most_tokens: longest prompt and answer together, tokens.
            grammar_engine: library of its grammar, "" for none.
            but: excluded worker, "" for none.
        """
        return any(
            lane.worker != but and lane.kind.can_serve(numerics, most_tokens, grammar_engine)
            for lane in self._ready.get(model, ())
        )

    def has_decode_place(
        self,
        model: str,
        numerics: str | None,
        most_tokens: int,
        grammar_engine: str,
        *,
        num_tokens: int,
        block_size: int,
    ) -> bool:
        """True if a worker that is not for prefills can continue a request at once.

        Of workers for decodes and for both, those that the request would go to count. For the first arguments see
        `can_serve`, for the last two `Lane.has_place`.
        """
        suited = [
            lane
            for lane in self._ready.get(model, ())
            if lane.kind.role != PREFILL_FEATURE and lane.kind.can_serve(numerics, most_tokens, grammar_engine)
        ]
        return any(lane.has_place(num_tokens, block_size) for lane in _by_role(suited, has_output=True))

    def role_problem(self, lane: Lane) -> str:
        """Why this lane's worker shares no KV blocks with those for the other half; "" if it does, or none is up."""
        half = lane.kind.role
        other = {PREFILL_FEATURE: DECODE_FEATURE, DECODE_FEATURE: PREFILL_FEATURE}.get(half)
        kinds = [each.kind for each in self._ready.get(lane.model, ()) if each.kind.role == other]
        same_class = [kind for kind in kinds if kind.numerics == lane.kind.numerics]
        if not other or not kinds or any(kind.kv_stores & lane.kind.kv_stores for kind in same_class):
            return ""
        what = "--kv-tiers names no tier" if same_class else "its numerics class is not that"
        return f"{what} of a worker for {other}s"

    def is_servable(self, request: QueuedRequest) -> bool:
        """True if a ready worker can serve a request."""
        if request.only_worker:
            return bool(self._own_lane(request))
        kinds = self._kinds.get(request.model, ())
        return any(kind.suits(request) for kind in kinds)

    def candidates(self, request: QueuedRequest) -> list[Lane]:
        """The ready lanes that a request may be bound to.

        Workers for the other half of its work (`--role`), the excluded worker, reserved and full workers, those without
        a place for a stream that has begun, and busy ones for a request that needs a worker to itself are left out,
        unless no other lane is left. If all lanes remain for a new request, returns the model's own list, not a copy.
        """
        if request.only_worker:
            return self._own_lane(request)
        lanes = self._ready.get(request.model, [])
        if not all(kind.suits(request) for kind in self._kinds.get(request.model, ())):
            lanes = [lane for lane in lanes if lane.kind.suits(request)]
        if request.excluded_worker:
            lanes = [lane for lane in lanes if lane.worker != request.excluded_worker] or lanes
        if self._taken or self._limited:
            special = {name: self._lanes[name] for name in self._taken | self._limited}
            shut = {name for name, lane in special.items() if lane.is_taken or lane.is_full}
            lanes = [lane for lane in lanes if lane.worker not in shut] or lanes
        lanes = _by_role(lanes, has_output=request.has_output)
        if request.has_output and (size := request.block_tokens):
            lanes = [lane for lane in lanes if lane.has_place(request.tokens, size)] or lanes
        if request.alone:
            lanes = [lane for lane in lanes if lane.load.is_idle and not len(lane)] or lanes
        return lanes

    def _own_lane(self, request: QueuedRequest) -> list[Lane]:
        """The lane of `request.only_worker`; empty while that worker cannot serve the request."""
        return [
            lane
            for lane in self._ready.get(request.model, ())
            if lane.worker == request.only_worker and lane.kind.suits(request)
        ]

    def counts(self, now: float, gate: DelayGate) -> LaneCounts:
        """Number of lanes in each state."""
        opened = sum(lane.is_open(now, gate) for lane in self.busy.values())
        return LaneCounts(len(self._lanes) - len(self.busy), opened, len(self.busy) - opened)


def _by_role(lanes: list[Lane], *, has_output: bool) -> list[Lane]:
    """The lanes for the half of a request's work that comes next; without any those for both, or for the other."""
    if not any(lane.kind.role for lane in lanes):
        return lanes
    next_half, other = (DECODE_FEATURE, PREFILL_FEATURE) if has_output else (PREFILL_FEATURE, DECODE_FEATURE)
    own = [lane for lane in lanes if lane.kind.role == next_half]
    return own or [lane for lane in lanes if lane.kind.role != other] or lanes
