"""Overload, the delay gate and priorities: what waits, for how long, and what is refused.

A2 runs the dispatcher on a fake clock against an oracle that was written from docs/explanation/architecture.md alone.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.rpc import error_details_pb2
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from common.delay_gate import DelayGate
from common.limits import PROMOTE_AFTER_S
from router.scheduling.placement import RoundRobin
from router.scheduling.queued_request import HIGH, LOW, NORMAL, QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.chaos.conftest import Report
from tests.chaos.scale import FULL, SCALE
from tests.chaos.support import code_of, detail, quantile, until
from tests.e2e.service import Service, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers
from tests.unit.router.scheduling.dispatching import make_dispatcher

HEARTBEAT_S = 0.5
MARGIN_S = 0.25
EPSILON_S = 1e-4
SETTINGS = settings(max_examples=SCALE.a2_examples, stateful_step_count=40)


@dataclass
class Waiting:
    """A request as the oracle knows it."""

    key: int
    tokens: int
    arrival: float
    deadline: float
    high: bool


@dataclass
class Oracle:
    """One worker, one tenant, one class: when what waits must go, and when it may stay. Looks at everything, always."""

    factor: float
    max_hold_s: float
    report: LoadReport
    waiting: list[Waiting] = field(default_factory=list)
    # Groups on their way: serial number, tokens, number of requests.
    unseen: list[tuple[int, int, int]] = field(default_factory=list)

    def hear(self, report: LoadReport) -> None:
        self.report = report
        self.unseen = [group for group in self.unseen if group[0] > report.submit_seen]

    @property
    def idle(self) -> bool:
        r = self.report
        return not (r.decoding_seqs or r.waiting_seqs or r.waiting_tokens or self.unseen)

    def must_open(self, now: float, slack: float = 0.0) -> bool:
        """Whether the gate is open; `slack` seconds later for what depends on time."""
        r = self.report
        tokens = sum(w.tokens for w in self.waiting)
        if self.factor == 0 or not (r.decoding_seqs or r.waiting_seqs or self.unseen):
            return True
        age = max(
            now - min(w.arrival for w in self.waiting), r.fleet_oldest_age_s and r.fleet_oldest_age_s + now - r.time
        )
        if age > self.factor * r.last_prompt_latency_s + slack or age > self.max_hold_s + slack:
            return True
        if tokens >= r.room_tokens - sum(group[1] for group in self.unseen):
            return True
        if any(w.high for w in self.waiting) or now - r.time > 3 * HEARTBEAT_S + slack:
            return True
        cost = (r.waiting_tokens + tokens + sum(group[1] for group in self.unseen)) / r.prefill_rate
        return any(w.deadline - now < cost + MARGIN_S - slack for w in self.waiting)

    def room(self) -> tuple[float, int]:
        r, mine = self.report, sum(w.tokens for w in self.waiting)
        share = mine / max(r.fleet_tokens, mine)
        left = r.room_tokens - sum(group[1] for group in self.unseen)
        return left * share, r.room_seqs - sum(group[2] for group in self.unseen)

    def group(self) -> list[int]:
        """Which requests go when the gate is open: the longest beginning that fits; at least one where there is any."""
        tokens, seqs = self.room()
        # High ones first; each class in order of arrival.
        order = sorted(self.waiting, key=lambda w: (not w.high, w.key))
        fits = 0
        while fits < len(order) and fits < seqs and sum(w.tokens for w in order[: fits + 1]) <= tokens:
            fits += 1
        if not fits and (self.idle or (tokens > 0 and seqs > 0)):
            fits = 1
        return [w.key for w in order[:fits]]

    def take(self, keys: list[int], serial: int) -> None:
        gone = [w for w in self.waiting if w.key in keys]
        self.waiting = [w for w in self.waiting if w.key not in keys]
        self.unseen.append((serial, sum(w.tokens for w in gone), len(gone)))


class GateMachine(RuleBasedStateMachine):
    """A lane of the dispatcher, driven by its own timers only, against the oracle."""

    @initialize(factor=st.sampled_from([0.0, 0.5, 1.0, 4.0]), max_hold=st.sampled_from([0.05, 0.25]))
    def begin(self, factor: float, max_hold: float) -> None:
        self.now, self.key, self.serial, self.released = 100.0, 0, 0, False
        self.due: float | None = None
        first = LoadReport(self.now, decoding_seqs=1, room_tokens=1000, room_seqs=50, prefill_rate=1000.0)
        self.oracle = Oracle(factor, max_hold, first)
        self.dispatcher = make_dispatcher(DelayGate(factor, max_hold), RoundRobin(), 10_000)
        self.dispatcher.lane_up("w", "m", first, self.now)

    def pump(self) -> None:
        """What the router does at every event and every timer; compared with the oracle's decision."""
        for key in self.dispatcher.expire(self.now):
            (late,) = [w for w in self.oracle.waiting if w.key == key]
            assert late.deadline <= self.now
            self.oracle.waiting.remove(late)
        assert all(w.deadline > self.now for w in self.oracle.waiting)
        must = bool(self.oracle.waiting) and self.oracle.must_open(self.now, EPSILON_S)
        may = bool(self.oracle.waiting) and self.oracle.must_open(self.now, -EPSILON_S)
        expected = self.oracle.group() if may else []
        idle = self.oracle.idle and bool(self.oracle.waiting)
        releases = self.dispatcher.decide(self.now)
        keys = [r.key for release in releases for r in release.requests]
        assert keys == expected or (not must and not keys), (keys, expected, must, may)
        assert keys or not idle, "an idle worker waits"
        self.released = bool(keys)
        if keys:
            self.serial += 1
            assert [release.serial for release in releases] == [self.serial]
            self.oracle.take(keys, self.serial)
        self.due = self.dispatcher.next_timer(self.now)

    @rule(
        tokens=st.integers(1, 400),
        deadline=st.none() | st.floats(0.01, 3.0),
        high=st.integers(0, 9).map(lambda i: i == 0),
    )
    def arrive(self, tokens: int, deadline: float | None, high: bool) -> None:
        self.key += 1
        until = None if deadline is None else self.now + deadline
        priority = HIGH if high else NORMAL
        made = QueuedRequest(self.key, "m", tokens, self.now, until, priority=priority)
        # Refused at once when hopeless: that is another test's.
        if until is not None and self.dispatcher.lanes["w"].seconds_to_serve(made) + tokens / 1000 > until - self.now:
            return
        self.dispatcher.arrive(made, self.now)
        self.oracle.waiting.append(Waiting(self.key, tokens, self.now, math.inf if until is None else until, high))
        self.pump()

    @rule(
        decoding=st.integers(0, 2),
        waiting=st.integers(0, 1),
        latency=st.sampled_from([0.0, 0.01, 0.1, 2.0]),
        room=st.sampled_from([0, 100, 1000, 100_000]),
        seqs=st.sampled_from([0, 2, 50]),
        fleet=st.sampled_from([(0.0, 0), (0.04, 2000)]),
        behind=st.integers(0, 2),
    )
    def report(
        self, decoding: int, waiting: int, latency: float, room: int, seqs: int, fleet: tuple[float, int], behind: int
    ) -> None:
        made = LoadReport(
            self.now,
            decoding,
            waiting,
            waiting_tokens=100 * waiting,
            room_tokens=room,
            room_seqs=seqs,
            last_prompt_latency_s=latency,
            prefill_rate=1000.0,
            fleet_oldest_age_s=fleet[0],
            fleet_tokens=fleet[1],
            submit_seen=max(0, self.serial - behind),
        )
        self.dispatcher.report("w", made)
        self.oracle.hear(made)
        self.pump()

    @rule(seconds=st.sampled_from([0.005, 0.03, 0.2, 2.0]))
    def time_passes(self, seconds: float) -> None:
        """Only the dispatcher's own timers wake it. The oracle knows nothing of promotion: nobody gets so old here."""
        oldest = min((w.arrival for w in self.oracle.waiting), default=self.now)
        end = min(self.now + seconds, max(self.now, oldest + PROMOTE_AFTER_S - MARGIN_S))
        timers = 0
        while self.due is not None and self.due <= end:
            # Timers of an event loop are a little late.
            self.now = max(self.now, self.due) + 1e-5
            self.pump()
            timers += 1
            assert timers < 100, "a timer that changes nothing comes again and again"
        self.now = max(self.now, end)

    @invariant()
    def nothing_is_held_too_long(self) -> None:
        """No timer was missed: what waits may still be held, or there is no room for it."""
        oracle = self.oracle
        # What is left of a decision that filled the room waits for the next report.
        if self.released:
            return
        if oracle.waiting and oracle.must_open(self.now, EPSILON_S):
            assert not oracle.group()
        if oracle.waiting and oracle.group():
            oldest = min(w.arrival for w in oracle.waiting)
            assert self.now - oldest <= min(oracle.max_hold_s, 3 * HEARTBEAT_S) + EPSILON_S
            assert oracle.factor > 0


