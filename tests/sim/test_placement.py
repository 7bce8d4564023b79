"""Placement over real engines in virtual time: prefix affinity saves prefill, and every request is answered."""

from __future__ import annotations

import pytest

from router.placement import PLACEMENTS
from tests.bench.router.fleet import FleetRun, Result, Workload, spread
from worker.presets import cost_model

# 16 prefixes of 64 blocks; the pool of a worker holds about 5 beside what runs.
WORKLOAD = Workload(requests=160, rate=120.0, prefixes=16, prefix_tokens=1024, own_tokens=40, output_tokens=4)


def served(placement: str) -> Result:
    return FleetRun(placement, [cost_model("mi300x-llama-8b")] * 4, num_blocks=400).run(WORKLOAD)


@pytest.mark.parametrize("placement", ["least_loaded", "session"])
def test_every_request_ends(placement: str) -> None:
    result = served(placement)
    assert len(result.outcomes) == WORKLOAD.requests
    assert all(outcome.ended >= outcome.arrival + outcome.ttft_s > outcome.arrival for outcome in result.outcomes)


def test_prefix_aware_saves_twice_the_prefill_of_round_robin() -> None:
    assert {"prefix_aware", "round_robin"} <= set(PLACEMENTS)
    aware, in_turn = served("prefix_aware"), served("round_robin")
    assert aware.saved > 2 * in_turn.saved > 0
    assert aware.ttft_s(0.99) <= in_turn.ttft_s(0.99)
    fewest, most = spread(aware.outcomes)
    assert most < 3 * fewest
