"""Dispatcher, lanes and queue: order, room, gate, bounds; no request is lost, sent twice or left waiting for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.delay_gate import DelayGate
from common.errors import QueueFullError
from common.limits import WORKER_WAIT_S
from router.scheduling.admission import AdmissionQueue
from router.scheduling.fair_queue import TenantShares
from router.scheduling.lane import Lane
from router.scheduling.placement import PLACEMENTS, PrefixAware, RoundRobin
from router.scheduling.queued_request import LOW, QueuedRequest
from router.scheduling.worker_load import STALE_REPORT_S, LoadReport
from tests.unit.router.scheduling.dispatching import ROOM, decoding, dispatcher, keys, make_dispatcher, request


def test_round_robin_in_order_of_arrival() -> None:
    d = dispatcher("a", "b", "c")
    for key in range(7):
        d.arrive(request(key), 0.0)
    assert keys(d.decide(0.0)) == {"a": [0, 3, 6], "b": [1, 4], "c": [2, 5]}
    assert len(d) == 0
    assert d.next_timer(0.0) is None


def test_room_bounds_release_and_first_request_is_chunked() -> None:
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


def test_unseen_groups_occupy_room_until_reported() -> None:
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


def test_idle_worker_gets_first_request_despite_report() -> None:
    d = dispatcher("a", report=LoadReport(0.0))
    d.arrive(request(1), 0.0)
    d.arrive(request(2), 0.0)
    assert keys(d.decide(0.0)) == {"a": [1]}


def test_gate_releases_all_requests_with_oldest() -> None:
    d = dispatcher("a", factor=1.0, report=decoding(0.0))
    d.arrive(request(1, arrival=0.0), 0.0)
    assert d.decide(0.01) == []
    d.arrive(request(2, arrival=0.05), 0.0)
    timer = d.next_timer(0.05)
    assert timer == pytest.approx(0.1, abs=1e-3)
    assert timer is not None
    assert d.decide(0.09) == []
    assert keys(d.decide(timer)) == {"a": [1, 2]}


def test_gate_opens_for_fleet_age_full_room_deadline_or_stale_report() -> None:
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


def test_group_in_transit_counts_as_waiting_at_worker() -> None:
    """The gate stays closed even if the latest report is older than the latest group."""
    idle = LoadReport(0.0, room_tokens=1000, room_seqs=10, last_prompt_latency_s=0.2)
    d = dispatcher("a", factor=1.0, report=idle)
    d.arrive(request(1), 0.0)
    assert keys(d.decide(0.0)) == {"a": [1]}
    d.arrive(request(2, arrival=0.01), 0.01)
    assert d.decide(0.01) == []
    timer = d.next_timer(0.01)
    assert timer == pytest.approx(0.21, abs=1e-3)
    assert timer is not None
    assert keys(d.decide(timer)) == {"a": [2]}


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
    assert d.cancel(1, 0.0)
    assert not d.cancel(1, 0.0)
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


def test_expired_requests_leave_together() -> None:
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1))
    for key in range(3):
        d.arrive(request(key, deadline=1.0), 0.0)
    assert d.expire(1.0) == [0, 1, 2]
    assert len(d) == 0
    assert d.lanes["a"].record().seqs == 0


def test_waiting_requests_move_as_lanes_change() -> None:
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


def test_requests_without_worker_wait_bounded_time() -> None:
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


def test_request_goes_only_to_its_numerics_class() -> None:
    d = dispatcher()
    d.lane_up("a", "m", ROOM, 0.0, "x")
    d.requeue(QueuedRequest(1, "m", 5, 0.0, numerics="y"), 0.0)
    d.arrive(request(2), 0.0)
    assert keys(d.decide(0.0)) == {"a": [2]}
    assert d.lanes.can_serve("m", "x")
    assert not d.lanes.can_serve("m", "y")
    assert not d.lanes.can_serve("m", None, but="a")
    d.lane_up("b", "m", ROOM, 1.0, "y")
    assert keys(d.decide(1.0)) == {"b": [1]}


def test_request_goes_only_to_worker_with_enough_context() -> None:
    """Also a request that waits when a shorter worker arrives, or that lost its worker."""
    for policy in PLACEMENTS.values():
        d = make_dispatcher(DelayGate(0.0), policy())
        d.lane_up("long", "m", LoadReport(0.0, decoding_seqs=1, waiting_tokens=9000), 0.0, max_model_len=1024)
        d.arrive(QueuedRequest(1, "m", 10, 0.0, most_tokens=1024), 0.0)
        d.lane_up("short", "m", ROOM, 0.0, max_model_len=256)
        d.arrive(QueuedRequest(2, "m", 10, 0.0, most_tokens=257), 0.0)
        d.arrive(QueuedRequest(3, "m", 10, 0.0, most_tokens=256), 0.0)
        d.requeue(QueuedRequest(4, "m", 200, 0.0, most_tokens=900), 0.0)
        assert set(keys(d.decide(0.0))) <= {"short"}
        assert {r.key for r in d.lanes["long"]} >= {1, 2, 4}
        assert d.lanes.can_serve("m", None, 256, but="long")
        assert not d.lanes.can_serve("m", None, 257, but="long")
        d.lane_down("long", 1.0)
        d.decide(1.0)
        assert not d.lanes.can_serve("m", None, 1024)
        assert sorted(d.abandon(1.0 + WORKER_WAIT_S)) == [1, 2, 4]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pinned_request_goes_only_to_its_worker(placement: str) -> None:
    """Even if others would serve it sooner, and also after its return."""
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS[placement](), 100)
    for worker in ("a", "b", "c"):
        d.lane_up(worker, "m", ROOM, 0.0)
    d.report("b", LoadReport(0.0, decoding_seqs=9, waiting_tokens=9000, room_tokens=0, room_seqs=0))
    wanted = replace(request(1), only_worker="b")
    d.arrive(wanted, 0.0)
    for now in range(1, 20):
        assert d.decide(float(now)) == []
    d.report("b", replace(ROOM, time=20.0))
    assert keys(d.decide(20.0)) == {"b": [1]}
    d.requeue(wanted, 21.0, excluded_worker="b")
    assert keys(d.decide(21.0)) == {"b": [1]}
    d.requeue(wanted, 22.0)
    d.lane_draining("b", 22.0)
    assert d.decide(22.0) == []
    assert d.abandon(22.0 + WORKER_WAIT_S) == [1]


def test_returned_request_avoids_its_last_worker() -> None:
    for _ in range(3):
        d = dispatcher("a", "b")
        for key in range(4):
            d.requeue(request(key), 0.0, excluded_worker="b")
        assert set(keys(d.decide(0.0))) == {"a"}
    d = dispatcher("b")
    d.requeue(request(1), 0.0, excluded_worker="b")
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


def test_returned_requests_keep_their_order() -> None:
    """Requests return last to first, before later arrivals."""
    d = dispatcher("a", report=LoadReport(0.0, decoding_seqs=1, room_tokens=30, room_seqs=9))
    for key in range(3):
        d.arrive(request(key), 0.0)
    (release,) = d.decide(0.0)
    d.arrive(request(9), 0.0)
    for returned in reversed(release.requests):
        d.requeue(returned, 0.0)
    d.report("a", LoadReport(1.0, decoding_seqs=1, room_tokens=100, room_seqs=9, submit_seen=1))
    assert keys(d.decide(1.0)) == {"a": [0, 1, 2, 9]}


def test_queue_drops_stale_deadlines() -> None:
    queue = AdmissionQueue(10, TenantShares())
    for key in range(5000):
        queue.push(request(key, deadline=1e9))
        queue.remove(key)
    assert len(queue._deadlines) < 200
    assert queue.next_deadline() is None


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_suspect_runs_alone_while_arrivals_go_elsewhere(placement: str) -> None:
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS[placement](), 100)
    for worker in "ab":
        d.lane_up(worker, "m", ROOM, 0.0)
    suspect = request(0)
    suspect.alone = True
    d.requeue(suspect, 0.0)
    for key in range(1, 9):
        d.arrive(request(key), 0.0)
    sent = keys(d.decide(0.0))
    [(alone, [_])] = [item for item in sent.items() if item[1] == [0]]
    [(other, rest)] = [item for item in sent.items() if item[1] != [0]]
    assert rest == list(range(1, 9))
    # Its report says idle, but it still belongs to the suspect.
    d.report(alone, LoadReport(1.0, room_tokens=1000, room_seqs=100, submit_seen=1))
    d.report(other, LoadReport(1.0, decoding_seqs=8, room_tokens=1000, room_seqs=92, submit_seen=1))
    d.arrive(request(10), 1.0)
    assert keys(d.decide(1.0)) == {other: [10]}
    d.lane_down(other, 1.0)
    d.arrive(request(11), 1.0)
    assert d.decide(1.0) == []
    d.share(alone, 99)
    assert d.decide(1.0) == []
    d.share(alone, 0)
    assert keys(d.decide(1.0)) == {alone: [11]}


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_limited_worker_attracts_no_more_than_limit(placement: str) -> None:
    """A worker on probation looks idle and would be the first choice."""
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS[placement](), 100)
    d.lane_up("bad", "m", ROOM, 0.0)
    d.limit("bad", 2)
    d.lane_up("well", "m", LoadReport(0.0, decoding_seqs=40, room_tokens=1000, room_seqs=60), 0.0)
    for key in range(12):
        d.arrive(request(key), 0.0)
    sent = keys(d.decide(0.0))
    assert len(sent.pop("bad")) <= 2
    assert len(sent.pop("well")) >= 10
    d.lane_down("well", 1.0)
    for key in range(20, 26):
        d.arrive(request(key), 1.0)
    d.report("bad", LoadReport(1.0, decoding_seqs=1, room_tokens=1000, room_seqs=99, submit_seen=9))
    assert [len(each) for each in keys(d.decide(1.0)).values()] == [1]
    d.limit("bad", None)
    assert [len(each) for each in keys(d.decide(1.0)).values()] == [5]


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_waiting_suspect_gets_new_worker(placement: str) -> None:
    """Late binding does not move suspects, so they are placed again before others fill the worker."""
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS[placement](), 100)
    d.lane_up("a", "m", ROOM, 0.0)
    for key in range(3):
        suspect = request(key)
        suspect.alone = True
        d.requeue(suspect, 0.0)
    for key in range(3, 9):
        d.arrive(request(key), 0.0)
    assert [len(each) for each in keys(d.decide(0.0)).values()] == [1]
    d.lane_up("b", "m", ROOM, 1.0)
    [(worker, [key])] = keys(d.decide(1.0)).items()
    assert worker == "b"
    assert key < 3


def test_ended_limit_or_cleared_suspect_releases_waiting_requests() -> None:
    """A decision checks changed lanes, and these two events change a lane without a report."""
    d = make_dispatcher(DelayGate(0.0), RoundRobin(), 100)
    d.lane_up("a", "m", ROOM, 0.0)
    d.limit("a", 1)
    for key in range(3):
        d.arrive(request(key), 0.0)
    assert keys(d.decide(0.0)) == {"a": [0]}
    assert d.decide(0.0) == []
    d.limit("a", 2)
    assert keys(d.decide(0.0)) == {"a": [1]}
    assert d.decide(0.0) == []
    d.limit("a", None)
    assert keys(d.decide(0.0)) == {"a": [2]}

    d = dispatcher("a")
    suspect = request(0)
    suspect.alone = True
    d.requeue(suspect, 0.0)
    d.arrive(request(1), 0.0)
    assert keys(d.decide(0.0)) == {"a": [0]}
    assert d.decide(0.0) == d.decide(0.0) == []
    d.share("a", 0)
    assert keys(d.decide(0.0)) == {"a": [1]}


def test_requests_leaving_returned_worker_keep_its_new_lane_intact() -> None:
    """Requests of a lost worker are placed in pieces, possibly after a worker of its address returned."""
    d = make_dispatcher(DelayGate(0.0), RoundRobin(), 1000)
    d.lane_up("a", "m", replace(ROOM, decoding_seqs=1, room_seqs=0), 0.0)
    for key in range(1, 201):
        d.arrive(request(key), 0.0)
    suspect = QueuedRequest(0, "m", 1, 0.0, priority=LOW, alone=True)
    d.requeue(suspect, 0.0)
    d.lane_down("a", 0.0)
    assert suspect.lane is not None
    d.decide(0.0)
    d.lane_up("a", "m", replace(ROOM, decoding_seqs=1, room_seqs=0), 0.0)
    while d.next_timer(0.0) == 0.0:
        assert d.decide(0.0) == []
        assert d.lanes._taken == {lane.worker for lane in d.lanes if lane.is_taken}
    assert d.lanes._taken == {"a"}
    assert d.lanes["a"].record().seqs == 201


def test_reconfigured_gate_releases_held_requests() -> None:
    """Nothing else at the lane changes."""
    d = dispatcher("a", factor=1.0, report=decoding(0.0))
    d.arrive(request(1, arrival=0.0), 0.0)
    assert d.decide(0.0) == []
    d.configure(DelayGate(0.0), None, 100, {})
    assert keys(d.decide(0.0)) == {"a": [1]}


@pytest.mark.parametrize("session", ["", "s"])
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_requests_blocked_by_limit_or_suspect_go_to_new_worker(placement: str, session: str) -> None:
    """Their prompts are too short for late binding to save time at their worker's speed."""
    fast = LoadReport(0.5, decoding_seqs=2, room_tokens=1000, room_seqs=98, prefill_rate=30_000.0, submit_seen=1)
    for limited in (True, False):
        d = make_dispatcher(DelayGate(0.0), PLACEMENTS[placement](), 100)
        d.lane_up("a", "m", ROOM, 0.0)
        if limited:
            d.limit("a", 2)
        else:
            suspect = request(50)
            suspect.alone = True
            d.requeue(suspect, 0.0)
            d.decide(0.0)
        for key in range(10):
            d.arrive(QueuedRequest(key, "m", 10, 0.0, session=session), 0.0)
        d.decide(0.0)
        d.report("a", replace(fast, prefill_samples=1))
        waiting = len(d)
        assert waiting >= 8
        d.lane_up("b", "m", ROOM, 1.0)
        assert [(each.worker, len(each.requests)) for _ in range(3) for each in d.decide(1.0)] == [("b", waiting)]


