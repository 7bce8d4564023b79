"""Dispatcher, lanes and queue: order, room, gate, bounds; nothing is lost, sent twice, or left waiting for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.delay_gate import DelayGate
from common.errors import HopelessDeadlineError, QueueFullError
from common.limits import WORKER_WAIT_S
from router.dispatcher import Dispatcher, Release
from router.lane import STALE_REPORT_S, LoadReport
from router.placement import PLACEMENTS, RoundRobin
from router.queue import QueuedRequest, RequestQueue

ROOM = LoadReport(time=0.0, room_tokens=1000, room_seqs=100)


def request(key: int, *, tokens: int = 10, arrival: float = 0.0, deadline: float | None = None) -> QueuedRequest:
    return QueuedRequest(key, "m", tokens, arrival, deadline)


def dispatcher(*workers: str, factor: float = 0.0, capacity: int = 100, report: LoadReport = ROOM) -> Dispatcher:
    made = Dispatcher(DelayGate(factor), RoundRobin(), capacity)
    for worker in workers:
        made.lane_up(worker, "m", report, 0.0)
    return made


def keys(releases: list[Release]) -> dict[str, list[int]]:
    return {release.worker: [r.key for r in release.requests] for release in releases}


def test_round_robin_in_order_of_arrival() -> None:
    d = dispatcher("a", "b", "c")
    for key in range(7):
        d.arrive(request(key), 0.0)
    assert keys(d.decide(0.0)) == {"a": [0, 3, 6], "b": [1, 4], "c": [2, 5]}
    assert len(d) == 0
    assert d.next_timer(0.0) is None


def test_room_bounds_release_at_factor_zero_and_the_first_is_chunked() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1, room_tokens=20, room_seqs=100))
    for key in range(4):
        d.arrive(request(key), 0.0)
    assert keys(d.decide(0.0)) == {"a": [0, 1]}
    d.arrive(request(9, tokens=5000), 0.0)
    assert d.decide(0.0) == []
    d.report("a", LoadReport(1.0, decoding_seqs=3, room_tokens=25, room_seqs=100, submit_seen=1))
    assert keys(d.decide(1.0)) == {"a": [2, 3]}
    d.report("a", LoadReport(2.0, decoding_seqs=5, room_tokens=1, room_seqs=1, submit_seen=2))
    assert keys(d.decide(2.0)) == {"a": [9]}


def test_unseen_groups_take_room_until_the_worker_has_seen_them() -> None:
    busy = LoadReport(0.0, decoding_seqs=1, room_tokens=30, room_seqs=3)
    d = dispatcher("a", report=busy)
    for key in range(6):
        d.arrive(request(key), 0.0)
    (first,) = d.decide(0.0)
    assert [r.key for r in first.requests] == [0, 1, 2]
    d.report("a", LoadReport(0.5, decoding_seqs=1, room_tokens=30, room_seqs=3, submit_seen=first.serial - 1))
    assert d.decide(0.5) == []
    d.report("a", LoadReport(0.6, decoding_seqs=4, room_tokens=10, room_seqs=1, submit_seen=first.serial))
    assert keys(d.decide(0.6)) == {"a": [3]}


def test_share_of_the_room_follows_the_fleets_waiting_tokens() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1, room_tokens=100, room_seqs=100, fleet_tokens=400))
    for key in range(10):
        d.arrive(request(key), 0.0)
    assert keys(d.decide(0.0)) == {"a": [0, 1]}


def test_idle_worker_gets_the_first_whatever_it_reports() -> None:
    d = dispatcher("a", report=LoadReport(0.0))
    d.arrive(request(1), 0.0)
    d.arrive(request(2), 0.0)
    assert keys(d.decide(0.0)) == {"a": [1]}


def decoding(time: float, latency: float = 0.1) -> LoadReport:
    return LoadReport(time, decoding_seqs=2, room_tokens=1000, room_seqs=10, last_prompt_latency_s=latency)


def test_gate_holds_until_the_oldest_is_old_enough_then_all_go_together() -> None:
    d = dispatcher("a", factor=1.0, report=decoding(0.0))
    d.arrive(request(1, arrival=0.0), 0.0)
    assert d.decide(0.01) == []
    d.arrive(request(2, arrival=0.05), 0.0)
    timer = d.next_timer(0.05)
    assert timer == pytest.approx(0.1, abs=1e-3)
    assert timer is not None
    assert d.decide(0.09) == []
    assert keys(d.decide(timer)) == {"a": [1, 2]}


def test_gate_opens_for_the_fleets_oldest_for_full_room_for_deadlines_and_for_stale_reports() -> None:
    echoed = LoadReport(
        0.0, decoding_seqs=1, room_tokens=100, room_seqs=9, last_prompt_latency_s=0.1, fleet_oldest_age_s=0.08
    )
    d = dispatcher("a", factor=1.0, report=echoed)
    d.arrive(request(1, arrival=0.0), 0.0)
    assert d.decide(0.01) == []
    assert keys(d.decide(0.03)) == {"a": [1]}

    d = dispatcher("a", factor=1.0, report=decoding(0.0))
    d.arrive(request(1, tokens=1000), 0.0)
    assert keys(d.decide(0.0)) == {"a": [1]}

    d = dispatcher("a", factor=1.0, report=decoding(0.0))
    d.arrive(request(1, deadline=0.26), 0.0)
    assert d.decide(0.0) == []
    assert d.next_timer(0.0) == pytest.approx(0.01)
    assert keys(d.decide(0.011)) == {"a": [1]}

    d = dispatcher("a", factor=1.0, report=decoding(0.0))
    late = STALE_REPORT_S + 0.01
    d.arrive(request(1, arrival=late), 0.0)
    assert keys(d.decide(late)) == {"a": [1]}


def test_max_hold_bounds_the_wait() -> None:
    d = dispatcher("a", factor=10.0, report=decoding(0.0, latency=10.0))
    d.arrive(request(1, arrival=0.0), 0.0)
    assert d.decide(0.24) == []
    assert keys(d.decide(0.26)) == {"a": [1]}


def test_queue_full() -> None:
    d = dispatcher("a", capacity=2, report=LoadReport(0.0, decoding_seqs=1))
    d.arrive(request(1), 0.0)
    d.arrive(request(2), 0.0)
    with pytest.raises(QueueFullError) as full:
        d.arrive(request(3), 0.0)
    assert full.value.retry_after_s == 1.0
    assert d.cancel(1)
    assert not d.cancel(1)
    d.arrive(request(3), 0.0)


def test_expiry_in_the_queue() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1))
    d.arrive(request(1, deadline=2.0), 0.0)
    d.arrive(request(2, deadline=1.0), 0.0)
    d.arrive(request(3), 0.0)
    assert d.next_timer(0.0) is not None
    assert d.expire(0.5) == []
    assert d.expire(2.0) == [2, 1]
    assert len(d) == 1


def test_all_of_a_tenant_expire_at_once() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1))
    for key in range(3):
        d.arrive(request(key, deadline=1.0), 0.0)
    assert d.expire(1.0) == [0, 1, 2]
    assert len(d) == 0
    assert d.lane_record("a").seqs == 0


def test_lanes_that_come_and_go_move_what_waits() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1))
    for key in range(4):
        d.arrive(request(key), 0.0)
    d.lane_up("b", "m", ROOM, 0.0)
    assert keys(d.decide(0.0)) == {"b": [1, 3]}
    d.lane_draining("a", 0.0)
    assert len(keys(d.decide(0.0))["b"]) == 2
    d.lane_down("a", 0.0)
    d.report("b", LoadReport(1.0, decoding_seqs=1, submit_seen=2))
    d.arrive(request(7), 0.0)
    d.lane_down("b", 2.0)
    assert len(d) == 1
    d.lane_up("a", "m", ROOM, 3.0)
    assert keys(d.decide(3.0)) == {"a": [7]}


def test_requests_wait_a_bounded_time_for_a_worker() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1))
    d.arrive(request(1), 0.0)
    d.lane_down("a", 1.0)
    d.arrive(request(2), 2.0)
    d.arrive(QueuedRequest(3, "other", 1, 2.5), 2.5)
    assert d.decide(2.5) == []
    assert d.next_timer(2.5) == 1.0 + WORKER_WAIT_S
    assert d.abandon(0.99 + WORKER_WAIT_S) == []
    assert d.abandon(1.0 + WORKER_WAIT_S) == [1]
    assert d.next_timer(6.5) == 2.0 + WORKER_WAIT_S
    d.lane_up("b", "m", ROOM, 6.6)
    assert keys(d.decide(6.6)) == {"b": [2]}
    assert d.abandon(7.5) == [3]
    assert len(d) == 0


def test_a_request_goes_to_its_numerics_class_only() -> None:
    d = dispatcher()
    d.lane_up("a", "m", ROOM, 0.0, "x")
    d.requeue(QueuedRequest(1, "m", 5, 0.0, numerics="y"), 0.0)
    d.arrive(request(2), 0.0)
    assert keys(d.decide(0.0)) == {"a": [2]}
    assert d.can_serve("m", "x")
    assert not d.can_serve("m", "y")
    assert not d.can_serve("m", None, but="a")
    d.lane_up("b", "m", ROOM, 1.0, "y")
    assert keys(d.decide(1.0)) == {"b": [1]}


def test_a_returned_request_avoids_the_worker_that_returned_it() -> None:
    for _ in range(3):
        d = dispatcher("a", "b")
        for key in range(4):
            d.requeue(request(key), 0.0, avoid="b")
        assert set(keys(d.decide(0.0))) == {"a"}
    d = dispatcher("b")
    d.requeue(request(1), 0.0, avoid="b")
    assert keys(d.decide(0.0)) == {"b": [1]}


def test_restarted_worker_has_a_clean_lane() -> None:
    d = dispatcher("a", report=LoadReport(0.0, room_tokens=10, room_seqs=1))
    d.arrive(request(1), 0.0)
    assert d.decide(0.0)[0].serial == 1
    d.lane_down("a", 0.0)
    d.lane_up("a", "m", ROOM, 0.0)
    d.arrive(request(2), 0.0)
    (release,) = d.decide(0.0)
    assert (release.serial, [r.key for r in release.requests]) == (1, [2])


def test_returned_requests_go_first() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1, room_tokens=10, room_seqs=9))
    d.arrive(request(1), 0.0)
    (release,) = d.decide(0.0)
    d.arrive(request(2), 0.0)
    d.requeue(release.requests[0], 0.0)
    d.report("a", LoadReport(1.0, decoding_seqs=1, room_tokens=10, room_seqs=9, submit_seen=1))
    assert keys(d.decide(1.0)) == {"a": [1]}


def test_queue_drops_stale_deadlines() -> None:
    queue = RequestQueue(10)
    for key in range(5000):
        queue.push(request(key, deadline=1e9))
        queue.remove(key)
    assert len(queue._deadlines) < 200
    assert queue.next_deadline() is None


WAIT_S = 1.0
NUMERICS = {"a": "x", "b": "y", "c": "x"}


class DispatcherMachine(RuleBasedStateMachine):
    """Random events against a model: who waits, who was released, what a simulated worker still has to report."""

    @initialize(factor=st.sampled_from([0.0, 0.5, 4.0]))
    def begin(self, factor: float) -> None:
        self.d = Dispatcher(DelayGate(factor), RoundRobin(), capacity=12, worker_wait_s=WAIT_S)
        self.now = 0.0
        self.next_key = 0
        self.waiting: dict[int, QueuedRequest] = {}
        self.up: dict[str, list[Release]] = {}
        self.released: set[int] = set()
        self.closed: set[str] = set()

    @rule(
        tokens=st.integers(1, 40),
        timeout=st.none() | st.floats(0.01, 2.0),
        numerics=st.sampled_from([None, None, "x", "y"]),
    )
    def arrive(self, tokens: int, timeout: float | None, numerics: str | None) -> None:
        self.next_key += 1
        deadline = None if timeout is None else self.now + timeout
        new = QueuedRequest(self.next_key, "m", tokens, self.now, deadline, numerics=numerics)
        try:
            self.d.arrive(new, self.now)
        except QueueFullError:
            assert len(self.waiting) >= 12
        except HopelessDeadlineError:
            assert timeout is not None
            assert self.up.keys() - self.closed
        else:
            self.waiting[new.key] = new

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[key]
        assert self.d.cancel(key)

    @rule(worker=st.sampled_from("abc"))
    def toggle(self, worker: str) -> None:
        if worker in self.up:
            del self.up[worker]
            self.closed.discard(worker)
            self.d.lane_down(worker, self.now)
        else:
            self.up[worker] = []
            report = LoadReport(self.now, room_tokens=50, room_seqs=4)
            self.d.lane_up(worker, "m", report, self.now, NUMERICS[worker])

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def cordon_or_uncordon(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.up)))
        if worker in self.closed:
            self.closed.remove(worker)
            self.d.lane_ready(worker, self.now)
        else:
            self.closed.add(worker)
            self.d.lane_draining(worker, self.now)

    @rule(
        factor=st.sampled_from([0.0, 0.5, 4.0]),
        policy=st.sampled_from([None, *PLACEMENTS]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def configure(self, factor: float, policy: str | None, weight: float) -> None:
        placement = None if policy is None else PLACEMENTS[policy].make()
        self.d.configure(DelayGate(factor), placement, 12, {"": weight}, self.now)

    @precondition(lambda self: self.up)
    @rule(data=st.data(), decodes=st.integers(0, 3), room=st.integers(0, 60))
    def report(self, data: st.DataObject, decodes: int, room: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.up)))
        sent = self.up[worker]
        seen = data.draw(st.integers(0, len(sent)))
        load = LoadReport(self.now, decodes, 0, 0, room, 4, 0.05, 1000.0, submit_seen=seen)
        self.d.report(worker, load)

    @rule(step=st.floats(0.0, 0.4))
    def decide(self, step: float) -> None:
        self.now += step
        for key in self.d.expire(self.now):
            deadline = self.waiting.pop(key).deadline
            assert deadline is not None
            assert deadline <= self.now
        for key in self.d.abandon(self.now):
            gone = self.waiting.pop(key)
            assert gone.parked is not None
            assert self.now - gone.parked >= WAIT_S
        for release in self.d.decide(self.now):
            assert all(r.numerics in (None, NUMERICS[release.worker]) for r in release.requests)
            arrivals = [r.key for r in release.requests]
            assert arrivals == sorted(arrivals)
            assert not self.released & set(arrivals)
            self.released |= set(arrivals)
            self.up[release.worker].append(release)
            assert release.worker not in self.closed
            assert release.serial == len(self.up[release.worker])
            for key in arrivals:
                del self.waiting[key]
        assert all(lane.idle is False or not len(lane) for lane in self.d._lanes.values())
        timer = self.d.next_timer(self.now)
        assert timer is None or timer > self.now

    @invariant()
    def bound_exactly_once(self) -> None:
        lanes = self.d._lanes.values()
        parked = self.d._parked
        assert sorted([*(r.key for lane in lanes for r in lane), *parked]) == sorted(self.waiting)
        classes = {NUMERICS[worker] for worker in self.up.keys() - self.closed}
        for key, request in self.waiting.items():
            assert (key in parked) == (not classes if request.numerics is None else request.numerics not in classes)
        assert [r.parked for r in parked.values()] == sorted(r.parked or 0.0 for r in parked.values())
        assert {r.key for r in self.d._queue} == set(self.waiting)
        for lane in lanes:
            assert lane.bound_tokens == sum(r.tokens for r in lane)
            assert lane.unseen_tokens == sum(g.tokens for g in lane._unseen)
            assert lane.unseen_seqs == sum(g.seqs for g in lane._unseen)


DispatcherMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestDispatcherMachine = DispatcherMachine.TestCase
