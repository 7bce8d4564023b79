"""Why requests wait in a lane: gates, requests at the worker, own ones and those of other tenants."""

from __future__ import annotations

import pytest

from common.telemetry.names import Stage
from router.scheduling.lane_waits import LaneWaits, QueueWait


def test_closed_gate_counts_while_it_holds_only() -> None:
    waits, wait = LaneWaits(), QueueWait("mine", "t", 10)
    waits.hold(0.0, Stage.GATE_HOLD)
    waits.enter(wait, 1.0)
    waits.hold(3.0, Stage.GATE_BACKLOG)
    waits.hold(3.5, None)
    waits.release([wait], 7.0)
    held = {Stage.GATE_HOLD: 2.0, Stage.GATE_BACKLOG: 0.5}
    assert wait.shares() == {**held, Stage.PLACEMENT_WAIT: 0.0, Stage.OWN_QUEUE: 0.0}
    assert wait.blame is None


def test_long_prompt_at_the_worker_is_blamed_before_a_short_one() -> None:
    short, long, wait = QueueWait("s", "t", 10), QueueWait("l", "other", 990), QueueWait("m", "t", 1)
    waits = LaneWaits()
    for number, each in enumerate((short, long)):
        waits.enter(each, number)
        waits.release([each], number)
    waits.enter(wait, 1.0)
    waits.release([wait], 11.0)
    assert wait.own_s == pytest.approx(0.1)
    assert wait.blame is not None
    stage, blame = wait.blame
    assert (stage, blame.request_id, blame.tenant) == (Stage.QUEUE, "l", "other")
    assert blame.seconds == pytest.approx(9.9)


def test_request_that_had_left_the_worker_is_not_blamed() -> None:
    waits, gone, wait = LaneWaits(), QueueWait("gone", "t", 1000), QueueWait("mine", "t", 1)
    waits.enter(gone, 0.0)
    waits.release([gone], 0.0)
    gone.ended = 1.0
    waits.enter(wait, 1.0)
    waits.release([wait], 2.0)
    assert (wait.own_s, wait.blame) == (0.0, None)


def test_requests_of_one_release_do_not_blame_each_other() -> None:
    waits, pair = LaneWaits(), [QueueWait("a", "t", 5), QueueWait("b", "t", 5)]
    for wait in pair:
        waits.enter(wait, 0.0)
    waits.release(pair, 4.0)
    assert [wait.blame for wait in pair] == [None, None]