def test_limited_worker_does_not_slow_placement() -> None:
    """Regression: prefix_aware compared all workers of a fleet while one had a limit or a suspect."""
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS["prefix_aware"](), 1000)
    for i in range(200):
        d.lane_up(f"w{i}", "m", replace(ROOM, decoding_seqs=1, waiting_tokens=i), 0.0)
    d.limit("w0", 1)
    compared: list[str] = []
    plain = PrefixAware.cost_s

    def cost_s(self: PrefixAware, request: QueuedRequest, lane: Lane, hit: int, now: float) -> tuple[float, int]:
        compared.append(lane.worker)
        return plain(self, request, lane, hit, now)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PrefixAware, "cost_s", cost_s)
        for key in range(100):
            d.arrive(request(key), 0.0)
    assert len(compared) <= 200
    assert "w0" not in compared


def test_held_lane_is_rechecked_until_open() -> None:
    """Regression: a timer that fires exactly then finds no stale report, and no other event may follow."""
    for began in (0.0, 0.1, 12345.678, 98765.4321):
        held = LoadReport(began, decoding_seqs=2, room_tokens=1000, room_seqs=10, last_prompt_latency_s=1e9)
        d = make_dispatcher(DelayGate(1e9, 1e9), RoundRobin())
        d.lane_up("a", "m", held, began)
        d.arrive(request(1, arrival=began), began)
        now = began + 0.01
        for _ in range(10):
            if d.decide(now):
                break
            timer = d.next_timer(now)
            assert timer is not None
            now = timer
        assert len(d) == 0