def test_delay_gate_matches_oracle() -> None:
    """A2: never delays when idle, nor beyond the longest hold, nor into a deadline; factor 0 passes everything on;
    without reports it goes on."""
    run_state_machine_as_test(GateMachine, settings=SETTINGS)


class OrderMachine(RuleBasedStateMachine):
    """Tenants and classes behind a gate that opens and shuts."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.key, self.serial = 0.0, 0, 0
        self.dispatcher = make_dispatcher(DelayGate(1.0, 0.25), RoundRobin(), 10_000)
        busy = LoadReport(0.0, decoding_seqs=1, last_prompt_latency_s=0.1, prefill_rate=1000.0)
        self.dispatcher.lane_up("w", "m", busy, 0.0)
        self.gone: list[QueuedRequest] = []

    @rule(tenant=st.sampled_from("ab"), priority=st.sampled_from([LOW, NORMAL, HIGH]), tokens=st.integers(1, 90))
    def arrive(self, tenant: str, priority: int, tokens: int) -> None:
        self.key += 1
        made = QueuedRequest(self.key, "m", tokens, self.now, tenant=tenant, priority=priority)
        self.dispatcher.arrive(made, self.now)

    @rule(room=st.integers(0, 300), seconds=st.sampled_from([0.0, 0.05, 0.3, 6.0]))
    def step(self, room: int, seconds: float) -> None:
        self.now += seconds
        seen = LoadReport(
            self.now, 1, 0, 0, room, 50, last_prompt_latency_s=0.1, prefill_rate=1000.0, submit_seen=self.serial
        )
        self.dispatcher.report("w", seen)
        for release in self.dispatcher.decide(self.now):
            self.serial = release.serial
            self.gone.extend(release.requests)

    @invariant()
    def first_come_first_served_within_class_and_tenant(self) -> None:
        for tenant in "ab":
            for priority in (LOW, NORMAL, HIGH):
                keys = [r.key for r in self.gone if (r.tenant, r.priority) == (tenant, priority)]
                assert keys == sorted(keys)


def test_queue_serves_by_class_tenant_share_and_arrival() -> None:
    """A2: within a class and tenant, first come, first served."""
    run_state_machine_as_test(OrderMachine, settings=SETTINGS)


# A1 and A3, with real processes.
SEQS = 4
TOKENS = 20
TURNS = 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker that runs four sequences at once, behind a queue of sixteen."""
    model = simulated_model(tmp_path_factory.mktemp("model"))
    options = ["--queue-size", str(4 * SEQS)]
    worker = [*OPTIONS, "--max-num-seqs", str(SEQS)]
    with running_service(
        tmp_path_factory.mktemp("small"), model, worker_options=worker, router_options=options
    ) as running:
        wait_workers(running, 1)
        yield running


