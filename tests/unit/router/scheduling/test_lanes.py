"""LaneAgenda: lanes that changed or are due, each once."""

from __future__ import annotations

import random

from router.scheduling.lane import Lane
from router.scheduling.lanes import LaneAgenda
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import make_lane


def test_lane_agenda_takes_due_lanes_first_and_once() -> None:
    a, b, c = (make_lane(name, "m", LoadReport(0.0)) for name in "abc")
    agenda = LaneAgenda()
    agenda.set_time(a, 2.0)
    agenda.set_time(b, 1.0)
    agenda.add([c, a])
    assert agenda.next_time() == 1.0
    assert list(agenda.take(2.0)) == [b, a, c]
    assert (agenda.next_time(), list(agenda.take(9.0))) == (None, [])
    agenda.set_time(a, 3.0)
    agenda.touch(b)
    agenda.forget(a)
    agenda.forget(b)
    assert (agenda.next_time(), list(agenda.take(9.0))) == (None, [])


def test_random_times_against_a_table() -> None:
    rnd = random.Random(1)
    lanes = [make_lane(str(i), "m", LoadReport(0.0)) for i in range(20)]
    agenda, known = LaneAgenda(), dict[Lane, float]()
    for _ in range(3000):
        lane, at = rnd.choice(lanes), rnd.choice([None, rnd.uniform(0, 100)])
        agenda.set_time(lane, at)
        known.pop(lane, None)
        if at is not None:
            known[lane] = at
        assert agenda.next_time() == min(known.values(), default=None)
        if rnd.random() < 0.05:
            now = rnd.uniform(0, 30)
            due = {lane for lane, at in known.items() if at <= now}
            assert set(agenda.take(now)) == due
            known = {lane: at for lane, at in known.items() if lane not in due}
    # Entries of removed lanes do not accumulate.
    assert len(agenda._heap) <= 2 * len(lanes) + 65