@pytest.mark.parametrize("policy", PLACEMENTS)
def test_each_call_binds_bounded_number_of_requests(policy: str) -> None:
    """When a worker drains, leaves or joins, each call binds a bounded number of requests, and all are bound soon."""
    d = make_dispatcher(DelayGate(0.0), PLACEMENTS[policy]())
    full = LoadReport(0.0, decoding_seqs=1, waiting_tokens=1000)
    for worker in "abc":
        d.lane_up(worker, "m", full, 0.0)
    for key in range(3000):
        d.arrive(request(key, tokens=10), 0.0)
    bound: list[int] = []
    counted = Lane.bind

    def bind(lane: Lane, request: QueuedRequest, *, first: bool = False) -> None:
        bound[-1] += 1
        counted(lane, request, first=first)

    events: list[Callable[[], object]] = [
        lambda: d.lane_draining("a", 1.0),
        lambda: d.lane_ready("a", 1.0),
        lambda: d.lane_down("b", 1.0),
        lambda: d.lane_down("c", 1.0),
        lambda: d.lane_down("a", 1.0),
        lambda: d.lane_up("d", "m", full, 1.0),
        lambda: d.lane_up("e", "m", full, 1.0),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Lane, "bind", bind)
        for event in events:
            bound.append(0)
            event()
            for _ in range(3000):
                bound.append(0)
                d.decide(1.0)
                if d.next_timer(1.0) != 1.0:
                    break
            lanes = [lane for lane in d.lanes if lane.ready]
            assert sum(len(lane) for lane in lanes) == (3000 if lanes else 0)
    assert max(bound) <= 48
    assert d.assignment.placement.moves_waiting or min(map(len, d.lanes)) > 500


