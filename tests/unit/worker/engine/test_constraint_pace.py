"""Sequences with slow masks do not make others wait in every step."""

from __future__ import annotations

import pytest

from common.config import SCHEDULING_POLICIES, Config
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatchOutput
from worker.engine.constraint_pace import FREE_S, SHARE, ConstraintPace
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence

MASK_S, STEP_S = 0.03, 0.002


def test_slow_masks_share_one_budget() -> None:
    pace, running = ConstraintPace(), [1, 2, 3, 4]
    pace.charge({1: FREE_S}, FREE_S, now=5.0)
    assert pace.held(5.001, running) == frozenset()
    pace.charge({1: 0.01, 2: 0.02}, 0.03, now=5.0)
    assert pace.held(5.001, running) == {1, 2}
    assert pace.held(5.0 + 0.0101 / SHARE, running) == {2}
    pace.charge({3: 0.01}, 0.01, now=5.0 + 0.0101 / SHARE)
    assert pace.held(5.0 + 0.0301 / SHARE, running) == {3}
    assert pace.held(5.0 + 0.0401 / SHARE, running) == frozenset()


def test_pace_holds_none_when_all_are_slow() -> None:
    pace = ConstraintPace()
    pace.charge({1: 1.0, 2: 1.0}, 1.0, now=5.0)
    assert pace.held(5.0, [1, 2, 3]) == {1, 2}
    assert pace.held(5.0, [1, 2]) == frozenset()
    assert pace.held(5.0, [3]) == frozenset()


def test_pace_ignores_small_mask_work() -> None:
    pace = ConstraintPace()
    for _ in range(1000):
        pace.charge({1: 0.001, 2: 0.001}, 0.002 / SHARE, now=0.0)
    assert pace.held(0.0, [1, 2, 3]) == frozenset()


def steps(policy: str, slow: set[int], seqs: list[Sequence]) -> tuple[float, dict[int, int]]:
    """Time until the first sequence has ended, and the tokens of each by then."""
    sched = Scheduler(Config(num_kvcache_blocks=200, max_model_len=512, eos_token_id=0, scheduling_policy=policy))
    sched.add_group(seqs)
    now = 0.0
    while not seqs[0].is_finished:
        scheduled = sched.schedule(now)
        assert scheduled is not None
        batch, rows = scheduled
        spent = {seq_id: MASK_S for seq_id in rows if seq_id in slow and batch.total_seqs_num_decode}
        now += max([STEP_S, sum(spent.values())])
        sched.record_step(batch, max([STEP_S, sum(spent.values())]))
        finals = (seq_id for seq_id, final in zip(batch.req_ids, batch.is_final, strict=True) if final)
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(finals, (7,))
        sched.postprocess(rows.values(), ScheduledBatchOutput(tokens, slow_constraints=spent), batch=batch, now=now)
        sched.check_integrity()
    return now, {seq.id: len(seq.output_tokens) for seq in seqs}


def sequences(count: int) -> list[Sequence]:
    return [Sequence([5, 6, 7], 16, SamplingParams(max_tokens=400), id=i) for i in range(count)]


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_neighbour_keeps_nine_tenths_of_its_rate_beside_slow_masks(policy: str) -> None:
    """Steps take 2 ms, and each mask of the four other sequences 30 ms; these sequences continue slowly."""
    alone, _ = steps(policy, set(), sequences(5))
    beside, tokens = steps(policy, {1, 2, 3, 4}, sequences(5))
    # Without the free time and the first step, before the scheduler knows the slow masks.
    assert beside - FREE_S - 4 * MASK_S <= alone / 0.9
    assert min(tokens.values()) > 0
    assert max(tokens[i] for i in range(1, 5)) < 40


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_slow_masks_are_not_held_back_alone(policy: str) -> None:
    """If all sequences have slow masks, every step decodes all of them."""
    taken, tokens = steps(policy, {0, 1}, sequences(2))
    assert set(tokens.values()) == {400}
    assert taken == pytest.approx(399 * 2 * MASK_S + STEP_S, rel=0.01)