@dataclass
class Load:
    """What clients got who ask again and again, for a while."""

    finished: int = 0
    refused: int = 0
    queue_s: list[float] = field(default_factory=list)
    retry_s: list[float] = field(default_factory=list)
    others: list[grpc.StatusCode] = field(default_factory=list)

    def ask(self, stub: InferenceServiceStub, i: int) -> None:
        try:
            answer = generate(stub, numbered(i), timeout=60)
        except grpc.RpcError as error:
            code, retry = code_of(error), detail(error, error_details_pb2.RetryInfo)
            if code is not grpc.StatusCode.RESOURCE_EXHAUSTED or retry is None:
                self.others.append(code)
                return
            self.refused += 1
            self.retry_s.append(retry.retry_delay.ToMilliseconds() / 1000)
            # A client that hurries more than it was told to.
            time.sleep(min(self.retry_s[-1], 0.05))
            return
        assert answer.finish is not None
        assert len(answer.token_ids) == TOKENS
        self.finished += 1
        self.queue_s.append(answer.finish.timings.queue.ToMilliseconds() / 1000)


def numbered(i: int, priority: int = NORMAL) -> pb.GenerateRequest:
    made = request(i, TOKENS)
    made.request_id = f"{i}-{uuid.uuid4().hex}"
    made.priority = pb.Priority.ValueType(priority)
    return made


