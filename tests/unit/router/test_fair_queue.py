"""The order of service against a reference that looks at everything, fairness of tenants, and the queue's speed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import HopelessDeadlineError, QueueFullError, TenantLimitError
from common.limits import MAX_TENANTS, PROMOTE_AFTER_S, PROMOTED_SHARE
from router.earliest import Earliest
from router.fair_queue import CLASSES, HIGH, LOW, NORMAL, FairQueue, QueuedRequest, TenantShares
from router.lane import Lane, LoadReport
from router.queue import QUEUE_RETRY_S, QueueSpeed, RequestQueue
from router.tenants import TenantLimits, TenantPolicy, tenant_of

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def request(key: int, tenant: str = "", tokens: int = 10, priority: int = NORMAL, **fields: float) -> QueuedRequest:
    return QueuedRequest(
        key,
        "m",
        tokens,
        float(key),
        tenant=tenant,
        priority=priority,
        work=tokens,
        **fields,  # type: ignore[arg-type]
    )


class Reference:
    """All requests in one list; what goes next is found by looking at each."""

    def __init__(self) -> None:
        self.waiting: list[QueuedRequest] = []
        self.lanes: dict[int, int] = {}
        self.had: dict[tuple[int, str], float] = {}
        self.time = dict.fromkeys(CLASSES, 0.0)

    def enter(self, new: QueuedRequest, lane: int, *, front: bool) -> None:
        account = (new.priority, new.tenant)
        if not any((r.priority, r.tenant) == account for r in self.waiting):
            self.had[account] = max(self.had.get(account, 0.0), self.time[new.priority])
        self.lanes[new.key] = lane
        self.waiting.insert(0 if front else len(self.waiting), new)

    def leave(self, gone: QueuedRequest) -> None:
        self.waiting.remove(gone)
        if not any(r.priority == gone.priority for r in self.waiting):
            self.time[gone.priority] = 0.0
            self.had = {account: had for account, had in self.had.items() if account[0] != gone.priority}

    def next(self, lane: int) -> QueuedRequest | None:
        here = [r for r in self.waiting if self.lanes[r.key] == lane]
        for priority in (HIGH, NORMAL, LOW):
            own = [r for r in here if r.priority == priority]
            ahead = [r for r in own if r.ahead]
            if ahead:
                return ahead[0]
            heads = {r.tenant: r for r in reversed(own)}
            if heads:
                return min(heads.values(), key=lambda r: (self.had[(priority, r.tenant)], r.key))
        return None

    def serve(self, served: QueuedRequest) -> None:
        account = (served.priority, served.tenant)
        if not served.ahead:
            self.time[served.priority] = max(self.time[served.priority], self.had[account])
            self.had[account] += served.tokens / WEIGHTS.get(served.tenant, 1.0)
        self.leave(served)


class FairQueueMachine(RuleBasedStateMachine):
    """Two lanes over one queue, as the dispatcher uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = TenantShares(WEIGHTS)
        self.queue = RequestQueue(1000, self.shares)
        self.lanes = [FairQueue(self.shares), FairQueue(self.shares)]
        self.reference = Reference()
        self.key = 0
        self.served: list[QueuedRequest] = []

    @rule(
        lane=st.integers(0, 1),
        tenant=st.sampled_from(["a", "b", "c", "d"]),
        tokens=st.integers(1, 30),
        priority=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]),
        deadline=st.none() | st.floats(0, 100),
    )
    def arrive(self, lane: int, tenant: str, tokens: int, priority: int, deadline: float | None) -> None:
        self.key += 1
        new = QueuedRequest(self.key, "m", tokens, self.key, deadline, tenant=tenant, priority=priority)
        self.queue.push(new)
        self.lanes[lane].push(new)
        self.reference.enter(new, lane, front=False)

    @precondition(lambda self: self.served)
    @rule(lane=st.integers(0, 1), data=st.data())
    def come_back(self, lane: int, data: st.DataObject) -> None:
        back = self.served.pop(data.draw(st.integers(0, len(self.served) - 1)))
        self.queue.push_front(back)
        self.lanes[lane].push(back, first=True)
        self.reference.enter(back, lane, front=True)

    @rule(lane=st.integers(0, 1))
    def serve(self, lane: int) -> None:
        expected = self.reference.next(lane)
        assert self.lanes[lane].head(0.0) is expected
        if expected is not None:
            assert self.lanes[lane].pop(0.0) is expected
            self.queue.remove(expected.key)
            self.reference.serve(expected)
            self.served.append(expected)

    @precondition(lambda self: self.reference.waiting)
    @rule(data=st.data(), move=st.booleans())
    def cancel_or_move(self, data: st.DataObject, move: bool) -> None:
        gone = self.reference.waiting[data.draw(st.integers(0, len(self.reference.waiting) - 1))]
        lane = self.reference.lanes[gone.key]
        others = [r for r in self.reference.waiting if self.reference.lanes[r.key] != lane]
        self.lanes[lane].remove(gone)
        # In the other lane it would go behind those that came later: moved only where that can not be seen.
        if move and not any(r.tenant == gone.tenant or r.ahead for r in others):
            self.lanes[1 - lane].push(gone)
            self.reference.lanes[gone.key] = 1 - lane
            return
        self.queue.remove(gone.key)
        self.reference.leave(gone)

    @invariant()
    def agrees(self) -> None:
        for i, lane in enumerate(self.lanes):
            here = [r for r in self.reference.waiting if self.reference.lanes[r.key] == i]
            assert {r.key for r in lane} == {r.key for r in here}
            assert (len(lane), lane.tokens) == (len(here), sum(r.tokens for r in here))
            assert lane.oldest_arrival() == min((r.arrival for r in here), default=None)
            assert lane.earliest_deadline() == min((r.deadline for r in here if r.deadline is not None), default=None)
            assert all(lane.has(p) == any(r.priority == p for r in here) for p in CLASSES)
        deadlines = [r.deadline for r in self.reference.waiting if r.deadline is not None]
        assert self.queue.next_deadline() == min(deadlines, default=None)
        for priority in CLASSES:
            assert self.shares.waiting(priority) == sum(r.priority == priority for r in self.reference.waiting)


FairQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestFairQueueMachine = FairQueueMachine.TestCase


@settings(max_examples=50)
@given(
    tokens=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), min_size=2, max_size=60),
    weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
)
def test_neither_of_two_that_wait_gets_ahead_by_more_than_a_request(
    tokens: list[tuple[str, int]], weights: tuple[float, float]
) -> None:
    shares = TenantShares(weight := dict(zip("ab", weights, strict=True)))
    queue, lane = RequestQueue(100, shares), FairQueue(shares)
    waiting = {"a": 0, "b": 0}
    for key, (tenant, size) in enumerate(tokens):
        queue.push(new := request(key, tenant, size))
        lane.push(new)
        waiting[tenant] += 1
    most = sum(max((size for t, size in tokens if t == tenant), default=0) / weight[tenant] for tenant in "ab")
    had = {"a": 0.0, "b": 0.0}
    while all(waiting.values()):
        served = lane.pop(0.0)
        queue.remove(served.key)
        waiting[served.tenant] -= 1
        had[served.tenant] += served.tokens / weight[served.tenant]
        assert abs(had["a"] - had["b"]) <= most * (1 + 1e-9)


def test_a_flood_does_not_hold_up_the_others() -> None:
    shares = TenantShares()
    queue, lane = RequestQueue(10_000, shares), FairQueue(shares)
    for key in range(1000):
        queue.push(new := request(key, "flood"))
        lane.push(new)
    for _ in range(5):
        queue.remove(lane.pop(0.0).key)
    queue.push(late := request(5000, "late"))
    lane.push(late)
    assert lane.work_before(request(5001, "late")) == 10 + 20
    served = [lane.pop(0.0).key for _ in range(2)]
    assert late.key in served


