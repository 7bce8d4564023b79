"""Placement over real engines in virtual time: prefix affinity saves prefill, and every request is answered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from router.scheduling.placement import PLACEMENTS
from tests.bench.router.fleet import FleetRun, Result, Workload, spread
from worker.simulation.cost_model import INSTANT, CostModel, FixedCost, StepWork
from worker.simulation.presets import cost_model

# 16 prefixes of 64 blocks; a worker's pool holds about 5 beside its running sequences.
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


@dataclass(frozen=True)
class Slower(FixedCost):
    """A worker slower than another by a factor."""

    cost: CostModel = INSTANT
    times: float = 1.0

    def step_s(self, work: StepWork) -> float:
        return self.times * self.cost.step_s(work)


def test_slower_worker_gets_proportionally_fewer_requests() -> None:
    fast = cost_model("mi300x-llama-8b")
    costs: list[CostModel] = [fast, fast, fast, Slower(cost=fast, times=3.0)]
    # 120 000 tokens a second: nine tenths of what 3 1/3 such workers compute.
    workload = Workload(requests=300, rate=60.0, prefixes=1, prefix_tokens=0, own_tokens=2000, output_tokens=2)
    result = FleetRun("prefix_aware", costs, num_blocks=4000).run(workload)
    counts = Counter(outcome.worker for outcome in result.outcomes)
    fast_share = sum(counts[f"w{i}"] for i in range(3)) / 3
    assert 0.1 * fast_share < counts["w3"] < 0.5 * fast_share
    assert min(counts[f"w{i}"] for i in range(3)) > 0.7 * fast_share


def test_hot_prefix_spreads_until_every_worker_hits() -> None:
    """Three times the rate of one worker with the prefix cached: about 40 000 tokens per second."""
    workload = Workload(requests=360, rate=300.0, prefixes=1, prefix_tokens=2048, own_tokens=400, output_tokens=4)
    result = FleetRun("prefix_aware", [cost_model("mi300x-llama-8b")] * 8, num_blocks=4000, num_routers=2).run(workload)
    workers = Counter(outcome.worker for outcome in result.outcomes)
    assert len([worker for worker, count in workers.items() if count >= 20]) >= 3
    computed = [outcome for outcome in result.outcomes if outcome.cached_tokens < 2048]
    assert len(computed) <= 2 * len(workers) + 10
    assert all(outcome.cached_tokens >= 2048 for outcome in result.outcomes[len(result.outcomes) // 4 :])
    assert result.ttft_s(0.99) < 0.25


def test_router_hits_prefix_warmed_by_another_router() -> None:
    workload = Workload(requests=60, rate=10.0, prefixes=4, prefix_tokens=1024, own_tokens=40, output_tokens=2)
    result = FleetRun("prefix_aware", [cost_model("mi300x-llama-8b")] * 4, num_blocks=2000, num_routers=4).run(workload)
    assert sum(outcome.cached_tokens < 1024 for outcome in result.outcomes) <= 5
