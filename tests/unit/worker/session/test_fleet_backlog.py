"""What waits at all routers."""

from __future__ import annotations

from worker.session.fleet_backlog import FleetLanes


def test_maximum_age_and_sum_of_tokens() -> None:
    lanes = FleetLanes()
    assert (lanes.oldest_age_s(5.0), lanes.num_tokens) == (0.0, 0)
    lanes.report(1, oldest_age_s=0.5, num_tokens=10, num_seqs=1, now=100.0)
    lanes.report(2, oldest_age_s=0.25, num_tokens=5, num_seqs=2, now=101.0)
    assert (lanes.oldest_age_s(101.0), lanes.num_tokens) == (1.5, 15)
    lanes.report(1, oldest_age_s=0.0, num_tokens=0, num_seqs=0, now=101.0)
    assert (lanes.oldest_age_s(101.0), lanes.num_tokens) == (0.25, 5)
    lanes.remove(2)
    lanes.remove(2)
    assert (lanes.oldest_age_s(200.0), lanes.num_tokens) == (0.0, 0)