def test_a_higher_class_goes_first_and_its_queue_is_its_own() -> None:
    queue = RequestQueue(1)
    queue.check_room(LOW, 0.0)
    queue.push(request(1, priority=LOW))
    with pytest.raises(QueueFullError, match="1 requests of priority low"):
        queue.check_room(LOW, 0.0)
    queue.check_room(HIGH, 0.0)


@settings(max_examples=60)
@given(
    low=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    high=st.lists(st.integers(1, 40), min_size=1, max_size=200),
    age=st.sampled_from([0.0, PROMOTE_AFTER_S, PROMOTE_AFTER_S + 1]),
)
def test_a_class_that_waits_too_long_gets_its_share_and_no_more(low: list[int], high: list[int], age: float) -> None:
    shares = TenantShares()
    queue, lane = RequestQueue(1000, shares), FairQueue(shares)
    for key, (tokens, priority) in enumerate([*((t, LOW) for t in low), *((t, HIGH) for t in high)]):
        queue.push(new := QueuedRequest(key, "m", tokens, 0.0, priority=priority, work=tokens))
        lane.push(new)
    had = {LOW: 0, HIGH: 0}
    first_low = None
    for turn in range(len(low) + len(high)):
        if not (lane.has(LOW) and lane.has(HIGH)):
            break
        served = lane.pop(age)
        queue.remove(served.key)
        had[served.priority] += served.tokens
        first_low = turn if served.priority == LOW and first_low is None else first_low
        if age > PROMOTE_AFTER_S:
            # Within one request of each, the last of which the debt is not yet paid for, or paid too much.
            owed = PROMOTED_SHARE / (1 - PROMOTED_SHARE) * had[HIGH]
            assert owed - 40 <= had[LOW] <= owed + 40
    assert first_low == (0 if age > PROMOTE_AFTER_S else None)


def test_the_class_that_has_waited_longest_is_promoted_first() -> None:
    shares = TenantShares()
    queue, lane = RequestQueue(100, shares), FairQueue(shares)
    for key, priority, arrival in ((1, LOW, 1.0), (2, NORMAL, 0.0), (3, HIGH, 0.0), (4, HIGH, 9.0)):
        queue.push(new := QueuedRequest(key, "m", 10, arrival, priority=priority, work=10))
        lane.push(new)
    order = []
    while lane:
        order.append(lane.pop(20.0).key)
        queue.remove(order[-1])
    assert order == [2, 3, 4, 1]


def test_a_low_request_is_not_hopeless_behind_a_queue_that_it_will_pass() -> None:
    shares = TenantShares()
    lane = Lane("w", "m", LoadReport(0.0, decoding_seqs=1, prefill_rate=100.0), shares=shares)
    for key in range(100):
        shares.enter(new := request(key, tokens=100, priority=HIGH))
        lane.bind(new)
    assert lane.seconds_to_serve(request(200, tokens=100, priority=HIGH)) == 101.0
    assert lane.seconds_to_serve(request(200, tokens=100, priority=LOW)) == PROMOTE_AFTER_S + 1 / PROMOTED_SHARE


def test_tenants_that_wait_for_nothing_are_forgotten() -> None:
    shares = TenantShares()
    queue, lane = RequestQueue(10**6, shares), FairQueue(shares)
    queue.push(request(-1, "stays"))
    for key in range(3 * MAX_TENANTS):
        queue.push(new := request(key, f"t{key}"))
        lane.push(new)
        queue.remove(lane.pop(0.0).key)
    assert len(shares._classes[NORMAL].tenants) <= MAX_TENANTS + 1
    queue.remove(-1)
    assert not shares._classes[NORMAL].tenants


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_keeps_no_more_than_what_waits(seed: int) -> None:
    rnd = random.Random(seed)
    shares = TenantShares()
    queue, lane = RequestQueue(10**6, shares), FairQueue(shares)
    for key in range(5000):
        queue.push(new := request(key, rnd.choice("abc"), deadline=rnd.random()))
        lane.push(new)
        if len(lane) > 20:
            queue.remove(lane.pop(0.0).key)
    assert len(lane._classes[NORMAL]._heap) < 200
    assert sum(map(len, lane._arrivals.values())) + len(lane._deadlines) < 400


