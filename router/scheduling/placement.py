"""Placement policies: choose the worker for each request.

A policy is told of every lane that comes or goes and of every change of load, so that a decision looks at a few lanes
only, however large the fleet. A request counts as load from its placement on, not from its worker's next report.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from common.limits import MAX_INDEX_ENTRIES, MAX_SESSIONS
from router.scheduling.lane import Lane
from router.scheduling.prefix_index import LongestPrefix, TieredIndex
from router.scheduling.queued_request import PlacementChoice, PrefixLookup, QueuedRequest

# Assumed speed of workers that have reported none, tokens per second.
_ASSUMED_RATE = 10_000.0
# Reported speeds are forgotten after one to two windows.
_FASTEST_WINDOW_S = 30.0
# Assumed wait for a place in a full running set: longer than a prefill, because another sequence must end first.
_NO_PLACE_S = 1.0
_NUM_LEAST = 2
# Lanes among which the least loaded suitable ones are searched: some cannot serve every request.
_MAX_LOOKED_AT = 16
_MAX_OWNERS = 4
_SPARE = 64
# Least gain for which a waiting request changes its lane: seconds, and fraction of its wait.
_MIN_GAIN_S = 0.005
_MIN_GAIN = 0.1
# Assumed time to read a prefix from a memory tier that has not been read yet, as a share of the time to compute it.
_ASSUMED_READ_SHARE = 0.5
# A waiting request's cached prefixes are looked up again after this time, or when the longest one has changed.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Granules that have entered and left a worker's prefix cache and its memory tier.

    `anew`: the change starts from an empty cache and an empty tier.
    """

    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()
    anew: bool = False
    memory_stored: Sequence[int] = ()
    memory_evicted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A better lane for a waiting request, and the tokens to compute there."""

    lane: Lane
    work: int


class Placement(abc.ABC):
    """Base class of the policies; the events that a policy does not need are ignored.

    Attributes:
        moves_waiting: True if `find_better_lane` moves waiting requests to new lanes; otherwise `choose` is called
            again for each of them.
    """

    moves_waiting = False

    @abc.abstractmethod
    def choose(self, request: QueuedRequest, lanes: Sequence[Lane], now: float) -> Lane:
        """Chooses a lane for a request, and sets `request.work` if that is less than its tokens.

        `lanes` has at least one lane: the ready ones that can serve the request.
        """

    def find_better_lane(self, request: QueuedRequest, lane: Lane, ahead: Mapping[str, int], now: float) -> Move | None:
        """Finds a lane that would serve a waiting request clearly sooner, or corrects its work in its own lane.

        None if the request should stay as it is.

        Args:
            request: the waiting request.
            lane: its lane.
            ahead: tokens of work of the waiting requests ahead of it, by worker.
            now: monotonic seconds.
        """
        return None

    def lane_up(self, lane: Lane) -> None:  # noqa: B027
        """A lane is ready."""

    def lane_down(self, lane: Lane) -> None:  # noqa: B027
        """A lane is no longer ready; may be called twice."""

    def load_changed(self, lane: Lane) -> None:  # noqa: B027
        """Notes that a lane's requests or its worker's report have changed."""

    def sent(self, request: QueuedRequest, lane: Lane, now: float) -> None:  # noqa: B027
        """A request was released to a lane's worker."""

    def cache_changed(self, worker: str, change: CacheChange) -> None:  # noqa: B027
        """A worker reports a change of its prefix cache."""

    def cache_gone(self, worker: str) -> None:  # noqa: B027
        """A worker's cache is lost. Until this call, the worker may return with the cache that it had."""

    def tables(self) -> dict[str, int]:
        """Sizes of the policy's tables, by name."""
        return {}


