"""Which worker a request goes to.

A policy hears of every lane that comes and goes and of every change of its load, so that a decision looks at a few of
them only, however many there are. Loads are counted when a request is placed, not when its worker reports it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.limits import MAX_SESSIONS
from router.fair_queue import QueuedRequest
from router.lane import Lane
from router.prefix_index import GRANULE_BLOCKS, PrefixIndex

# Stands in for the speed of workers that have measured none, tokens per second.
_ASSUMED_RATE = 10_000.0
# What a sequence waits that finds no place in the running set: longer than a prefill, for another must end first.
_NO_PLACE_S = 1.0
_NUM_LEAST = 2
_SPARE = 64


class Placement(Protocol):
    """A policy."""

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The lane for `request` among `lanes`, which all serve its model, take work, and are at least one.

        Sets `request.work` where that is less than its tokens.
        """
        ...

    def lane_up(self, lane: Lane) -> None:
        """A worker takes work."""
        ...

    def lane_down(self, lane: Lane) -> None:
        """A worker takes no more work; may be said twice."""
        ...

    def load_changed(self, lane: Lane) -> None:
        """What waits for a lane has changed, or its worker's report."""
        ...

    def sent(self, request: QueuedRequest, lane: Lane) -> None:
        """A request was released to a lane's worker."""
        ...

    def tables(self) -> dict[str, int]:
        """Entries of what is remembered of requests and sessions, by name."""
        ...


class RoundRobin:
    """One lane after the other, per model, whatever their load."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The next lane in turn."""
        turn = self._turns.get(request.model, 0)
        self._turns[request.model] = turn + 1
        return lanes[turn % len(lanes)]

    def lane_up(self, lane: Lane) -> None:
        """Nothing to note."""

    def lane_down(self, lane: Lane) -> None:
        """Nothing to note."""

    def load_changed(self, lane: Lane) -> None:
        """Nothing to note."""

    def sent(self, request: QueuedRequest, lane: Lane) -> None:
        """Nothing to note."""

    def tables(self) -> dict[str, int]:
        """Nothing is remembered."""
        return {}


def seconds_of_work(lane: Lane, tokens: int = 0, rate: float = _ASSUMED_RATE) -> float:
    """Seconds until a request that adds `tokens` to a lane would have its prompt computed.

    At one speed for all lanes that are compared: a worker that gets small batches measures a low one, and would get
    fewer still if its own counted. A worker that is slower has more waiting, which counts.
    """
    places = lane.last_report.room_seqs - lane.unseen_seqs - len(lane)
    return (lane.outstanding_tokens + tokens) / rate + (_NO_PLACE_S if places <= 0 and not lane.idle else 0.0)


class LoadOrder:
    """The lanes of one model, least loaded first; of equal ones the one whose load has been so for longest."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self._loads: dict[str, tuple[float, int, int]] = {}
        # Entries that `_loads` has no more are stale.
        self._heap: list[tuple[tuple[float, int, int], str]] = []
        self._serials = itertools.count()

    def update(self, lane: Lane) -> None:
        """Counts a lane with its load as it is: O(log n), amortized."""
        report = lane.last_report
        load = seconds_of_work(lane), report.decoding_seqs + report.waiting_seqs + lane.unseen_seqs + len(lane)
        known = self._loads.get(lane.worker)
        if known is not None and known[:2] == load and self.lanes[lane.worker] is lane:
            return
        self.lanes[lane.worker] = lane
        entry = self._loads[lane.worker] = (*load, next(self._serials))
        heapq.heappush(self._heap, (entry, lane.worker))
        if len(self._heap) > 2 * len(self._loads) + _SPARE:
            self._heap = [(load_of, worker) for worker, load_of in self._loads.items()]
            heapq.heapify(self._heap)

    def remove(self, lane: Lane) -> None:
        """Forgets a lane."""
        if self.lanes.get(lane.worker) is lane:
            del self.lanes[lane.worker], self._loads[lane.worker]

    def least(self, number: int) -> list[Lane]:
        """The least loaded lanes, at most `number`."""
        entries: list[tuple[tuple[float, int, int], str]] = []
        while self._heap and len(entries) < number:
            entry = heapq.heappop(self._heap)
            if self._loads.get(entry[1]) == entry[0]:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [self.lanes[worker] for _, worker in entries]


class LeastLoaded:
    """The lane with the fewest prompt tokens waiting, there, under way or here; then the fewest sequences."""

    def __init__(self) -> None:
        self._orders: dict[str, LoadOrder] = {}

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The least loaded lane."""
        order = self._orders[request.model]
        if len(lanes) == len(order.lanes):
            return order.least(1)[0]
        return min(lanes, key=lambda lane: (seconds_of_work(lane), lane.last_report.decoding_seqs + len(lane)))

    def lane_up(self, lane: Lane) -> None:
        """Counts it."""
        self._orders.setdefault(lane.model, LoadOrder()).update(lane)

    def lane_down(self, lane: Lane) -> None:
        """Forgets it, and its model with the last lane."""
        order = self._orders.get(lane.model)
        if order is not None:
            order.remove(lane)
            if not order.lanes:
                del self._orders[lane.model]

    def load_changed(self, lane: Lane) -> None:
        """Notes its load."""
        order = self._orders.get(lane.model)
        if order is not None and order.lanes.get(lane.worker) is lane:
            order.update(lane)

    def sent(self, request: QueuedRequest, lane: Lane) -> None:
        """Nothing to note."""

    def tables(self) -> dict[str, int]:
        """Nothing is remembered."""
        return {}

    def least(self, model: str) -> list[Lane]:
        """The two least loaded lanes of a model."""
        return self._orders[model].least(_NUM_LEAST)

    def lanes(self, model: str) -> dict[str, Lane]:
        """All lanes of a model by worker."""
        return self._orders[model].lanes