@settings(max_examples=60)
@given(st.lists(st.integers(0, 8), max_size=200))
def test_earliest_is_the_least_of_those_alive(events: list[int]) -> None:
    alive: dict[int, float] = {}
    earliest = Earliest(alive)
    for key in events:
        if alive.pop(key, None) is None:
            alive[key] = float(key * 7 % 5)
            earliest.add(alive[key], key)
        assert earliest.top() == min(((v, k) for k, v in alive.items()), default=None)


def test_refused_clients_are_told_to_come_back_as_fast_as_the_queue_moves() -> None:
    speed = QueueSpeed()
    assert speed.retry_after_s(0.0) == QUEUE_RETRY_S
    for i in range(1000):
        speed.departed(1, i / 20)
    assert speed.rate(50.0) == pytest.approx(20, rel=0.05)
    waits = [speed.retry_after_s(50.0) for _ in range(20)]
    assert waits == pytest.approx([max(i / 20, 0.05) for i in range(1, 21)], rel=0.06)
    assert max(speed.retry_after_s(50.0) for _ in range(10_000)) == 30.0
    assert speed.rate(70.0) < 0.5


def test_the_speed_is_right_from_the_first_second() -> None:
    speed = QueueSpeed()
    for i in range(21):
        speed.departed(1, 100 + i / 20)
    assert speed.rate(101.0) == pytest.approx(20, rel=0.15)


def test_a_request_is_hopeless_only_behind_others() -> None:
    shares = TenantShares()
    lane = Lane("w", "m", LoadReport(0.0, prefill_rate=100.0), shares=shares)
    assert lane.seconds_to_serve(request(1, tokens=1000)) == 0.0
    lane.take_report(LoadReport(0.0, waiting_tokens=50, prefill_rate=100.0))
    assert lane.seconds_to_serve(request(1, tokens=1000)) == 10.5
    lane.take_report(LoadReport(0.0, waiting_tokens=50))
    assert lane.seconds_to_serve(request(1, tokens=1000)) == 0.0
    assert HopelessDeadlineError(10.5, 2.0, 8.5).retry_after_s == 8.5


def test_a_tenants_requests_in_flight_are_limited() -> None:
    limits = TenantLimits(TenantPolicy(concurrency=2, concurrency_of={"vip": 0, "one": 1}))
    limits.claim("a")
    limits.claim("a")
    with pytest.raises(TenantLimitError) as caught:
        limits.claim("a")
    assert caught.value.retry_after_s == 1.0
    limits.claim("b")
    limits.claim("one")
    with pytest.raises(TenantLimitError):
        limits.claim("one")
    for _ in range(10):
        limits.claim("vip")
    limits.release("a", took_s=8.0)
    limits.claim("a")
    with pytest.raises(TenantLimitError) as caught:
        limits.claim("a")
    assert caught.value.retry_after_s == 4.0
    limits.release("one", 1.0)
    limits.claim("one")
    limits.release("one", 1.0)
    assert len(limits) == 3


def test_the_tenant_is_in_the_metadata() -> None:
    assert tenant_of((("x", "1"), ("k", "me")), "k") == "me"
    assert tenant_of((), "k") == tenant_of(None, "k") == ""
    with pytest.raises(Exception, match="metadata k has 200 bytes; valid: at most 128"):
        tenant_of((("k", "x" * 200),), "k")
