"""Workloads from a seeded generator: under any configuration every stream is that of the sequence computed alone.

A workload that fails is repeated with `run_workload(its number)`.
"""

from __future__ import annotations

import random

import pytest

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.sampling_params import SamplingParams
from worker.engine_core import EngineCore
from worker.sequence import EndReason, Priority, Sequence
from worker.simulated import SimulatedRunner

VOCAB, EOS = 40, 0
NUM_WORKLOADS, NUM_LONG = 10_000, 200_000
MAX_STEPS = 3_000


def run_workload(number: int) -> None:
    """A few sequences that come and are aborted at random, in a small pool; then everything must be over."""
    rnd = random.Random(number)
    core, runner = _engine(rnd)
    waiting = [_sequence(rnd, core) for _ in range(rnd.randint(1, 8))]
    seqs = list(waiting)
    streams: dict[int, list[int]] = {seq.id: [] for seq in waiting}
    ends: dict[int, EndReason | None] = {}
    for _ in range(MAX_STEPS):
        if waiting and rnd.random() < 0.5:
            count = rnd.randint(1, len(waiting))
            core.add_group(waiting[:count])
            del waiting[:count]
        if rnd.random() < 0.03:
            core.abort(rnd.choice(seqs).id)
        for output in core.step().outputs:
            assert output.request_id not in ends
            streams[output.request_id] += output.output_tokens
            if output.finished:
                ends[output.request_id] = output.end_reason
        if not waiting and not core.has_unfinished():
            break
    core.scheduler.check_integrity()
    assert set(ends) == set(streams)
    assert core.load().free_blocks == core.load().total_blocks
    for seq in seqs:
        assert streams[seq.id] == runner.reference(seq.prompt_token_ids, len(streams[seq.id]), seq.seed)
        if ends[seq.id] is EndReason.LENGTH:
            assert len(streams[seq.id]) == min(seq.max_tokens, core.scheduler.max_model_len - seq.num_prompt_tokens)


def _engine(rnd: random.Random) -> tuple[EngineCore, SimulatedRunner]:
    size, k = rnd.choice([1, 16]), rnd.choice([0, 0, 1, 3])
    num_blocks = rnd.randint(3, 10) * (16 // size)
    config = Config(
        eos_token_id=EOS,
        kv_cache_block_size=size,
        num_kvcache_blocks=num_blocks,
        max_model_len=rnd.randint(20, num_blocks * size),
        enable_prefix_caching=rnd.random() < 0.7,
        max_num_seqs=rnd.randint(1, 6),
        max_num_batched_tokens=rnd.choice([1, 7, 24, 64, 500]),
        scheduling_policy=rnd.choice(SCHEDULING_POLICIES),
        max_consecutive_prefill_steps=rnd.choice([1, 4]),
        deferred_output=rnd.random() < 0.3,
        speculative_config=SpeculativeConfig(num_speculative_tokens=k) if k else None,
    )
    runner = SimulatedRunner(VOCAB, EOS, block_size=size, num_blocks=num_blocks, eos_every=30, num_drafts=k)
    return EngineCore(config, runner, clock=lambda: 0.0), runner


def _sequence(rnd: random.Random, core: EngineCore) -> Sequence:
    prompt = [5] * rnd.choice([0, 16, 40]) + [rnd.randrange(1, VOCAB) for _ in range(rnd.randint(1, 20))]
    return Sequence(
        prompt[: core.scheduler.max_model_len - 1],
        core.config.kv_cache_block_size,
        SamplingParams(max_tokens=rnd.randint(1, 30), ignore_eos=rnd.random() < 0.5),
        seed=rnd.randrange(3),
        priority=rnd.choice(list(Priority)),
    )


@pytest.mark.parametrize("tenth", range(10))
def test_workloads(tenth: int) -> None:
    for number in range(tenth, NUM_WORKLOADS, 10):
        run_workload(number)


@pytest.mark.long
def test_many_workloads() -> None:
    for number in range(NUM_WORKLOADS, NUM_LONG):
        run_workload(number)