class RoundRobin(Placement):
    """The lanes of a model in turn, whatever their load."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane], now: float) -> Lane:
        """The next lane in turn."""
        turn = self._turns.get(request.model, 0)
        self._turns[request.model] = turn + 1
        request.choice = PlacementChoice("turn", len(lanes))
        return lanes[turn % len(lanes)]


def seconds_of_work(lane: Lane, tokens: int = 0, rate: float = _ASSUMED_RATE) -> float:
    """Seconds until a lane has computed its prompts and `tokens` more.

    A worker with a full running set counts _NO_PLACE_S more, because another sequence must end there first.
    """
    return (lane.outstanding_tokens + tokens) / rate + _no_place_s(lane, len(lane))


def _no_place_s(lane: Lane, waiting: int, num_blocks: int = 0) -> float:
    places = lane.load.report.room_seqs - lane.load.unseen_seqs - waiting
    has_room = places > 0 and lane.load.report.free_blocks >= num_blocks
    return 0.0 if has_room or lane.load.is_idle else _NO_PLACE_S


class LoadOrder:
    """The lanes of one model, least loaded first; of equal ones, the one whose load has not changed for longest.

    Args:
        seconds: time until a lane has computed its prompts.
    """

    def __init__(self, seconds: Callable[[Lane], float] = seconds_of_work) -> None:
        self._seconds = seconds
        self.lanes: dict[str, Lane] = {}
        self._loads: dict[str, tuple[float, int, int]] = {}
        # Entries that differ from `_loads` are stale.
        self._heap: list[tuple[tuple[float, int, int], str]] = []
        self._serials = itertools.count()

    def update(self, lane: Lane) -> None:
        """Adds a lane or updates its load: O(log n), amortized."""
        report = lane.load.report
        load = self._seconds(lane), report.decoding_seqs + report.waiting_seqs + lane.load.unseen_seqs + len(lane)
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

    def least(self, number: int, suits: Callable[[Lane], bool] = lambda lane: True) -> list[Lane]:
        """Up to `number` least loaded lanes that suit, among the first _MAX_LOOKED_AT."""
        entries: list[tuple[tuple[float, int, int], str]] = []
        found: list[Lane] = []
        while self._heap and len(found) < number and len(entries) < _MAX_LOOKED_AT:
            entry = heapq.heappop(self._heap)
            if self._loads.get(entry[1]) == entry[0]:
                entries.append(entry)
                if suits(lane := self.lanes[entry[1]]):
                    found.append(lane)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return found


class LeastLoad(Placement):
    """The lane with the fewest prompt tokens to compute: at the worker, on their way, or waiting here.

    Of equal lanes, the one with the fewest sequences.
    """

    moves_waiting = True

    def __init__(self) -> None:
        self._orders: dict[str, LoadOrder] = {}

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane], now: float) -> Lane:
        """The least loaded lane."""
        request.choice = PlacementChoice("load", len(lanes))
        order = self._orders[request.model]
        if len(lanes) == len(order.lanes):
            return order.least(1)[0]
        if len(lanes) > _MAX_LOOKED_AT and (least := order.least(1, _among(lanes))):
            return least[0]
        return min(lanes, key=lambda lane: (seconds_of_work(lane), lane.load.report.decoding_seqs + len(lane)))

    def lane_up(self, lane: Lane) -> None:
        """Adds the lane."""
        self._orders.setdefault(lane.model, LoadOrder(self._seconds)).update(lane)

    def lane_down(self, lane: Lane) -> None:
        """Removes the lane, and its model with the last lane."""
        order = self._orders.get(lane.model)
        if order is not None:
            order.remove(lane)
            if not order.lanes:
                del self._orders[lane.model]

    def load_changed(self, lane: Lane) -> None:
        """Updates the lane's load."""
        order = self._orders.get(lane.model)
        if order is not None and order.lanes.get(lane.worker) is lane:
            order.update(lane)

    def find_better_lane(self, request: QueuedRequest, lane: Lane, ahead: Mapping[str, int], now: float) -> Move | None:
        """The lane of least cost, if it is cheaper than the own lane by more than 5 ms and 10 %.

        If the own lane is blocked, any other lane of its role is better. The candidates are those of `choose`, looked
        up again when the cached prefixes have changed.
        """

        def cost_s(other: Lane, work: int) -> float:
            speed = self._speed(other, now)
            no_place_s = _no_place_s(other, 0, num_blocks)
            return other.load.waits_s(speed, ahead.get(other.worker, 0)) + work / speed + no_place_s

        # A stream that has begun needs all its blocks at once.
        num_blocks = -(-request.tokens // request.block_tokens) if request.has_output and request.block_tokens else 0
        hits, known = self._refresh_lookup(request, lane, now), self.lanes(request.model)
        stays = Move(lane, _work(request, hits[lane.worker]) if lane.worker in hits else request.work)
        here = cost_s(lane, stays.work)
        bound = math.inf if lane.is_blocked else here - max(_MIN_GAIN_S, _MIN_GAIN * here)
        names = dict.fromkeys([*hits, *(other.worker for other in self.least(request, lane))])
        others = [known[worker] for worker in names if worker in known and worker != lane.worker]
        found = [
            Move(other, _work(request, hits.get(other.worker, 0)))
            for other in others
            if other.kind.role == lane.kind.role and _may_serve(request, other)
        ]
        best = min(found, key=lambda other: cost_s(other.lane, other.work), default=None)
        if best is not None and (there := cost_s(best.lane, best.work)) < bound:
            request.choice = PlacementChoice("moved", len(names), request.tokens - best.work, there)
            return best
        return stays if stays.work != request.work else None

    def _seconds(self, lane: Lane) -> float:
        """Seconds until a lane has computed its prompts."""
        return seconds_of_work(lane)

    def _speed(self, lane: Lane, now: float) -> float:
        """Prefill speed of a lane's worker, tokens per second."""
        return _ASSUMED_RATE

    def _refresh_lookup(self, request: QueuedRequest, lane: Lane, now: float) -> Mapping[str, float]:
        """Cached granules of the prompt on each candidate, looked up again if they may have changed."""
        return request.lookup.hits

    def least(self, request: QueuedRequest, lane: Lane) -> list[Lane]:
        """The two least loaded lanes of a lane's role that a waiting request may go to."""
        role = lane.kind.role
        return self._orders[request.model].least(
            _NUM_LEAST, lambda other: other.kind.role == role and _may_serve(request, other)
        )

    def lanes(self, model: str) -> dict[str, Lane]:
        """All lanes of a model by worker."""
        return self._orders[model].lanes


class SessionAffinityTable:
    """The worker that each session last used, for the MAX_SESSIONS most recent sessions."""

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, request: QueuedRequest) -> str:
        """The worker of a request's session; "" if unknown."""
        return self._workers.get((request.model, request.session), "") if request.session else ""

    def note(self, request: QueuedRequest, worker: str) -> None:
        """Notes that a request's session uses a worker."""
        if request.session:
            self._workers[(request.model, request.session)] = worker
            self._workers.move_to_end((request.model, request.session))
            if len(self._workers) > MAX_SESSIONS:
                self._workers.popitem(last=False)