def test_decision_checks_only_changed_or_due_lanes() -> None:
    """In a fleet of 300 workers with closed gates, one report costs as much as in a fleet of 3."""
    workers = [f"w{i}" for i in range(300)]
    d = dispatcher(*workers, factor=1.0, capacity=300, report=decoding(0.0))
    for key in range(300):
        d.arrive(request(key, arrival=0.0), 0.0)
    assert d.decide(0.0) == []
    assert len(d.assignment.take_changed_records()) == 300
    looked: list[str] = []
    plain = Lane.opens_in

    def opens_in(lane: Lane, now: float, gate: DelayGate) -> float:
        looked.append(lane.worker)
        return plain(lane, now, gate)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Lane, "opens_in", opens_in)
        d.report("w7", decoding(0.01))
        assert d.decide(0.01) == []
        assert d.next_timer(0.01) == pytest.approx(0.1, abs=1e-3)
        assert looked == ["w7"]
        d.cancel(9, 0.0)
        d.decide(0.02)
        assert d.assignment.take_changed_records() == {"w9"}
    timer = d.next_timer(0.02)
    assert timer is not None
    sizes: list[int] = []
    while sum(sizes) < 299:
        sizes.append(sum(len(release.requests) for release in d.decide(timer)))
        assert 0 < sizes[-1] <= 64
        assert d.next_timer(timer) == (timer if sum(sizes) < 299 else None)