def closed_loop(service: Service, clients: int, seconds: float, load: Load) -> None:
    """So many clients, each asking anew when it has its answer; what they got is added to `load`."""
    end = time.monotonic() + seconds

    def client(i: int) -> None:
        while time.monotonic() < end:
            load.ask(service.stub, i)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))


def test_a1_overload_is_refused_and_costs_no_goodput(small: Service, report: Report) -> None:
    """A1: five times as many clients as the worker and the queue have room for: as many answers as without overload,
    a bounded wait, RESOURCE_EXHAUSTED with RetryInfo for the rest; and at once as before when it is over."""
    full, over = Load(), Load()
    # By turns: what else the machine has to do meets both.
    for _ in range(TURNS):
        closed_loop(small, SEQS, SCALE.a1_s / TURNS, full)
        closed_loop(small, 5 * 5 * SEQS, SCALE.a1_s / TURNS, over)
    begin = time.monotonic()
    generate(small.stub, numbered(1))
    recovered_s = time.monotonic() - begin
    report(
        "A1",
        capacity_per_s=full.finished / SCALE.a1_s,
        goodput=over.finished / full.finished,
        refused=over.refused,
        queue_p99_s=quantile(over.queue_s, 0.99),
        retry_p50_s=quantile(over.retry_s, 0.5),
        recovered_after_s=recovered_s,
    )
    assert over.others == []
    assert over.refused > 0
    assert all(0.05 <= retry <= 30 for retry in over.retry_s)
    # With full times alone on the machine; else one of the two may have had less of it.
    assert over.finished >= (0.9 if FULL else 0.4) * full.finished
    # Sixteen wait at most and four run at once: five times the time of one, and the queue of the threads here.
    service_s = SCALE.a1_s * SEQS / over.finished
    assert not FULL or quantile(over.queue_s, 0.99) <= 5 * 5 * service_s
    assert small.wait_idle().free_blocks == small.worker_load().total_blocks


@pytest.mark.slow
def test_a3_low_request_is_served_during_flood_of_high_ones(small: Service, report: Report) -> None:
    """A3: clients of the high class keep the queue full; a low request is promoted when it has waited too long."""
    stop = threading.Event()
    done: list[float] = []

    def client(i: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(grpc.RpcError):
                generate(small.stub, numbered(i, HIGH))
                done.append(time.monotonic())

    with ThreadPoolExecutor(3 * SEQS) as pool:
        flood = [pool.submit(client, i) for i in range(3 * SEQS)]
        try:
            until(lambda: len(done) > 2 * SEQS, what="a flood")
            begin = time.monotonic()
            answer = generate(small.stub, numbered(1, LOW), timeout=60)
            waited = time.monotonic() - begin
            # It was promoted, not merely lucky: the flood went on.
            beside = sum(at > begin for at in done)
        finally:
            stop.set()
        for each in flood:
            each.result()
    report("A3", low_waited_s=waited, high_served_meanwhile=beside, promoted_after_s=PROMOTE_AFTER_S)
    assert len(answer.token_ids) == TOKENS
    assert beside > 2 * SEQS