class SessionAffinity(LeastLoad):
    """Sends a session's requests to one worker while its lane is ready; other requests to the least loaded lane."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions = SessionAffinityTable()

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane], now: float) -> Lane:
        """The lane that the session last used, or the least loaded one."""
        known = self.lanes(request.model).get(self._sessions.find(request))
        subset = len(lanes) < len(self.lanes(request.model))
        if known is None or (subset and known not in lanes):
            known = super().choose(request, lanes, now)
        else:
            request.choice = PlacementChoice("session", len(lanes))
        self._sessions.note(request, known.worker)
        return known

    def find_better_lane(self, request: QueuedRequest, lane: Lane, ahead: Mapping[str, int], now: float) -> Move | None:
        """A better lane as of LeastLoad. A session moves only if its lane is blocked, and with all later requests."""
        if request.session and not lane.is_blocked:
            return None
        better = super().find_better_lane(request, lane, ahead, now)
        if better is not None:
            self._sessions.note(request, better.lane.worker)
        return better

    def tables(self) -> dict[str, int]:
        """Number of sessions."""
        return {"sessions": len(self._sessions)}


@dataclass(slots=True)
class _Fastest:
    """The highest prefill speed that a model's workers reported in this window and the one before.

    So a single wrong measurement is forgotten soon.
    """

    began: float
    highest: float = 0.0
    before: float = 0.0

    @property
    def rate(self) -> float:
        return max(self.highest, self.before)

    def note(self, rate: float, now: float) -> None:
        """Notes a reported speed."""
        if now - self.began >= _FASTEST_WINDOW_S:
            self.before = self.highest if now - self.began < 2 * _FASTEST_WINDOW_S else 0.0
            self.began, self.highest = now, 0.0
        self.highest = max(self.highest, rate)


class PrefixAware(LeastLoad):
    """The lane that would finish the prompt first, given its load and its worker's prefix cache.

    Cache hits and load are compared in seconds (docs/explanation/architecture.md), so that a hot prefix spreads as soon
    as waiting for its owner takes longer than computing it again. Looks at up to 4 owners of the longest cached prefix,
    4 with the longest one in a memory tier, the session's lane, and the two least loaded lanes, whatever the size of
    the fleet. A worker that caches no prefixes is judged by its load alone.

    Args:
        capacity: most entries of a model's index.
    """

    def __init__(self, capacity: int = MAX_INDEX_ENTRIES) -> None:
        super().__init__()
        self._capacity = capacity
        self._indexes: dict[str, TieredIndex] = {}
        # The model of each worker whose cache is in an index, even while the worker is away.
        self._models: dict[str, str] = {}
        self._sessions = SessionAffinityTable()
        self._fastest: dict[str, _Fastest] = {}

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane], now: float) -> Lane:
        """The lane of least cost."""
        longest = self._longest(request, now)
        candidates = self._candidates(request, lanes, longest)
        hits = self._hits(request, candidates, longest, now)
        request.lookup = PrefixLookup(now, longest.depth, hits)
        costs = {name: self.cost_s(request, lane, hits[name], now) for name, lane in candidates.items()}
        best = candidates[min(costs, key=lambda name: costs[name])]
        hit = hits[best.worker]
        reason = "prefix" if hit else "session" if self._sessions.find(request) == best.worker else "load"
        self._sessions.note(request, best.worker)
        request.work = _work(request, hit)
        request.choice = PlacementChoice(
            reason, len(candidates), request.tokens - request.work if hit else 0, costs[best.worker][0]
        )
        return best

    def _candidates(self, request: QueuedRequest, lanes: Sequence[Lane], longest: LongestPrefix) -> dict[str, Lane]:
        """The lanes to compare: owners, the session's lane and the least loaded; or all of `lanes` if few."""
        order = self._orders[request.model]
        if len(lanes) == len(order.lanes):
            known, least = order.lanes, order.least(_NUM_LEAST)
        else:
            known = {lane.worker: lane for lane in lanes}
            least = order.least(_NUM_LEAST, lambda lane: lane.worker in known) if len(lanes) > _MAX_LOOKED_AT else []
            if not least:
                return known
        names = (*_some_owners(longest, request.key, known), self._sessions.find(request))
        candidates = {name: known[name] for name in names if name in known}
        candidates.update((lane.worker, lane) for lane in least)
        return candidates

    def tables(self) -> dict[str, int]:
        """Number of sessions, and of entries in the indexes of KV caches and of memory tiers."""
        indexes = self._indexes.values()
        pools, tiers = sum(len(each.pool) for each in indexes), sum(len(each.memory) for each in indexes)
        return {"sessions": len(self._sessions), "prefixes": pools, "tier_prefixes": tiers}

    def cost_s(self, request: QueuedRequest, lane: Lane, hit: float, now: float) -> tuple[float, int]:
        """Seconds to the end of the request's prefill in a lane, and the number of sequences it would run beside."""
        running = lane.load.report.decoding_seqs + lane.load.unseen_seqs + len(lane)
        return seconds_of_work(lane, _work(request, hit), self._speed(lane, now)), running

    def _seconds(self, lane: Lane) -> float:
        return seconds_of_work(lane, rate=self._speed(lane, lane.load.report.time))

    def _speed(self, lane: Lane, now: float) -> float:
        fastest = self._fastest.get(lane.model)
        return lane.load.speed(_ASSUMED_RATE if fastest is None else fastest.rate, now)

    def _refresh_lookup(self, request: QueuedRequest, lane: Lane, now: float) -> Mapping[str, float]:
        index, look, granules = self._indexes.get(request.model), request.lookup, request.granules
        if index is None:
            return {}
        # A granule in a memory tier may be behind a hole, so that only the next regular lookup can tell.
        is_deeper = look.depth < len(granules) and index.pool.knows(granules[look.depth], now)
        is_gone = look.depth > 0 and not index.knows(granules[look.depth - 1], now)
        if is_deeper or is_gone or now - look.time > _LOOK_S:
            longest = index.longest(granules, now)
            owners = _some_owners(longest, request.key, self.lanes(request.model))
            names = [*owners, *(other.worker for other in self.least(request, lane)), lane.worker]
            request.lookup = PrefixLookup(now, longest.depth, self._hits(request, names, longest, now))
        return request.lookup.hits

    def _note_speed(self, lane: Lane) -> None:
        """Notes a reported speed; the highest of a model is the prior for workers without a recent measurement."""
        report = lane.load.report
        if report.prefill_rate > 0:
            self._fastest.setdefault(lane.model, _Fastest(report.time)).note(report.prefill_rate, report.time)

    def load_changed(self, lane: Lane) -> None:
        """Updates the lane's load and speed."""
        self._note_speed(lane)
        super().load_changed(lane)

    def lane_down(self, lane: Lane) -> None:
        """Removes the lane, and its model with the last lane. The worker's cache stays known until `cache_gone`."""
        super().lane_down(lane)
        if lane.model not in self._orders:
            self._fastest.pop(lane.model, None)

    def _longest(self, request: QueuedRequest, now: float) -> LongestPrefix:
        """The prompt's longest cached prefixes, and the workers that hold them."""
        index = self._indexes.get(request.model)
        return LongestPrefix() if index is None else index.longest(request.granules, now)

    def _hits(
        self, request: QueuedRequest, workers: Iterable[str], longest: LongestPrefix, now: float
    ) -> dict[str, float]:
        """Number of the prompt's granules cached on each worker; those in its memory tier count by what they save."""
        hits = dict.fromkeys(workers, 0.0)
        if longest.depth:
            index, lanes = self._indexes[request.model], self.lanes(request.model)
            prefix = request.granules[: longest.depth]
            owners = longest.pool_owners if longest.pool_depth == longest.depth else ()
            for worker in hits:
                if worker in owners:
                    hits[worker] = longest.depth
                elif self._models.get(worker) == request.model and worker in lanes:
                    depth, below = index.depths(worker, prefix, now)
                    hits[worker] = depth + (below - depth) * (1 - self._read_share(lanes[worker], now))
        return hits

    def _read_share(self, lane: Lane, now: float) -> float:
        """Time to read a prefix from a worker's memory tier, as a share of the time to compute it."""
        rate = lane.load.report.memory_rate
        return min(1.0, self._speed(lane, now) / rate) if rate else _ASSUMED_READ_SHARE

    def lane_up(self, lane: Lane) -> None:
        """Adds the lane; its cache starts empty unless the worker returns with a known one."""
        self._note_speed(lane)
        super().lane_up(lane)
        if not lane.caches_prefixes:
            self.cache_gone(lane.worker)
        elif self._models.get(lane.worker) != lane.model:
            self.cache_gone(lane.worker)
            self._models[lane.worker] = lane.model
            if lane.model not in self._indexes:
                self._indexes[lane.model] = TieredIndex(self._capacity)
            self._indexes[lane.model].add_worker(lane.worker)

    def sent(self, request: QueuedRequest, lane: Lane, now: float) -> None:
        """Expects the prompt in the worker's cache."""
        if lane.worker in self._models:
            self._indexes[request.model].pool.expect(lane.worker, request.granules, now)

    def cache_changed(self, worker: str, change: CacheChange) -> None:
        """Applies the change to the indexes."""
        model = self._models.get(worker)
        if model is None:
            return
        index = self._indexes[model]
        if change.anew:
            index.add_worker(worker)
        index.pool.store(worker, change.stored)
        if change.evicted:
            index.pool.evict(worker, change.evicted)
        if change.memory_stored or change.memory_evicted:
            index.memory.store(worker, change.memory_stored)
            index.memory.evict(worker, change.memory_evicted)

    def cache_gone(self, worker: str) -> None:
        """Removes the worker from the index, and the index with its last worker."""
        model = self._models.pop(worker, None)
        if model is not None:
            self._indexes[model].remove_worker(worker)
            if not self._indexes[model].pool.workers:
                del self._indexes[model]