class Sessions:
    """Where each session was last sent; the MAX_SESSIONS most recent ones."""

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, request: QueuedRequest) -> str:
        """The worker of a request's session; "" when there is none."""
        return self._workers.get((request.model, request.session), "") if request.session else ""

    def note(self, request: QueuedRequest, worker: str) -> None:
        """A request of the session goes to a worker."""
        if request.session:
            self._workers[(request.model, request.session)] = worker
            self._workers.move_to_end((request.model, request.session))
            if len(self._workers) > MAX_SESSIONS:
                self._workers.popitem(last=False)


class SessionAffinity(LeastLoaded):
    """Requests of one session to one worker while it takes work; a new session, or none, to the least loaded lane."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions = Sessions()

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The session's lane."""
        known = self.lanes(request.model).get(self._sessions.find(request))
        subset = len(lanes) < len(self.lanes(request.model))
        if known is None or (subset and known not in lanes):
            known = super().choose(request, lanes)
        self._sessions.note(request, known.worker)
        return known

    def tables(self) -> dict[str, int]:
        """The sessions."""
        return {"sessions": len(self._sessions)}


class PrefixAware(LeastLoaded):
    """The lane that would have computed the prompt first, counting what it is likely to have in its prefix cache.

    Affinity and load are in one unit, seconds (design-details section 5), so that a hot prefix spreads as soon as
    waiting for its owner takes longer than computing it again. Looks at up to 4 owners of the longest cached prefix,
    the session's lane, and the two least loaded lanes, whatever the size of the fleet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._indexes: dict[str, PrefixIndex] = {}
        self._sessions = Sessions()

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The lane of least cost."""
        known, index = self.lanes(request.model), self._indexes[request.model]
        if len(lanes) < len(known):
            candidates = {lane.worker: lane for lane in lanes}
        else:
            names = [*index.owners(request.granules), self._sessions.find(request)]
            candidates = {name: known[name] for name in names if name in known}
            candidates.update((lane.worker, lane) for lane in self.least(request.model))
        rate = max(lane.last_report.prefill_rate for lane in candidates.values()) or _ASSUMED_RATE
        best = min(candidates.values(), key=lambda lane: self.cost_s(request, lane, rate))
        self._sessions.note(request, best.worker)
        request.work = self._work(request, best)
        return best

    def tables(self) -> dict[str, int]:
        """The sessions."""
        return {"sessions": len(self._sessions)}

    def cost_s(self, request: QueuedRequest, lane: Lane, rate: float) -> tuple[float, int]:
        """Seconds to the end of the request's prefill, and how many sequences it would run with there."""
        running = lane.last_report.decoding_seqs + lane.unseen_seqs + len(lane)
        return seconds_of_work(lane, self._work(request, lane), rate), running

    def _work(self, request: QueuedRequest, lane: Lane) -> int:
        """Tokens that the worker would have to compute; the last one always."""
        hit = self._indexes[request.model].depth(lane.worker, request.granules) * request.granule_tokens
        return max(request.tokens - hit, 1)

    def lane_up(self, lane: Lane) -> None:
        """Counts it, with an empty cache."""
        super().lane_up(lane)
        index = self._indexes.setdefault(lane.model, PrefixIndex())
        index.add_worker(lane.worker, lane.last_report.total_blocks // GRANULE_BLOCKS)

    def lane_down(self, lane: Lane) -> None:
        """Forgets it and its cache."""
        super().lane_down(lane)
        if lane.model in self._indexes:
            self._indexes[lane.model].remove_worker(lane.worker)
            if lane.model not in self._orders:
                del self._indexes[lane.model]

    def sent(self, request: QueuedRequest, lane: Lane) -> None:
        """The worker will have the prompt in its cache."""
        self._indexes[request.model].store(lane.worker, request.granules)


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """A policy by name: how it is made, and what it does, in a few words."""

    make: Callable[[], Placement]
    what: str


PLACEMENTS: dict[str, PlacementChoice] = {
    "prefix_aware": PlacementChoice(
        PrefixAware, "the worker that has the prompt computed first, given its load and what it has cached"
    ),
    "least_loaded": PlacementChoice(LeastLoaded, "the worker with the least prompt work waiting"),
    "session": PlacementChoice(SessionAffinity, "requests with the same session_id to the same worker"),
    "round_robin": PlacementChoice(RoundRobin, "one after the other, whatever their load"),
}
