"""A prompt delays the streams beside it by at most a slice, once the worker knows its speed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import MIXED, PREFILL_FIRST, Config
from common.params.sampling_params import SamplingParams
from tests.unit.mutants import Mutant, assert_noticed
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.prefill_meter import PrefillMeter
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence

MAX_TOKENS = 1024
SLICE_S = 0.25
PROMPT_TOKENS = 3000
# Returns the seconds of a step for its prompt tokens and its decodes.
Machine: TypeAlias = Callable[[int, int], float]


def roofline(decode_s: float, token_s: float) -> Machine:
    """A machine that reads the weights once per step and computes at the same time."""
    return lambda prompts, decodes: max(decode_s, (prompts + decodes) * token_s)


def additive(decode_s: float, token_s: float) -> Machine:
    """A machine that reads the weights and then computes the prompts."""
    return lambda prompts, decodes: decode_s + prompts * token_s


MACHINES = {
    "two cores": roofline(0.06, 0.003),
    "slow cores": roofline(0.6, 0.03),
    "additive": additive(0.06, 0.003),
    "GPU": additive(0.02, 0.0001),
}
DECODE_S = {"two cores": 0.06, "slow cores": 0.6, "additive": 0.06, "GPU": 0.02}


@dataclass(frozen=True)
class Run:
    """The steps from a prompt's arrival to its first token.

    Attributes:
        chunks: prompt tokens and seconds of each step with prompt tokens.
        gaps: seconds between the ends of two steps that decode.
        seconds: time to the prompt's first token.
    """

    chunks: list[tuple[int, float]]
    gaps: list[float]
    seconds: float


def run(machine: Machine, slice_s: float, *, policy: str = MIXED, num_streams: int = 4, noise: float = 0.0) -> Run:
    """Simulates a long prompt beside `num_streams` streams."""
    rnd = random.Random(0)
    config = Config(
        num_kvcache_blocks=7000,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=8,
        scheduling_policy=policy,
        prefill_slice_s=slice_s,
    )
    sched, now = Scheduler(config), 0.0

    def step() -> tuple[ScheduledBatch, float]:
        scheduled = sched.schedule(now)
        assert scheduled is not None
        batch, seqs = scheduled
        seconds = machine(batch.total_tokens_num_prefill, batch.total_tokens_num_decode) * (1 + noise * rnd.random())
        sched.record_step(batch, seconds)
        final = [i for i, last in zip(batch.req_ids, batch.is_final, strict=True) if last]
        sched.postprocess(seqs.values(), ScheduledBatchOutput(dict.fromkeys(final, (9,))), batch=batch, now=now)
        return batch, seconds

    sched.add_group([Sequence([i] * 20, 16, SamplingParams(max_tokens=5000)) for i in range(1, 1 + num_streams)])
    for _ in range(20 if num_streams else 0):
        now += step()[1]
    long, begin, decoded = Sequence([99] * PROMPT_TOKENS, 16, SamplingParams(max_tokens=1)), now, now
    sched.add_group([long])
    chunks, gaps = list[tuple[int, float]](), list[float]()
    while not long.is_finished:
        batch, seconds = step()
        now += seconds
        if batch.total_tokens_num_prefill:
            chunks.append((batch.total_tokens_num_prefill, seconds))
        if batch.total_tokens_num_decode:
            gaps.append(now - decoded)
            decoded = now
    return Run(chunks, gaps, now - begin)


@pytest.mark.parametrize("name", MACHINES)
def test_streams_wait_at_most_one_slice_beside_long_prompt(name: str) -> None:
    found = run(MACHINES[name], SLICE_S)
    longest = max(SLICE_S, 5 * DECODE_S[name])
    # The first chunk is the smallest that measures the cost of prompts.
    assert found.chunks[0][0] <= MAX_TOKENS / 8
    assert max(found.gaps[1:]) <= 1.01 * longest
    # With a known speed the steps use the slice fully.
    assert max(found.gaps[1:]) >= min(0.9 * longest, 0.99 * max(run(MACHINES[name], 0.0).gaps))


@pytest.mark.parametrize("name", ["two cores", "slow cores"])
def test_slices_slow_long_prompt_by_at_most_tenth(name: str) -> None:
    assert run(MACHINES[name], SLICE_S).seconds <= 1.1 * run(MACHINES[name], 0.0).seconds


def test_lone_prompt_uses_full_steps() -> None:
    sizes = [tokens for tokens, _ in run(MACHINES["two cores"], SLICE_S, num_streams=0).chunks]
    assert set(sizes[:-1]) == {MAX_TOKENS}


def test_prefill_first_uses_slices() -> None:
    """`prefill_first` runs four prompt steps in a row, each no longer than a slice."""
    found = run(MACHINES["additive"], SLICE_S, policy=PREFILL_FIRST)
    assert max(seconds for _, seconds in found.chunks[1:]) <= 1.01 * max(SLICE_S, 5 * DECODE_S["additive"])
    assert max(found.gaps) <= 1.01 * (4 * max(SLICE_S, 0.3) + 0.12)


MUTANTS = [
    Mutant("no slice", PrefillMeter, "step_cost", "self._slice_s == 0", "True"),
    Mutant("a prompt's share is all of a step", PrefillMeter, "note", "duration_s - self._decode_s", "duration_s"),
]


@settings(max_examples=30)
@given(st.floats(0.001, 1.0), st.floats(1e-5, 0.1), st.floats(0.01, 2.0), st.floats(0.0, 0.5))
def test_no_gap_is_longer_than_a_slice(decode_s: float, token_s: float, slice_s: float, noise: float) -> None:
    """Holds on any machine, also a noisy one; the smallest chunk may take longer than the slice."""
    found = run(additive(decode_s, token_s), slice_s, noise=noise)
    longest = max(slice_s, 5 * decode_s, token_s * MAX_TOKENS / 64 + decode_s)
    # The known speed and decode time are means of noisy steps, hence the tolerance.
    assert max(found.gaps[2:], default=0.0) <= (1 + noise) ** 2 * 1.05 * longest


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    names, test = list(MACHINES), test_streams_wait_at_most_one_slice_beside_long_prompt
    assert_noticed(mutant, lambda number: test(names[number]), range(len(names)))