def _work(request: QueuedRequest, hit: float) -> int:
    """Tokens to compute on a worker with `hit` cached granules; at least the last token."""
    return max(request.tokens - int(hit * request.granule_tokens), 1)


def _among(lanes: Sequence[Lane]) -> Callable[[Lane], bool]:
    workers = {lane.worker for lane in lanes}
    return lambda lane: lane.worker in workers


def _may_serve(request: QueuedRequest, lane: Lane) -> bool:
    """True if a waiting request may move to a lane."""
    fits = lane.kind.suits(request)
    return fits and lane.worker != request.excluded_worker and not (lane.is_taken or lane.is_full)


def _some_owners(longest: LongestPrefix, turn: int, known: Mapping[str, Lane]) -> list[str]:
    """At most _MAX_OWNERS workers with the longest prefix in the KV cache, and as many with it in a memory tier."""
    tiers = longest.pool_owners, longest.memory_owners
    return [name for owners in tiers for name in _some([each for each in owners if each in known], turn)]


def _some(owners: list[str], turn: int) -> list[str]:
    """At most _MAX_OWNERS owners, starting at another one for each `turn`."""
    if len(owners) <= _MAX_OWNERS:
        return owners
    first = turn % len(owners)
    return [*owners[first:], *owners[:first]][:_MAX_OWNERS]


PLACEMENTS: Final[Mapping[str, Callable[[], Placement]]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoad,
    "session": SessionAffinity,
    "round_robin": RoundRobin,
}
"""Policies by the values of --placement."""
