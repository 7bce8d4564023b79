"""Service order against an exhaustive reference, fairness of tenants, and the queue's speed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HopelessDeadlineError, QueueFullError
from common.limits import MAX_TENANTS, OUTPUT_TOKEN_COST, PROMOTE_AFTER_S, PROMOTED_SHARE
from router.scheduling.admission import QUEUE_RETRY_S, AdmissionQueue, DrainRateEstimator
from router.scheduling.fair_queue import FairQueue, LazyMinHeap, TenantShares
from router.scheduling.queued_request import CLASSES, HIGH, LOW, NORMAL, QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import make_lane

WEIGHTS = {"a": 1.0, "b": 2.0}
CAPACITY = 5


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
    """All requests in one list, searched exhaustively for the next and the dropped one."""

    def __init__(self) -> None:
        self.waiting: list[QueuedRequest] = []
        self.lanes: dict[int, int] = {}
        self.had: dict[tuple[int, str], float] = {}
        self.output: Counter[int] = Counter()
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
            ahead = [r for r in own if r.is_retry]
            if ahead:
                return ahead[0]
            heads = {r.tenant: r for r in reversed(own)}
            if heads:
                return min(heads.values(), key=lambda r: (self.had[(priority, r.tenant)], r.key))
        return None

    def serve(self, served: QueuedRequest) -> None:
        account = (served.priority, served.tenant)
        if not served.is_retry:
            self.time[served.priority] = max(self.time[served.priority], self.had[account])
            self.had[account] += served.tokens / WEIGHTS[served.tenant]
        self.leave(served)

    def say(self, speaker: QueuedRequest, tokens: int) -> None:
        self.output[speaker.key] += tokens
        account = (speaker.priority, speaker.tenant)
        if tokens and any(r.priority == speaker.priority for r in self.waiting):
            before = self.had.get(account, self.time[speaker.priority])
            self.had[account] = before + OUTPUT_TOKEN_COST * tokens / WEIGHTS[speaker.tenant]

    def yields(self, priority: int, tenant: str) -> QueuedRequest | None:
        """The request that loses its place to a new one if the queue is full; None if the new one is refused."""
        own = [r for r in self.waiting if r.priority == priority and not r.is_retry]
        share = {name: sum(r.tenant == name for r in own) / WEIGHTS[name] for name in WEIGHTS}
        most = min(share, key=lambda name: (-share[name], name))
        if not own or share[tenant] + 1 / WEIGHTS[tenant] > share[most]:
            return None
        return max((r for r in own if r.tenant == most), key=lambda r: r.key)


class Walk:
    """Random events on two lanes over one queue, as the dispatcher uses them, beside the reference.

    Few tenants, classes and sizes, a small queue, and only some events per walk make rare states frequent.
    """

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.shares = TenantShares(WEIGHTS)
        self.queue = AdmissionQueue(CAPACITY, self.shares)
        self.lanes = [FairQueue(self.shares), FairQueue(self.shares)]
        self.reference = Reference()
        self.key = 0
        self.served: list[QueuedRequest] = []
        some = [self.come_back, self.say, self.serve_one, self.cancel, self.go_away, self.move]
        self.events = [self.arrive, self.serve, *(event for event in some if self.rnd.random() < 0.5)]
        self.tenants = self.rnd.choice(["ab", "aaab", "abbb"])
        self.classes = self.rnd.choice([[NORMAL], [NORMAL, HIGH]])
        # Tenants mostly stay on their own lanes, and the queue never becomes empty, which would reset all shares.
        self.at_home = self.rnd.choice([0.5, 0.9])
        self.least = self.rnd.choice([0, 2])

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.rnd.choice(self.events)()
            self.agrees()

    def arrive(self) -> None:
        tenant, priority = self.rnd.choice(self.tenants), self.rnd.choice(self.classes)
        lane = int((tenant == "a") == (self.rnd.random() < self.at_home))
        full = sum(r.priority == priority for r in self.reference.waiting) >= CAPACITY
        expected = self.reference.yields(priority, tenant) if full else None
        try:
            yields = self.queue.place_for(priority, tenant, 0.0)
        except QueueFullError:
            assert full
            assert expected is None
            return
        assert yields is expected
        assert (yields is not None) == full
        if yields is not None:
            self.drop(yields)
        self.key += 1
        tokens, deadline = self.rnd.choice([1, 10]), self.rnd.choice([None, 1.0, 2.0])
        new = QueuedRequest(self.key, "m", tokens, self.key, deadline, tenant=tenant, priority=priority)
        self.queue.push(new)
        self.lanes[lane].push(new)
        self.reference.enter(new, lane, front=False)

    def serve(self) -> None:
        for lane in (0, 1):
            self.serve_one(lane)

    def serve_one(self, lane: int = 0) -> None:
        expected = self.reference.next(lane)
        assert self.lanes[lane].head(0.0) is expected
        if expected is not None and len(self.reference.waiting) > self.least:
            assert self.lanes[lane].pop(0.0) is expected
            self.queue.remove(expected.key)
            self.reference.serve(expected)
            self.served.append(expected)

    def come_back(self) -> None:
        if self.served:
            lane = self.rnd.randrange(2)
            back = self.served.pop(self.rnd.randrange(len(self.served)))
            self.queue.push_front(back)
            self.lanes[lane].push(back, first=True)
            self.reference.enter(back, lane, front=True)

    def say(self) -> None:
        if self.served:
            speaker = self.rnd.choice(self.served)
            self.reference.say(speaker, self.rnd.choice([0, 1, 10]))
            self.shares.charge_output(speaker, self.reference.output[speaker.key])

    def cancel(self) -> None:
        if self.reference.waiting:
            self.drop(self.rnd.choice(self.reference.waiting))

    def go_away(self) -> None:
        tenant = self.rnd.choice("ab")
        for gone in [r for r in self.reference.waiting if r.tenant == tenant]:
            self.drop(gone)

    def drop(self, gone: QueuedRequest) -> None:
        self.lanes[self.reference.lanes[gone.key]].remove(gone)
        self.queue.remove(gone.key)
        self.reference.leave(gone)

    def move(self) -> None:
        if not self.reference.waiting:
            return
        moved = self.rnd.choice(self.reference.waiting)
        lane = self.reference.lanes[moved.key]
        others = [r for r in self.reference.waiting if self.reference.lanes[r.key] != lane]
        # In the other lane it would follow later requests; it is moved only if no test can see that.
        if not any(r.tenant == moved.tenant or r.is_retry for r in others):
            self.lanes[lane].remove(moved)
            self.lanes[1 - lane].push(moved)
            self.reference.lanes[moved.key] = 1 - lane

    def agrees(self) -> None:
        waiting = self.reference.waiting
        for i, lane in enumerate(self.lanes):
            here = [r for r in waiting if self.reference.lanes[r.key] == i]
            assert {r.key for r in lane} == {r.key for r in here}
            assert (len(lane), lane.tokens) == (len(here), sum(r.tokens for r in here))
            assert lane.oldest_arrival() == min((r.arrival for r in here), default=None)
            assert lane.earliest_deadline() == min((r.deadline for r in here if r.deadline is not None), default=None)
            assert all(lane.has(p) == any(r.priority == p for r in here) for p in CLASSES)
        assert self.queue.next_deadline() == min((r.deadline for r in waiting if r.deadline is not None), default=None)
        for priority in CLASSES:
            assert self.shares.waiting(priority) == sum(r.priority == priority for r in waiting)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), steps=st.integers(50, 200))
def test_fair_queue_order_equals_reference(seed: int, steps: int) -> None:
    Walk(seed).go(steps)


class Queue:
    """A queue with lanes, by tenant names alone."""

    def __init__(self, lanes: int = 1) -> None:
        self.shares = TenantShares()
        self.queue = AdmissionQueue(1000, self.shares)
        self.lanes = [FairQueue(self.shares) for _ in range(lanes)]
        self.key = 0

    def add(self, tenants: str, lane: int = 0) -> None:
        for tenant in tenants:
            self.key += 1
            self.queue.push(new := request(self.key, tenant))
            self.lanes[lane].push(new)

    def serve(self, count: int, lane: int = 0) -> list[QueuedRequest]:
        served = [self.lanes[lane].pop(0.0) for _ in range(count)]
        for gone in served:
            self.queue.remove(gone.key)
        return served

    def names(self, count: int, lane: int = 0) -> str:
        return "".join(gone.tenant for gone in self.serve(count, lane))


def test_returning_tenant_gets_only_its_share() -> None:
    q = Queue()
    q.add("b" + 30 * "a")
    assert q.names(21) == "b" + 20 * "a"
    q.add(5 * "b")
    assert q.names(6) == "bababa"


def test_returned_request_is_charged_once() -> None:
    q = Queue()
    q.add("aabbb")
    (first,) = q.serve(1)
    for _ in range(3):
        q.queue.push_front(first)
        q.lanes[0].push(first, first=True)
        assert q.serve(1) == [first]
    assert q.names(4) == "babb"


def test_lagging_lane_does_not_reverse_virtual_time() -> None:
    q = Queue(lanes=2)
    q.add("b", lane=1)
    q.add(10 * "a")
    assert q.names(9) == 9 * "a"
    # b waits since earlier; c arrives now, after a was served 8 requests of 10 tokens.
    assert q.names(1, lane=1) == "b"
    q.add("aacccc")
    assert q.names(4) == "caca"


def test_output_is_charged_only_while_others_wait() -> None:
    """Tenants with long answers get fewer places; output that no other tenant could have had is free."""
    q = Queue()
    q.add("ab")
    first, second = q.serve(2)
    q.shares.charge_output(first, 50)
    q.add("aaaabbbb")
    q.shares.charge_output(first, 60)
    q.shares.charge_output(first, 60)
    # Ten tokens count as 20, or two prompts.
    assert q.names(5) == "bbaba"
    q.shares.charge_output(second, 1000)
    assert q.names(3) == "aab"


@settings(max_examples=50)
@given(
    tokens=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), min_size=2, max_size=60),
    weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
)
def test_waiting_tenants_differ_by_at_most_one_request(
    tokens: list[tuple[str, int]], weights: tuple[float, float]
) -> None:
    shares = TenantShares(weight := dict(zip("ab", weights, strict=True)))
    queue, lane = AdmissionQueue(100, shares), FairQueue(shares)
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


def test_flooding_tenant_does_not_delay_others() -> None:
    shares = TenantShares()
    queue, lane = AdmissionQueue(10_000, shares), FairQueue(shares)
    for key in range(1000):
        queue.push(new := request(key, "flood"))
        lane.push(new)
    for _ in range(5):
        queue.remove(lane.pop(0.0).key)
    queue.push(late := request(5000, "late"))
    lane.push(late)
    queue.push(later := request(5001, "late"))
    # Before the second: the first, and one of the tenants that had 10 more.
    assert lane.work_before(later) == 10 + 10
    lane.push(later)
    assert [lane.pop(0.0).tenant for _ in range(3)] == ["late", "flood", "late"]


def test_higher_class_is_served_first_with_own_queue() -> None:
    queue = AdmissionQueue(1, TenantShares())
    assert queue.place_for(LOW, "", 0.0) is None
    queue.push(request(1, priority=LOW))
    with pytest.raises(QueueFullError, match=r"1 requests of priority low\), and tenant '' has its share") as caught:
        queue.place_for(LOW, "", 0.0)
    assert caught.value.retry_after_s == QUEUE_RETRY_S
    assert queue.place_for(HIGH, "", 0.0) is None


@settings(max_examples=100)
@given(
    capacity=st.integers(1, 12),
    arrivals=st.lists(st.sampled_from("aaabbcs"), min_size=30, max_size=60),
    weights=st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 3.0]) for tenant in "abc"}),
)
def test_tenant_within_queue_share_is_never_dropped(
    capacity: int, arrivals: list[str], weights: dict[str, float]
) -> None:
    """A tenant with at most its share of waiting requests is not refused and keeps its places."""
    shares = TenantShares(weights)
    queue, lane = AdmissionQueue(capacity, shares), FairQueue(shares)
    waiting: Counter[str] = Counter()

    def within(tenant: str, count: int) -> bool:
        active = sum(weight for name, weight in weights.items() if waiting[name] or name == tenant)
        return count <= capacity * weights[tenant] / active

    for key, tenant in enumerate(arrivals):
        if tenant == "s":
            if lane:
                queue.remove((served := lane.pop(0.0)).key)
                waiting[served.tenant] -= 1
            continue
        try:
            yields = queue.place_for(NORMAL, tenant, 0.0)
        except QueueFullError:
            assert not within(tenant, waiting[tenant] + 1)
            continue
        if yields is not None:
            assert yields.tenant != tenant
            waiting[tenant] += 1
            assert not within(yields.tenant, waiting[yields.tenant])
            waiting[tenant] -= 1
            assert yields.key == max(r.key for r in lane if r.tenant == yields.tenant)
            queue.remove(yields.key)
            lane.remove(yields)
            waiting[yields.tenant] -= 1
        queue.push(new := request(key, tenant))
        lane.push(new)
        waiting[tenant] += 1
        assert sum(waiting.values()) <= capacity


def test_returned_request_is_never_dropped() -> None:
    queue = AdmissionQueue(2, TenantShares())
    for key in range(3):
        queue.push_front(request(key, "a"))
    with pytest.raises(QueueFullError):
        queue.place_for(NORMAL, "b", 0.0)


def test_new_weights_change_yielding_tenant() -> None:
    queue = AdmissionQueue(5, TenantShares())
    for key, tenant in enumerate("aaabb"):
        queue.push(request(key, tenant))
    assert queue.place_for(NORMAL, "c", 0.0) is next(r for r in queue if r.key == 2)
    queue.configure(5, {"a": 3.0})
    assert queue.place_for(NORMAL, "c", 0.0) is next(r for r in queue if r.key == 4)


@settings(max_examples=60)
@given(
    low=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    high=st.lists(st.integers(1, 40), min_size=1, max_size=200),
    age=st.sampled_from([0.0, PROMOTE_AFTER_S, PROMOTE_AFTER_S + 1]),
)
def test_overdue_class_gets_exactly_its_promoted_share(low: list[int], high: list[int], age: float) -> None:
    shares = TenantShares()
    queue, lane = AdmissionQueue(1000, shares), FairQueue(shares)
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
            # Within one request of each class, because the last one may be unpaid or overpaid.
            owed = PROMOTED_SHARE / (1 - PROMOTED_SHARE) * had[HIGH]
            assert owed - 40 <= had[LOW] <= owed + 40
    assert first_low == (0 if age > PROMOTE_AFTER_S else None)


def test_overdue_class_gets_an_eighth() -> None:
    """Of 800 equal requests an overdue class gets exactly an eighth."""
    shares = TenantShares()
    queue, lane = AdmissionQueue(1000, shares), FairQueue(shares)
    for key in range(1600):
        queue.push(new := QueuedRequest(key, "m", 10, 0.0, priority=HIGH if key % 2 else LOW, work=10))
        lane.push(new)
    served: Counter[int] = Counter()
    for _ in range(800):
        queue.remove((gone := lane.pop(PROMOTE_AFTER_S + 1)).key)
        served[gone.priority] += 1
    assert served == {HIGH: 700, LOW: 100}


def test_longest_waiting_class_is_promoted_first() -> None:
    shares = TenantShares()
    queue, lane = AdmissionQueue(100, shares), FairQueue(shares)
    for key, priority, arrival in ((1, LOW, 1.0), (2, NORMAL, 0.0), (3, HIGH, 0.0), (4, HIGH, 9.0)):
        queue.push(new := QueuedRequest(key, "m", 10, arrival, priority=priority, work=10))
        lane.push(new)
    order = []
    while lane:
        order.append(lane.pop(20.0).key)
        queue.remove(order[-1])
    assert order == [2, 3, 4, 1]


def test_low_request_wait_estimate_includes_promotion() -> None:
    shares = TenantShares()
    lane = make_lane("w", "m", LoadReport(0.0, decoding_seqs=1, prefill_rate=100.0), shares)
    for key in range(100):
        shares.enter(new := request(key, tokens=100, priority=HIGH))
        lane.bind(new)
    assert lane.seconds_to_serve(request(200, tokens=100, priority=HIGH)) == 101.0
    assert lane.seconds_to_serve(request(200, tokens=100, priority=LOW)) == PROMOTE_AFTER_S + 1 / PROMOTED_SHARE


def test_tenants_without_requests_are_forgotten() -> None:
    shares = TenantShares()
    queue, lane = AdmissionQueue(10**6, shares), FairQueue(shares)
    queue.push(request(-1, "stays"))
    for key in range(3 * MAX_TENANTS):
        queue.push(new := request(key, f"t{key}"))
        lane.push(new)
        queue.remove(lane.pop(0.0).key)
    assert len(shares._classes[NORMAL].tenants) <= MAX_TENANTS + 1
    queue.remove(-1)
    assert not shares._classes[NORMAL].tenants


@pytest.mark.parametrize("seed", range(3))
def test_fair_queue_memory_follows_waiting_requests(seed: int) -> None:
    rnd = random.Random(seed)
    shares = TenantShares()
    queue, lane = AdmissionQueue(10**6, shares), FairQueue(shares)
    for key in range(5000):
        queue.push(new := request(key, rnd.choice("abc"), deadline=rnd.random()))
        lane.push(new)
        if len(lane) > 20:
            queue.remove(lane.pop(0.0).key)
    assert len(lane._classes[NORMAL]._heap) < 200
    assert sum(map(len, lane._arrivals.values())) + len(lane._deadlines) < 400


@settings(max_examples=60)
@given(st.lists(st.integers(0, 8), max_size=200))
def test_lazy_heap_top_is_least_live_entry(events: list[int]) -> None:
    alive: dict[int, float] = {}
    earliest = LazyMinHeap(alive)
    for key in events:
        if alive.pop(key, None) is None:
            alive[key] = float(key * 7 % 5)
            earliest.add(alive[key], key)
        assert earliest.top() == min(((v, k) for k, v in alive.items()), default=None)


def test_retry_times_follow_queue_drain_rate() -> None:
    speed = DrainRateEstimator()
    assert speed.retry_after_s(0.0) == QUEUE_RETRY_S
    for i in range(1000):
        speed.departed(1, i / 20)
    assert speed.rate(50.0) == pytest.approx(20, rel=0.05)
    waits = [speed.retry_after_s(50.0) for _ in range(20)]
    assert waits == pytest.approx([max(i / 20, 0.05) for i in range(1, 21)], rel=0.06)
    assert max(speed.retry_after_s(50.0) for _ in range(10_000)) == 30.0
    assert speed.rate(70.0) < 0.5


def test_drain_rate_is_right_within_first_second() -> None:
    speed = DrainRateEstimator()
    for i in range(21):
        speed.departed(1, 100 + i / 20)
    assert speed.rate(101.0) == pytest.approx(20, rel=0.15)


def test_request_is_never_hopeless_on_empty_lane() -> None:
    shares = TenantShares()
    lane = make_lane("w", "m", LoadReport(0.0, prefill_rate=100.0), shares)
    assert lane.seconds_to_serve(request(1, tokens=1000)) == 0.0
    lane.load.take(LoadReport(0.0, waiting_tokens=50, prefill_rate=100.0))
    assert lane.seconds_to_serve(request(1, tokens=1000)) == 10.5
    lane.load.take(LoadReport(0.0, waiting_tokens=50))
    assert lane.seconds_to_serve(request(1, tokens=1000)) == 0.0
    assert HopelessDeadlineError(10.5, 2.0, 8.5).retry_after_s == 8.5
