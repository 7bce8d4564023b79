"""Random events against a model: no request is lost, sent twice or left waiting for ever."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.delay_gate import DelayGate
from common.errors import HopelessDeadlineError, QueueFullError
from router.scheduling import assignment
from router.scheduling import dispatcher as dispatcher_module
from router.scheduling.dispatcher import Release
from router.scheduling.lane import LaneRecord, lane_of
from router.scheduling.placement import PLACEMENTS, RoundRobin
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import LENGTHS, NUMERICS, TENANTS, WAIT_S, can_serve, make_dispatcher


class DispatcherMachine(RuleBasedStateMachine):
    """Random events against a model of waiting and released requests and of each worker's reports.

    Attributes:
        pieces: number of requests that one call handles; None for the default.
    """

    pieces: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        if self.pieces is not None:
            self.patched.setattr(assignment, "_PER_CALL", self.pieces)
            self.patched.setattr(dispatcher_module, "_ENDED_AT_ONCE", self.pieces)
            self.patched.setattr(dispatcher_module, "_RELEASED_PER_DECISION", self.pieces)

    def teardown(self) -> None:
        self.patched.undo()

    @property
    def is_worked_off(self) -> bool:
        return not (
            self.d._reassignments._returning
            or self.d._reassignments._vacating
            or self.d._reassignments._waking
            or self.d._reassignments._placing
        )

    @initialize(factor=st.sampled_from([0.0, 0.5, 4.0]))
    def begin(self, factor: float) -> None:
        self.d = make_dispatcher(DelayGate(factor), RoundRobin(), capacity=12, worker_wait_s=WAIT_S)
        self.now = 0.0
        self.next_key = 0
        self.waiting: dict[int, QueuedRequest] = {}
        self.up: dict[str, list[Release]] = {}
        self.released: dict[int, QueuedRequest] = {}
        self.went_to: dict[int, str] = {}
        self.closed: set[str] = set()
        # Workers used exclusively by one request, with that request.
        self.taken: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        # Each worker's record at its latest change.
        self.said: dict[str, LaneRecord] = {}

    @rule(
        tokens=st.integers(1, 40),
        timeout=st.none() | st.floats(0.01, 2.0),
        numerics=st.sampled_from([None, None, "x", "y"]),
        more=st.integers(0, 15),
        tenant=st.sampled_from(TENANTS),
        session=st.sampled_from(["", "s"]),
        count=st.integers(1, 6),
    )
    def arrive(
        self,
        tokens: int,
        timeout: float | None,
        numerics: str | None,
        more: int,
        tenant: str,
        session: str,
        count: int,
    ) -> None:
        deadline = None if timeout is None else self.now + timeout
        for _ in range(count):
            self.next_key += 1
            new = QueuedRequest(
                self.next_key,
                "m",
                tokens,
                self.now,
                deadline,
                numerics=numerics,
                most_tokens=tokens + more,
                tenant=tenant,
                session=session,
            )
            self.take_in(new)

    def take_in(self, new: QueuedRequest) -> None:
        timeout = new.deadline
        try:
            dropped = self.d.arrive(new, self.now)
        except QueueFullError:
            assert len(self.waiting) >= 12
        except HopelessDeadlineError:
            assert timeout is not None
            assert self.up.keys() - self.closed
        else:
            if dropped is not None:
                assert len(self.waiting) >= 12
                gone = self.waiting.pop(dropped.request.key)
                assert gone.tenant != new.tenant
                assert not gone.is_retry
            self.waiting[new.key] = new

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def prepare_anew(self, data: st.DataObject) -> None:
        """A parked request is prepared for other weights; its key keeps its place."""
        parked = [each.key for each in self.d.assignment.parked if not each.is_retry]
        if parked:
            old = self.waiting[data.draw(st.sampled_from(parked))]
            assert self.d.cancel(old.key, self.now)
            new = self.waiting[old.key] = replace(old, lane=None, parked=None, numerics=None, most_tokens=old.tokens)
            self.d.rejoin(new, self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.waiting))))

    def drop(self, key: int) -> None:
        del self.waiting[key]
        assert self.d.cancel(key, self.now)

    @precondition(lambda self: self.released)
    @rule(data=st.data(), count=st.integers(1, 4), is_cancelled=st.booleans())
    def come_back(self, data: st.DataObject, count: int, is_cancelled: bool) -> None:
        """Some requests return; the last may be cancelled before it is placed."""
        for _ in range(min(count, len(self.released))):
            self.return_unstarted(key := data.draw(st.sampled_from(sorted(self.released))))
        if is_cancelled:
            self.drop(key)

    def return_unstarted(self, key: int) -> None:
        for worker in [worker for worker, taken in self.taken.items() if taken == key]:
            del self.taken[worker]
            self.d.share(worker, key)
        request = self.waiting[key] = self.released.pop(key)
        self.d.requeue(request, self.now)

    @rule(worker=st.sampled_from("abc"), is_cancelled=st.booleans())
    def toggle(self, worker: str, is_cancelled: bool) -> None:
        """A worker joins, or is lost with all its requests; the first of these may be cancelled at once."""
        if worker in self.up:
            del self.up[worker]
            had = [key for key in self.released if self.went_to[key] == worker]
            self.closed.discard(worker)
            self.taken.pop(worker, None)
            self.limits.pop(worker, None)
            self.d.lane_down(worker, self.now)
            for key in reversed(had):
                self.return_unstarted(key)
            if had and is_cancelled:
                self.drop(had[0])
        else:
            self.up[worker] = []
            self.said[worker] = LaneRecord(None, 0, 0)
            report = LoadReport(self.now, room_tokens=50, room_seqs=4)
            self.d.lane_up(worker, "m", report, self.now, NUMERICS[worker], max_model_len=LENGTHS[worker])

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

    @precondition(lambda self: self.released)
    @rule(data=st.data(), is_released=st.booleans())
    def suspect(self, data: st.DataObject, is_released: bool) -> None:
        """A request returns as a suspect; it may be released to an idle worker at once."""
        key = data.draw(st.sampled_from(sorted(self.released)))
        self.released[key].alone = True
        self.return_unstarted(key)
        if is_released:
            for worker, sent in self.up.items():
                self.d.report(worker, LoadReport(self.now, room_tokens=50, room_seqs=4, submit_seen=len(sent)))
            self.decide(0.4)

    @precondition(lambda self: self.up)
    @rule(data=st.data(), most=st.sampled_from([None, 1, 2, 4]))
    def limit(self, data: st.DataObject, most: int | None) -> None:
        worker = data.draw(st.sampled_from(sorted(self.up)))
        self.limits.pop(worker, None)
        if most is not None:
            self.limits[worker] = most
        self.d.limit(worker, most)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def acquit(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.taken)))
        self.d.share(worker, self.taken.pop(worker))

    @rule(
        factor=st.sampled_from([0.0, 0.5, 4.0]),
        policy=st.sampled_from([None, *PLACEMENTS]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def configure(self, factor: float, policy: str | None, weight: float) -> None:
        placement = None if policy is None else PLACEMENTS[policy]()
        self.d.configure(DelayGate(factor), placement, 12, {"": weight})

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
        for _ in range(200):
            self.pump()
            timer = self.d.next_timer(self.now)
            # The latest release may have left room for one more.
            if (timer is None or timer > self.now) and not self.d._agenda._changed:
                break
        else:
            raise AssertionError("there is always something left to be worked off")
        assert self.is_worked_off
        lanes = self.d.lanes
        assert all(lane.load.is_idle is False or not len(lane) or lane.worker in self.taken for lane in lanes)
        # No lane that could release a request is missed, and a held lane is checked at its time.
        for lane in lanes:
            if lane.ready and len(lane):
                if lane.is_open(self.now, self.d._gate):
                    tokens, seqs = lane._room()
                    # It may have opened just now, slightly before its scheduled time.
                    is_due = self.d._agenda._at.get(lane, math.inf) <= self.now + 1e-4
                    assert tokens <= 0 or seqs <= 0 or is_due
                elif not lane.is_taken:
                    assert self.d._agenda._at[lane] > self.now
            assert self.d.lanes[lane.worker].record() == self.said[lane.worker]

    @rule()
    def pump(self) -> None:
        for key in self.d.expire(self.now):
            deadline = self.waiting.pop(key).deadline
            assert deadline is not None
            assert deadline <= self.now
        parked = {key: request.parked for key, request in self.waiting.items()}
        for key in self.d.abandon(self.now):
            del self.waiting[key]
            since = parked[key]
            assert since is not None
            assert self.now - since >= WAIT_S
        releases = self.d.decide(self.now)
        for worker in self.d.assignment.take_changed_records() & self.up.keys():
            self.said[worker] = self.d.lanes[worker].record()
        for release in releases:
            assert all(can_serve(release.worker, r) for r in release.requests)
            arrivals = [r.key for r in release.requests]
            new = [r for r in release.requests if not r.is_retry]
            assert list(release.requests[len(arrivals) - len(new) :]) == new
            for tenant in TENANTS:
                own = [r.key for r in new if r.tenant == tenant]
                assert own == sorted(own)
            assert not self.released.keys() & set(arrivals)
            assert self.waiting.keys() >= set(arrivals)
            self.went_to.update(dict.fromkeys(arrivals, release.worker))
            self.released.update((r.key, r) for r in release.requests)
            assert release.worker not in self.taken
            if any(r.alone for r in release.requests):
                assert len(release.requests) == 1
                self.taken[release.worker] = arrivals[0]
            assert self.d.lanes[release.worker].load.num_seqs <= self.limits.get(release.worker, math.inf)
            self.up[release.worker].append(release)
            assert release.worker not in self.closed
            assert release.serial == len(self.up[release.worker])
            for key in arrivals:
                del self.waiting[key]

    @invariant()
    def bound_exactly_once(self) -> None:
        lanes = {*self.d.lanes, *self.d._reassignments._vacating}
        parked = [request.key for request in self.d.assignment.parked]
        returning = {r.key for r in self.d._reassignments._returning if r.lane is None}
        placing = returning & self.waiting.keys() - set(parked)
        assert sorted([*(r.key for lane in lanes for r in lane), *parked, *placing]) == sorted(self.waiting)
        for key, request in self.waiting.items():
            may_go = any(can_serve(w, request) for w in self.up.keys() - self.closed)
            assert (key in parked) == (not may_go) or not self.is_worked_off
            assert (lane := lane_of(request)) is None or lane.ready or not self.is_worked_off
        assert [r.parked for r in self.d.assignment.parked] == sorted(r.parked or 0.0 for r in self.d.assignment.parked)
        assert {r.key for r in self.d._queue} == set(self.waiting)
        here = {lane.worker: lane for lane in self.d.lanes}
        assert self.d.lanes._taken == {worker for worker, lane in here.items() if lane.is_taken}
        lanes_of_suspects = [r.lane for r in self.waiting.values() if r.alone and r.lane]
        wanted = {lane.worker for lane in lanes_of_suspects if here.get(lane.worker) is lane}
        assert self.d.lanes._taken == self.taken.keys() | wanted
        assert self.d.lanes._limited == self.limits.keys()
        for lane in lanes:
            assert lane.bound_tokens == sum(r.tokens for r in lane)
            assert lane.load.unseen_tokens == sum(g.tokens for g in lane.load._unseen)
            assert lane.load.unseen_seqs == sum(g.seqs for g in lane.load._unseen)


DispatcherMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestDispatcherMachine = DispatcherMachine.TestCase


class PiecemealMachine(DispatcherMachine):
    """The same with one request handled per call."""

    pieces = 1


PiecemealMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestPiecemealMachine = PiecemealMachine.TestCase
