"""The prefix index against dictionaries, LoadOrder against sorting, and the choices of each placement policy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.delay_gate import DelayGate
from common.limits import MAX_SESSIONS
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.lane import Lane
from router.scheduling.placement import (
    PLACEMENTS,
    CacheChange,
    LeastLoad,
    LoadOrder,
    Placement,
    PrefixAware,
    SessionAffinity,
    seconds_of_work,
)
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import chain, make_dispatcher, make_lane

GRANULE = 128


def lane(worker: str, model: str = "m", **load: float) -> Lane:
    return make_lane(worker, model, LoadReport(0.0, room_tokens=10_000, room_seqs=100, **load))  # type: ignore[arg-type]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 10, 20, 30, None])), max_size=150))
def test_load_order_equals_sorting(events: list[tuple[int, int | None]]) -> None:
    order, lanes = LoadOrder(), [lane(f"w{i}") for i in range(6)]
    up: dict[str, Lane] = {}
    for number, tokens in events:
        changed = lanes[number]
        if tokens is None:
            order.remove(changed)
            up.pop(changed.worker, None)
        else:
            changed.load.take(LoadReport(0.0, waiting_tokens=tokens, prefill_rate=100.0, room_seqs=9))
            order.update(changed)
            up[changed.worker] = changed
        expected = sorted(seconds_of_work(lane) for lane in up.values())[:2]
        least = order.least(2)
        assert [seconds_of_work(lane) for lane in least] == expected
        assert len({lane.worker for lane in least}) == len(expected)
    assert len(order._heap) <= 2 * 6 + 65


def request(key: int, prompt: list[int] | None = None, session: str = "", tokens: int | None = None) -> QueuedRequest:
    granules = prompt or []
    size = GRANULE * len(granules) + 10 if tokens is None else tokens
    return QueuedRequest(key, "m", size, 0.0, session=session, granules=granules, granule_tokens=GRANULE)


def fleet(policy: Placement, *workers: str, rate: float = 10_000.0) -> Dispatcher:
    d = make_dispatcher(DelayGate(0.0), policy)
    for worker in workers:
        d.lane_up(worker, "m", LoadReport(0.0, 0, 0, 0, 100_000, 100, prefill_rate=rate), 0.0)
    return d


def send(d: Dispatcher, new: QueuedRequest) -> str:
    d.arrive(new, 0.0)
    (release,) = d.decide(0.0)
    return release.worker


def done(d: Dispatcher, *workers: str) -> None:
    for worker in workers:
        load = LoadReport(0.0, 0, 0, 0, 100_000, 100, prefill_rate=10_000.0, submit_seen=10**6)
        d.report(worker, load)


def test_equal_prefixes_go_to_owner_and_others_spread() -> None:
    d = fleet(PrefixAware(), "a", "b", "c")
    prompts = [chain(i, *range(20)) for i in range(3)]
    owners = []
    for key, prompt in enumerate(prompts):
        owners.append(send(d, request(key, prompt)))
        done(d, "a", "b", "c")
    assert sorted(owners) == ["a", "b", "c"]
    for key in range(3, 30):
        assert send(d, request(key, [*prompts[key % 3], key])) == owners[key % 3]
        done(d, "a", "b", "c")


def test_hot_prefix_spreads_when_waiting_costs_more() -> None:
    d = fleet(PrefixAware(), "a", "b", "c", "d")
    hot = chain(*range(20))
    owner = send(d, request(0, hot))
    done(d, owner)
    # Of 3 060 tokens the owner computes 500.
    workers = [send(d, request(key, hot, tokens=20 * GRANULE + 500)) for key in range(1, 41)]
    assert set(workers) == {"a", "b", "c", "d"}
    loads = [lane.outstanding_tokens for lane in d.lanes]
    assert sum(loads) == 37 * 500 + 3 * 3060
    assert workers[:4] == [owner] * 4
    assert max(loads) < 2 * min(loads)


def speeds(time: float, rate: float, samples: int, seen: int = 0) -> LoadReport:
    return LoadReport(time, 0, 0, 0, 100_000, 1000, prefill_rate=rate, prefill_samples=samples, submit_seen=seen)


def test_placement_is_proportional_to_speed_and_retries_slow_workers() -> None:
    d = make_dispatcher(DelayGate(0.0), PrefixAware())
    for worker, rate in (("a", 10_000.0), ("b", 10_000.0), ("c", 2_500.0)):
        d.lane_up(worker, "m", speeds(0.0, rate, 5), 0.0)
    workers = [send(d, request(key, tokens=500)) for key in range(90)]
    assert workers.count("c") == pytest.approx(10, abs=2)
    assert workers.count("a") == pytest.approx(40, abs=2)
    for worker, rate in (("a", 10_000.0), ("b", 10_000.0), ("c", 2_500.0)):
        d.report(worker, speeds(60.0, rate, 6 if worker < "c" else 5, seen=10**6))
    later = []
    for key in range(100, 130):
        d.arrive(request(key, tokens=500), 60.0)
        later += [release.worker for release in d.decide(60.0)]
    assert later.count("c") == pytest.approx(10, abs=1)


def test_unmeasured_worker_counts_as_fastest() -> None:
    d = make_dispatcher(DelayGate(0.0), PrefixAware())
    d.lane_up("a", "m", speeds(0.0, 50_000.0, 5), 0.0)
    d.lane_up("b", "m", speeds(0.0, 0.0, 0), 0.0)
    assert [send(d, request(key, tokens=500)) for key in range(10)].count("b") == 5


def test_wrong_speed_measurement_is_forgotten() -> None:
    """Regression: the highest speed ever measured applied to all workers without a recent measurement."""
    policy = PrefixAware()
    d = make_dispatcher(DelayGate(0.0), policy)
    d.lane_up("a", "m", speeds(0.0, 5_000_000.0, 1), 0.0)
    d.lane_up("b", "m", speeds(0.0, 0.0, 0), 0.0)
    unknown = d.lanes["b"]
    assert policy._speed(unknown, 0.0) == 5_000_000
    for second in range(1, 100):
        d.report("a", speeds(float(second), 50_000.0, 1 + second))
    assert policy._speed(unknown, 100.0) == 50_000


def waiting_fleet(policy: Placement, loads: dict[str, int]) -> Dispatcher:
    """Workers without room, each with `loads` tokens before a new request."""
    d = make_dispatcher(DelayGate(0.0), policy)
    for worker, tokens in loads.items():
        d.lane_up(worker, "m", busy(tokens), 0.0)
    return d


def busy(tokens: int, time: float = 0.0) -> LoadReport:
    return LoadReport(time, 4, 1, tokens, 0, 100, prefill_rate=10_000.0, prefill_samples=1)


def bound(d: Dispatcher) -> dict[int, str]:
    return {request.key: lane.worker for lane in d.lanes for request in lane}


@pytest.mark.parametrize("policy", [PrefixAware, LeastLoad])
def test_waiting_requests_move_to_clearly_faster_lane(policy: type[LeastLoad]) -> None:
    d = waiting_fleet(policy(), {"a": 0, "b": 9000})
    for key in range(4):
        d.arrive(request(key, tokens=1000), 0.0)
    assert set(bound(d).values()) == {"a"}
    d.report("b", busy(3990, 0.1))
    assert d.decide(0.1) == []
    assert set(bound(d).values()) == {"a"}, "no gain of 10 %"
    d.report("b", busy(0, 1.0))
    assert d.decide(1.0) == []
    assert sorted(bound(d).values()) == ["a", "a", "b", "b"]
    for _ in range(3):
        before = bound(d)
        assert d.decide(2.0 + _) == []
        assert bound(d) == before, "to and fro"


def test_waiting_request_follows_its_prefix() -> None:
    d = waiting_fleet(PrefixAware(), {"a": 0, "b": 1000, "c": 20_000})
    hot = chain(*range(40))
    d.arrive(request(1, hot), 0.0)
    assert bound(d) == {1: "a"}
    d.assignment.placement.cache_changed("b", CacheChange(stored=hot))
    d.assignment.placement.cache_changed("c", CacheChange(stored=hot))
    assert d.decide(0.1) == []
    assert bound(d) == {1: "b"}
    assert next(iter(d.lanes["b"])).work == 10
    d.assignment.placement.cache_changed("b", CacheChange(evicted=hot))
    assert d.decide(2.0) == []
    assert bound(d) == {1: "a"}
    assert next(iter(d.lanes["a"])).work == 40 * GRANULE + 10


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.0, 5_000.0, 20_000.0, 400_000.0])),
        min_size=1,
        max_size=5,
    )
)
def test_prompt_goes_where_cache_and_memory_tier_leave_least_work(caches: list[tuple[int, int, float]]) -> None:
    """Brute force over the workers with the longest prefix in a KV cache and in a memory tier."""
    policy, prompt = PrefixAware(), chain(*range(9))
    d, work = make_dispatcher(DelayGate(0.0), policy), dict[str, int]()
    for number, (depth, below, rate) in enumerate(caches):
        worker = f"w{number}"
        d.lane_up(worker, "m", LoadReport(0.0, 0, 0, 0, 10**5, 100, prefill_rate=10_000.0, memory_rate=rate), 0.0)
        policy.cache_changed(worker, CacheChange(stored=prompt[:depth], memory_stored=prompt[:below]))
        share = min(1.0, 10_000 / rate) if rate else 0.5
        work[worker] = 9 * GRANULE + 10 - int((depth + max(0, below - depth) * (1 - share)) * GRANULE)
    owners = [
        f"w{number}"
        for place in (0, 1)
        for number, cache in enumerate(caches)
        if cache[place] == max(each[place] for each in caches)
    ]
    new = request(1, prompt)
    chosen = send(d, new)
    assert new.work == work[chosen] <= min(work[owner] for owner in [*owners[:4], chosen])
    policy.cache_changed(chosen, CacheChange(memory_evicted=prompt))
    depth = max((depth for depth, *_ in caches), default=0)
    assert policy._indexes["m"].longest(prompt, 10.0).pool_depth == depth


def test_waiting_request_follows_its_prefix_into_a_memory_tier() -> None:
    d = waiting_fleet(PrefixAware(), {"a": 0, "b": 1000})
    hot = chain(*range(40))
    d.arrive(request(1, hot), 0.0)
    assert bound(d) == {1: "a"}
    d.assignment.placement.cache_changed("b", CacheChange(stored=hot, memory_stored=hot))
    d.decide(0.1)
    assert bound(d) == {1: "b"}
    # The KV cache evicts it: it still takes half of the work there.
    d.assignment.placement.cache_changed("b", CacheChange(evicted=hot))
    d.decide(2.0)
    assert bound(d) == {1: "b"}
    assert next(iter(d.lanes["b"])).work == 20 * GRANULE + 10
    d.assignment.placement.cache_changed("b", CacheChange(memory_evicted=hot))
    d.decide(4.0)
    assert bound(d) == {1: "a"}


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=5),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 20), st.integers(0, 20)), max_size=12),
)
def test_waiting_requests_come_to_rest_between_memory_tiers(
    loads: list[int], sizes: list[int], caches: list[tuple[int, int, int, int]]
) -> None:
    """While nothing changes, no request moves twice between two workers."""
    names = [f"w{i}" for i in range(len(loads))]
    d = waiting_fleet(PrefixAware(), dict(zip(names, [100 * load for load in loads], strict=True)))
    prompts = {key: chain(key, *range(size - 1)) for key, size in enumerate(sizes)}
    for key, prompt in prompts.items():
        d.arrive(request(key, prompt), 0.0)
    for number, key, depth, below in caches:
        if number < len(names) and key in prompts:
            change = CacheChange(stored=prompts[key][:depth], memory_stored=prompts[key][:below])
            d.assignment.placement.cache_changed(names[number], change)
    been = {key: [worker] for key, worker in bound(d).items()}
    for pass_number in range(1, 12):
        assert d.decide(2.0 * pass_number) == []
        for key, worker in bound(d).items():
            if been[key][-1] != worker:
                assert worker not in been[key]
                been[key].append(worker)


def test_moved_request_keeps_place_and_class() -> None:
    d = waiting_fleet(LeastLoad(), {"a": 0, "b": 50_000})
    for key in range(6):
        d.arrive(request(key, tokens=1000), 0.0)
    d.report("a", busy(30_000, 0.5))
    d.report("b", busy(30_000, 0.5))
    d.arrive(request(9, tokens=1000), 0.5)
    d.decide(0.5)
    d.report("a", LoadReport(1.0, 1, 0, 0, 10**6, 100, prefill_rate=10_000.0))
    d.report("b", LoadReport(1.0, 1, 0, 0, 10**6, 100, prefill_rate=10_000.0))
    for release in d.decide(1.0):
        assert [r.key for r in release.requests] == sorted(r.key for r in release.requests)

    d = waiting_fleet(LeastLoad(), {"a": 50_000, "b": 50_000})
    given_back, fixed = request(1, tokens=1000), request(2, tokens=1000)
    fixed.numerics = "x"
    d.requeue(given_back, 0.0, excluded_worker="a")
    d.lane_up("c", "m", busy(60_000), 0.0, "x")
    d.arrive(fixed, 0.0)
    assert bound(d) == {1: "b", 2: "c"}
    d.report("a", busy(0, 1.0))
    d.decide(1.0)
    assert bound(d) == {1: "b", 2: "c"}


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=5),
    st.lists(st.integers(1, 20), min_size=1, max_size=12),
    st.lists(st.integers(0, 30), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=5),
)
def test_no_request_could_gain_after_rebinding(
    loads: list[int], sizes: list[int], then: list[int], caches: list[tuple[int, int]]
) -> None:
    """Brute force over each request and all workers, which are few enough to be candidates."""
    names = [f"w{i}" for i in range(len(loads))]
    d = waiting_fleet(PrefixAware(), dict(zip(names, [100 * load for load in loads], strict=True)))
    prompts = {key: chain(key, *range(size - 1)) for key, size in enumerate(sizes)}
    for key, prompt in prompts.items():
        d.arrive(request(key, prompt), 0.0)
    holds: dict[tuple[str, int], int] = {}
    for worker, key in caches[:2]:
        if worker < len(names) and key in prompts:
            d.assignment.placement.cache_changed(names[worker], CacheChange(stored=prompts[key]))
            holds[names[worker], key] = len(prompts[key])
    now = {name: 100 * tokens for name, tokens in zip(names, then, strict=False)}
    for name, tokens in now.items():
        d.report(name, busy(tokens, 0.5))
    d.decide(0.5)
    where, ahead = bound(d), dict.fromkeys(names, 0)
    for key, prompt in prompts.items():
        costs = {
            name: (now[name] + ahead[name] + len(prompt) * GRANULE + 10 - holds.get((name, key), 0) * GRANULE) / 10_000
            for name in names
        }
        here = costs[where[key]]
        candidates = [*sorted(names, key=lambda name: now[name])[: len(names) if len(names) <= 2 else 0]]
        candidates += [name for name in names if (name, key) in holds]
        for name in candidates:
            assert costs[name] >= here - max(0.005, 0.1 * here) - 1e-9
        ahead[where[key]] += len(prompt) * GRANULE + 10 - holds.get((where[key], key), 0) * GRANULE


def test_restarted_worker_has_empty_prefix_index() -> None:
    d = fleet(PrefixAware(), "a", "b")
    hot = chain(*range(20))
    owner = send(d, request(0, hot))
    other = "b" if owner == "a" else "a"
    done(d, owner)
    d.lane_down(owner, 1.0)
    assert send(d, request(1, hot)) == other
    done(d, other)
    d.assignment.placement.cache_gone(owner)
    d.lane_up(owner, "m", LoadReport(0.0, 0, 0, 0, 100_000, 100, prefill_rate=10_000.0), 1.0)
    assert send(d, request(2, hot)) == other


def test_reported_cache_overrides_routing_and_survives_break() -> None:
    d = fleet(PrefixAware(), "a", "b", "c")
    hot = chain(*range(20))
    for owner in "abc":
        d.assignment.placement.cache_changed(owner, CacheChange(stored=hot[:10]))
        assert send(d, request(ord(owner), [*hot, ord(owner)])) == owner
        done(d, owner)
        d.assignment.placement.cache_changed(owner, CacheChange(evicted=hot[:10]))
        d.assignment.placement.cache_changed(owner, CacheChange(anew=True))
    d.assignment.placement.cache_changed("b", CacheChange(stored=hot))
    d.lane_down("b", 0.0)
    d.assignment.placement.cache_changed("b", CacheChange(stored=chain(7)))
    d.lane_up("b", "m", LoadReport(0.0, 0, 0, 0, 100_000, 100, prefill_rate=10_000.0), 0.0)
    assert send(d, request(4, hot)) == "b"
    done(d, "b")
    assert send(d, request(5, chain(7), tokens=GRANULE + 10)) == "b"
    d.assignment.placement.cache_changed("nobody", CacheChange(stored=hot))


def test_worker_without_prefix_cache_is_placed_by_load() -> None:
    policy = PrefixAware()
    d = make_dispatcher(DelayGate(0.0), policy)
    report = LoadReport(0.0, 0, 0, 0, 100_000, 100, prefill_rate=10_000.0)
    for worker in "ab":
        d.lane_up(worker, "m", report, 0.0, caches_prefixes=False)
    hot = chain(*range(20))
    assert {send(d, request(key, hot)) for key in range(6)} == {"a", "b"}
    assert not policy._indexes
    d.lane_up("c", "m", report, 0.0)
    d.lane_down("c", 0.0)
    assert policy._indexes["m"].pool.workers == ["c"]
    d.lane_up("c", "m", report, 0.0, caches_prefixes=False)
    assert not policy._indexes


def test_each_model_has_own_prefix_index() -> None:
    policy = PrefixAware()
    d = fleet(policy, "a", "b")
    d.lane_up("x", "other", LoadReport(0.0, 0, 0, 0, 100_000, 100), 0.0)
    hot = chain(*range(20))
    assert send(d, QueuedRequest(0, "other", 3000, 0.0, granules=hot, granule_tokens=GRANULE)) == "x"
    assert send(d, request(1, hot)) in "ab"
    d.lane_down("x", 0.0)
    d.assignment.placement.cache_gone("x")
    assert set(policy._indexes) == {"m"}


def test_sessions_keep_worker_and_are_bounded() -> None:
    policy = SessionAffinity()
    d = fleet(policy, "a", "b", "c")
    homes = {f"s{i}": send(d, request(i, session=f"s{i}")) for i in range(9)}
    assert len(set(homes.values())) == 3
    for i in range(9, 36):
        assert send(d, request(i, session=f"s{i % 9}")) == homes[f"s{i % 9}"]
    d.lane_down(homes["s0"], 0.0)
    assert (moved := send(d, request(50, session="s0"))) != homes["s0"]
    assert send(d, request(51, session="s0")) == moved
    for i in range(MAX_SESSIONS + 10):
        policy._sessions.note(request(0, session=f"t{i}"), "a")
    assert len(policy._sessions) == MAX_SESSIONS


def test_least_loaded_counts_at_selection() -> None:
    d = fleet(LeastLoad(), "a", "b", "c")
    big = send(d, request(0, tokens=10_000))
    workers = [send(d, request(key, tokens=100)) for key in range(1, 9)]
    assert big not in workers
    assert workers.count("a") + workers.count("b") + workers.count("c") == 8
    assert sorted(workers.count(w) for w in "abc") == [0, 4, 4]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_policy_keeps_to_the_numerics_class_and_survives_coming_and_going(name: str) -> None:
    rnd = random.Random(name)
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS[name]())
    classes = {f"w{i}": "xy"[i % 2] for i in range(6)}
    up: set[str] = set()
    for key in range(400):
        worker = rnd.choice(list(classes))
        if rnd.random() < 0.1:
            if worker in up:
                up.discard(worker)
                d.lane_down(worker, 0.0)
            else:
                up.add(worker)
                d.lane_up(worker, "m", LoadReport(0.0, room_tokens=10**6, room_seqs=1000), 0.0, classes[worker])
        new = request(key, chain(*[rnd.randrange(2) for _ in range(5)]), session=rnd.choice(["", "s", "t"]))
        new.numerics = rnd.choice([None, None, "x", "y"])
        d.arrive(new, 0.0)
        for release in d.decide(0.0):
            assert release.worker in up
            assert all(r.numerics in (None, classes[release.worker]) for r in release.requests)
        if rnd.random() < 0.3 and up:
            d.report(rnd.choice(sorted(up)), LoadReport(0.0, 2, 0, rnd.randrange(99), 10**6, 1000, submit_seen=key))


class Counting(PrefixAware):
    """Counts the lanes that it compares."""

    looks = 0

    def cost_s(self, request: QueuedRequest, lane: Lane, hit: float, now: float) -> tuple[float, int]:
        self.looks += 1
        return super().cost_s(request, lane, hit, now)


def test_decision_looks_at_seven_lanes_at_most() -> None:
    policy = Counting()
    d = fleet(policy, *(f"w{i}" for i in range(300)))
    hot = chain(*range(20))
    for key in range(100):
        policy.looks = 0
        send(d, request(key, [*hot[: key % 20], *chain(key, 1)], session="s"))
        assert 1 <= policy.looks <= 7
    assert len(d.lanes.busy) == 0


def test_placement_says_why_it_chose_a_worker() -> None:
    d = fleet(PrefixAware(), "a", "b", "c")
    prompt = chain(*range(20))
    first, again = request(1, prompt), request(2, prompt)
    for asked in (first, again):
        send(d, asked)
        done(d, "a", "b", "c")
    assert first.choice is not None
    assert first.choice[:3] == ("load", 2, 0)
    assert again.choice is not None
    assert (again.choice.reason, again.choice.cached_tokens) == ("prefix", 20 * GRANULE)
    assert again.choice.estimate_s == pytest.approx(10 / 10_000)


def test_moved_request_says_so() -> None:
    d = waiting_fleet(LeastLoad(), {"a": 0, "b": 9000})
    requests = [request(key, tokens=1000) for key in range(4)]
    for asked in requests:
        d.arrive(asked, 0.0)
    d.report("b", busy(0, 1.0))
    d.decide(1.0)
    found = {asked.choice.reason for asked in requests if asked.choice is not None and bound(d)[asked.key] == "b"}
    assert found == {"moved"}


@pytest.mark.parametrize(
    ("name", "reason"), [("round_robin", "turn"), ("least_loaded", "load"), ("session", "session")]
)
def test_each_policy_names_its_reason(name: str, reason: str) -> None:
    d = fleet(PLACEMENTS[name](), "w0", "w1")
    for key in range(2):
        asked = request(key, session="s")
        send(d, asked)
    assert asked.choice is not None
    assert asked.choice[:2] == (reason, 2)
