"""The oracle objects to engines that are wrong: to the seeds' rules and to further faults, within a few workloads."""

from __future__ import annotations

import pytest

from tests.unit.mutants import FAULTS, MUTANTS, OBJECTIONS, Mutant
from tests.unit.worker.engine.speculation.trial import run_workload
from worker.engine.block_manager import OutOfBlocksError

MOST_WORKLOADS = 400
# Traps outside these workloads: refusals, other parts of the service, faults without effect, a first output of two
# tokens, and as many sequences as a step has tokens (test_scheduler.py covers them).
_UNTRIED = {"t05", "t06", "t13", "t29", "t38", "t39", "t40", "t42", "t43", "t45", "prompts-starve"}
# The engine itself fails on these: a block taken from an empty pool or published too early, a second end of a
# sequence, and a column of a sequence that has left.
_BREAKS: dict[str, type[Exception]] = {
    **dict.fromkeys(("t03", "t20", "t41", "columns-kept"), LookupError),
    **dict.fromkeys(("t15", "t16"), OutOfBlocksError),
}


def run_workloads() -> None:
    for number in range(MOST_WORKLOADS):
        run_workload(number, weak_hashes=number % 4 == 3)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in MUTANTS + FAULTS if m.trap not in _UNTRIED], ids=lambda m: m.trap)
def test_oracle_catches_fault(mutant: Mutant) -> None:
    broken = [_BREAKS[mutant.trap]] if mutant.trap in _BREAKS else []
    with mutant.applied(), pytest.raises((*OBJECTIONS, *broken)):
        run_workloads()
