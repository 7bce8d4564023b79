"""Workloads from a seeded generator: the oracle finds no error in the engine.

A workload that fails is repeated with `run_workload(its number)`.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.covering import slow_but
from tests.unit.worker.engine.speculation.trial import run_workload

NUM_WORKLOADS, NUM_WEAK, NUM_FRESH = 2_500, 250, 200
# Of the long mode: FISSILE_WORKLOADS=first:end
LONG_RANGE = os.environ.get("FISSILE_WORKLOADS", f"{NUM_WORKLOADS}:200000")


@pytest.mark.parametrize("tenth", slow_but({0}, range(10)))
def test_workloads(tenth: int) -> None:
    num_preemptions = 0
    for number in range(tenth, NUM_WORKLOADS, 10):
        num_preemptions += run_workload(number).oracle.num_preemptions
    assert num_preemptions > 12  # what is rare is still there


@pytest.mark.slow
def test_workloads_whose_hashes_collide() -> None:
    for number in range(NUM_WEAK):
        run_workload(number, weak_hashes=True)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("part", range(4))
def test_fresh_workloads(part: int, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for i in range(NUM_FRESH):
        run_workload(draw.getrandbits(48), weak_hashes=i % 10 == 0)


@pytest.mark.long
def test_many_workloads() -> None:
    first, end = map(int, LONG_RANGE.split(":"))
    for number in range(first, end):
        run_workload(number, weak_hashes=number % 10 == 0)
