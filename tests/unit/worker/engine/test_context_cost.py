"""Chunks of a long prompt shrink with its context, so that decodes beside it keep their rate."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import MIXED, PREFILL_FIRST, Config
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.prefill_meter import ContextCost
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence

TOKEN_S, PAIR_S, STEP_S = 50e-6, 7e-9, 0.002


def pairs(start: int, num_tokens: int) -> int:
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def duration(batch: ScheduledBatch) -> float:
    """Duration of a step of a small model, whose attention to 100,000 tokens costs 14 times its matrix products."""
    rows = zip(batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True)
    return STEP_S + sum(TOKEN_S * count + PAIR_S * pairs(start, count) for start, count in rows)


def run(policy: str, *, beside: bool, noise: float = 0.0) -> list[tuple[ScheduledBatch, float]]:
    """The steps that compute a prompt of 100,000 tokens, with how long each took; perhaps beside a stream."""
    rnd = random.Random(0)
    sched = Scheduler(
        Config(num_kvcache_blocks=7000, max_num_batched_tokens=2048, max_num_seqs=8, scheduling_policy=policy)
    )
    if beside:
        sched.add_group([Sequence([1] * 20, 16, SamplingParams(max_tokens=5000, ignore_eos=True))])
    steps: list[tuple[ScheduledBatch, float]] = []
    while True:
        if len(steps) == 3 * beside:
            long = Sequence([2] * 100_000, 16, SamplingParams(max_tokens=1))
            sched.add_group([long])
        scheduled = sched.schedule(0.0)
        assert scheduled is not None
        batch, seqs = scheduled
        seconds = duration(batch) * (1 + noise * rnd.random())
        sched.record_step(batch, seconds)
        final = [i for i, last in zip(batch.req_ids, batch.is_final, strict=True) if last]
        sched.postprocess(seqs.values(), ScheduledBatchOutput(dict.fromkeys(final, (9,))), batch=batch, now=0.0)
        steps.append((batch, seconds))
        if len(steps) > 3 and long.is_finished:
            return steps


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_stream_rate_holds_beside_long_prompt(noise: float) -> None:
    """The steps of a prompt of 100,000 tokens took ever longer, and a small stream beside it waited for them."""
    gaps = [seconds for batch, seconds in run(MIXED, beside=True, noise=noise) if batch.total_tokens_num_prefill][1:]
    assert max(gaps) < 4 * statistics.median(gaps)
    assert max(gaps) < 4 * gaps[0]


def test_prefill_first_rate_holds_beside_long_prompt() -> None:
    """Where steps of prompts and of decodes take turns."""
    steps = [seconds for batch, seconds in run(PREFILL_FIRST, beside=True) if batch.total_tokens_num_prefill > 20]
    assert max(steps) < 2 * steps[0]


def test_lone_prompt_uses_full_steps() -> None:
    """With no other sequence a prompt uses full steps."""
    sizes = [batch.total_tokens_num_prefill for batch, _ in run(MIXED, beside=False)]
    assert set(sizes[:-1]) == {2048}


def test_long_prompt_takes_equal_time_in_more_steps() -> None:
    """The same attention in smaller parts."""
    alone, beside = (sum(s for _, s in run(MIXED, beside=is_beside)) for is_beside in (False, True))
    assert beside < 1.2 * alone


@given(st.floats(0, 1 / 64), st.integers(0, 10**6), st.integers(1, 10**5), st.floats(0, 1e9))
def test_chunk_has_largest_affordable_size(weight: float, start: int, wanted: int, cost: float) -> None:
    costs = ContextCost()
    costs.weight = weight
    most = costs.most_tokens(start, wanted, cost)
    assert 0 <= most <= wanted
    assert costs.of(start, most) <= cost * (1 + 1e-6)
    assert most == wanted or costs.of(start, most + 1) >= cost * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_context_weight_is_estimated(seed: int) -> None:
    """Steps have any size, some are far too slow, and many short prompts follow."""
    rnd = random.Random(seed)
    costs, weight = ContextCost(), rnd.choice([0.0, 1e-5, 1e-4, 1e-3])
    for start in [*range(0, 100_000, 500), *[0] * 200]:
        count = rnd.randint(64, 512)
        tokens = count + weight * pairs(start, count)
        slow = 20.0 if rnd.random() < 0.02 else 1.0
        costs.note(count, pairs(start, count), 1e-4 * tokens * slow * (1 + 0.1 * rnd.random()))
    assert weight / 2 - 1e-6 <= costs.weight <= 2 * weight + 1e-5


def test_context_cost_stays_zero_without_samples() -> None:
    costs = ContextCost()
    for seconds in (1.0, 5.0, 0.1):
        costs.note(100, pairs(0, 100), seconds)
        assert costs.weight == 0
    costs.note(0, 0, 1.0)
    costs.note(100, pairs(10_000, 100), 0.0)
    assert costs.weight == 0


def test_one_follower_of_long_prompt_is_admitted_per_step() -> None:
    """After a long step too: looking up 6,250 cached blocks takes milliseconds, and 64 such lookups 459 ms."""
    config = Config(num_kvcache_blocks=7000, max_model_len=110_000, max_num_batched_tokens=8192, eos_token_id=0)
    sched, prompt = Scheduler(replace(config, enable_prefix_caching=True)), list(range(1, 100_001))
    seqs = [Sequence([*prompt, i, i, i], 16, SamplingParams(max_tokens=20), id=i) for i in range(1, 10)]
    sched.add_group(seqs[:1])
    admitted = list[int]()
    while not all(seq.first_token_time is not None for seq in seqs):
        if seqs[0].first_token_time is not None and not admitted:
            sched.add_group(seqs[1:])
        waiting = len(sched.waiting)
        scheduled = sched.schedule(0.0)
        assert scheduled is not None
        batch, rows = scheduled
        admitted += [waiting - len(sched.waiting)] if seqs[0].first_token_time is not None else []
        sched.record_step(batch, 10.0)
        finals = (seq_id for seq_id, final in zip(batch.req_ids, batch.is_final, strict=True) if final)
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(finals, (7,))
        sched.postprocess(rows.values(), ScheduledBatchOutput(tokens), batch=batch, now=0.0)
    assert all(seq.num_cached_tokens == 100_000 for seq in seqs[1:])
    assert max(admitted) == 1
    assert sum(admitted) == 8
