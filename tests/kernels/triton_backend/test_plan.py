"""Plans of steps with drafts in flight: after the move they equal the plans of the final positions.

The host does not know how many drafts in flight are wrong, so the device moves the plan and the positions of sampled
tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.interface import AttentionMetaData, KVSpec, SampleParams, SamplingOps
from kernels.torch_backend.sampling import TorchSamplingOps
from kernels.triton_backend import plan
from kernels.triton_backend.graphs import TritonGraphs
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import StepPlan
from kernels.triton_backend.sample_tensors import SampleTensors
from kernels.triton_backend.sampling import TritonSamplingOps
from tests.unit.kernels.steps import Rows, metadata, scattered_blocks
from tests.unit.mutants import OBJECTIONS, Mutant

CPU = torch.device("cpu")
SIZE, LONGEST, NUM_BLOCKS = 4, 40, 64
NUM_STEPS = 40


def drawn_step(rnd: random.Random) -> tuple[AttentionMetaData, AttentionMetaData]:
    """A step with upper bounds, some of whose rows start earlier, and the same step with the final numbers."""
    lengths = [rnd.randint(1, LONGEST) for _ in range(rnd.randint(1, 5))]
    blocks = scattered_blocks(lengths, SIZE, NUM_BLOCKS, seed=rnd.randrange(100))
    counts = [rnd.choice([1, 1, rnd.randint(1, length)]) for length in lengths]
    num_rejected = [
        rnd.choice([0, rnd.randint(0, length - count)]) for length, count in zip(lengths, counts, strict=True)
    ]
    spans = list(zip(lengths, counts, num_rejected, blocks, strict=True))
    upper = metadata([Rows(end - count, end, own) for end, count, _, own in spans], SIZE)
    right = metadata([Rows(end - count - less, end - less, own) for end, count, less, own in spans], SIZE)
    return replace(upper, num_rejected=torch.tensor(num_rejected)), right


def check_step(rnd: random.Random) -> None:
    step, right = drawn_step(rnd)
    check_arrays(step.moved(SIZE), right)
    found, expected = (plan.plan(each, CPU, SIZE) for each in (step, right))
    for name in ("cu_seqlens_q", "seq_lens", "slot_mapping", "block_tables"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    # Grids follow from the bounds, which the host has.
    assert found.shape == replace(expected.shape, max_seqlen_k=int(step.seq_lens.max()))
    assert captured(step) == captured(right)


def check_steps() -> None:
    rnd = random.Random(0)
    for _ in range(NUM_STEPS):
        check_step(rnd)


def check_arrays(found: AttentionMetaData, right: AttentionMetaData) -> None:
    assert found.num_rejected is None
    for name in ("cu_seqlens_q", "seq_lens", "slot_mapping", "block_tables"):
        assert np.array_equal(getattr(found, name), getattr(right, name))


def captured(step: AttentionMetaData) -> list[list[int]]:
    """What the plan of a captured step of eight sequences with room for all says then, padding included."""
    cache = DeviceKVCache.allocate(KVSpec(1, 8), 1, NUM_BLOCKS, SIZE, torch.float32, CPU)
    graphs = TritonGraphs(CPU)
    made: StepPlan = graphs.plan(cache, 1, 8, LONGEST, LONGEST)
    graphs.write(made, step, cache)
    assert (made.slot_mapping[step.num_tokens :] == -1).all()
    assert not made.seq_lens[len(step.seq_lens) :].any()
    return [tensor.tolist() for tensor in (made.cu_seqlens_q, made.seq_lens, made.slot_mapping, made.block_tables)]


def check_sampling(rnd: random.Random, ops: SamplingOps) -> None:
    """Rows with random parameters, at positions that the host assumes too far ahead."""
    count, random_numbers = 12, np.random.default_rng(rnd.randrange(100))
    logits = torch.from_numpy(random_numbers.normal(0, 1, (count, 50)).astype(np.float32))
    params = SampleParams(
        random_numbers.choice([0.7, 1.0, 2.0], count).astype(np.float32),
        random_numbers.choice([0, 20], count),
        np.ones(count, np.float32),
        np.zeros(count, np.float32),
    )
    seeds, choices = random_numbers.integers(0, 2**63, count).astype(np.uint64), np.zeros(count, np.int64)
    num_rejected = random_numbers.integers(0, 5, count)
    # Beyond 32 bits too, of which the lower ones count.
    right = random_numbers.choice([0, 7, 2**31 - 2, 2**32 - 2], count)
    expected = ops.sample(logits.clone(), params, seeds, right, choices)
    found = ops.sample(logits.clone(), params, seeds, right + num_rejected, choices, torch.from_numpy(num_rejected))
    assert found.tolist() == expected.tolist()
    assert found.tolist() != ops.sample(logits.clone(), params, seeds, right + num_rejected, choices).tolist()


@pytest.mark.parametrize(
    "ops", [pytest.param(TritonSamplingOps(CPU), marks=pytest.mark.slow), TorchSamplingOps()], ids=["triton", "torch"]
)
def test_tokens_are_drawn_at_their_own_positions(ops: SamplingOps) -> None:
    rnd = random.Random(0)
    for _ in range(3):
        check_sampling(rnd, ops)


def test_moved_plan_equals_plan_of_final_positions() -> None:
    check_steps()


def test_plan_without_late_sequences_is_unchanged() -> None:
    step = metadata([Rows(3, 5, [1, 2])], SIZE)
    assert step.moved(SIZE) is step


MUTANTS = [
    Mutant("keys stay", plan, "_move", "plan.seq_lens[: len(num_rejected)].sub_(num_rejected)", "pass"),
    Mutant("slots stay", plan, "_move", "rows[1] - num_rejected.index_select(0, sequences)", "rows[1]"),
    Mutant("the first one's", plan, "_move", "num_rejected.index_select(0, sequences)", "num_rejected[0]"),
    Mutant("the first table", plan, "_move", "sequences, plan.block_tables", "0 * sequences, plan.block_tables"),
    Mutant(
        "keys stay on the host",
        AttentionMetaData,
        "moved",
        "self.seq_lens - self.num_rejected.numpy()",
        "self.seq_lens",
    ),
    Mutant("slots stay on the host", AttentionMetaData, "moved", "step.slot_mapping =", "blocks ="),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    with mutant.applied(), pytest.raises(OBJECTIONS):
        check_steps()


def test_noise_of_other_position_is_detected() -> None:
    mutant = Mutant("positions stay", SampleTensors, "moved", " - num_rejected.to(torch.int32)", "")
    with mutant.applied(), pytest.raises(OBJECTIONS):
        check_sampling(random.Random(0), TritonSamplingOps(CPU))
