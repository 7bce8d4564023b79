"""The lanes of all workers, and which of them can serve a request.

Pure. Invariants:
  * `_ready` has the lanes that take work, by model, and `_kinds` one of them for each numerics class and length.
  * `busy` has the lanes for which something waits, `_taken` those that one request has for itself, `_limited` those
    with a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.delay_gate import DelayGate
from router.scheduling.lane import Lane
from router.scheduling.queued_request import QueuedRequest


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Lanes for which nothing waits, those that release as far as there is room, and those that the gate holds."""

    idle: int = 0
    open: int = 0
    held: int = 0


class LaneTable:
    """The lanes by worker; a worker that is up has one, whether it takes work or not.

    Attributes:
        busy: the lanes for which something waits.
    """

    def __init__(self) -> None:
        self.busy: dict[str, Lane] = {}
        self._lanes: dict[str, Lane] = {}
        self._ready: dict[str, list[Lane]] = {}
        self._kinds: dict[str, list[Lane]] = {}
        self._taken: set[str] = set()
        self._limited: set[str] = set()

    def __getitem__(self, worker: str) -> Lane:
        return self._lanes[worker]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def get(self, worker: str) -> Lane | None:
        """A worker's lane; None when it is not up."""
        return self._lanes.get(worker)

    def add(self, lane: Lane) -> None:
        """Adds the lane of a worker that has come up."""
        self._lanes[lane.worker] = lane

    def pop(self, worker: str) -> Lane:
        """Takes the lane of a worker that is gone, which takes no work any more."""
        lane = self._lanes.pop(worker)
        self.busy.pop(worker, None)
        self._taken.discard(worker)
        self._limited.discard(worker)
        return lane

    def set_ready(self, lane: Lane, ready: bool) -> None:
        """Lets a lane take work, or no more."""
        lane.ready = ready
        model = lane.model
        lanes = [each for each in self._lanes.values() if each.model == model and each.ready]
        self._ready.pop(model, None)
        self._kinds.pop(model, None)
        if lanes:
            self._ready[model] = lanes
            self._kinds[model] = list({each.kind: each for each in lanes}.values())

    def limit(self, worker: str, most_seqs: int | None) -> Lane:
        """Gives a worker no more sequences at a time than these; None: as many as it reports room for."""
        lane = self._lanes[worker]
        lane.limit = most_seqs
        if most_seqs is None:
            self._limited.discard(worker)
        else:
            self._limited.add(worker)
        return lane

    def update(self, lane: Lane) -> bool:
        """Notes whether something waits for a lane, and whether one request has it for itself.

        Returns:
            True for the lane that its worker has now, False for one of an earlier life.
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
        self, model: str, numerics: str | None, most_tokens: int = 0, *, grammar_engine: str = "", but: str = ""
    ) -> bool:
        """True if a worker, another one than `but`, takes work for a model and can serve it.

        Args:
            model: identity of the model.
            numerics: class that the worker must be of, None for any.
            most_tokens: tokens that the sequence has at its end at most.
            grammar_engine: library of its grammar, "" for none.
            but: a worker that does not count, "" for none.
        """
        lanes = self._ready.get(model, ())
        return any(lane.worker != but and lane.can_serve(numerics, most_tokens, grammar_engine) for lane in lanes)

    def is_servable(self, request: QueuedRequest) -> bool:
        """True if a worker that takes work can serve a request."""
        if request.only_worker:
            return bool(self._own_lane(request))
        kinds = self._kinds.get(request.model, ())
        return any(lane.suits(request) for lane in kinds)

    def candidates(self, request: QueuedRequest) -> list[Lane]:
        """The lanes that a request may go to; all of its model's are one and the same list.

        Those that it had better not go to, or not now, are none of them if there are others.
        """
        if request.only_worker:
            return self._own_lane(request)
        lanes = self._ready.get(request.model, [])
        if not all(lane.suits(request) for lane in self._kinds.get(request.model, ())):
            lanes = [lane for lane in lanes if lane.suits(request)]
        if request.excluded_worker:
            lanes = [lane for lane in lanes if lane.worker != request.excluded_worker] or lanes
        if self._taken or self._limited:
            special = {name: self._lanes[name] for name in self._taken | self._limited}
            shut = {name for name, lane in special.items() if lane.is_taken or lane.is_full}
            lanes = [lane for lane in lanes if lane.worker not in shut] or lanes
        if request.alone:
            lanes = [lane for lane in lanes if lane.load.is_idle and not len(lane)] or lanes
        return lanes

    def _own_lane(self, request: QueuedRequest) -> list[Lane]:
        """The lane of the one worker that a request may go to; empty while that cannot serve it."""
        return [
            lane
            for lane in self._ready.get(request.model, ())
            if lane.worker == request.only_worker and lane.suits(request)
        ]

    def counts(self, now: float, gate: DelayGate) -> LaneCounts:
        """Number of lanes in each state."""
        opened = sum(lane.is_open(now, gate) for lane in self.busy.values())
        return LaneCounts(len(self._lanes) - len(self.busy), opened, len(self.busy) - opened)
