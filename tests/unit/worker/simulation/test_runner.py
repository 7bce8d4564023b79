"""The simulated runner detects errors that a real model would silently compute with."""

from __future__ import annotations

import pytest

from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import InconsistentBatchError, SimulatedRunner

SIZE = 4


def runner(eos_every: int = 0) -> SimulatedRunner:
    return SimulatedRunner(50, 0, block_size=SIZE, num_blocks=8, eos_every=eos_every)


def step(sim: SimulatedRunner, *rows: tuple[Sequence, int]) -> dict[int, tuple[int, ...]]:
    """Runs one batch of (sequence, number of tokens) and moves the sequences on."""
    seqs = {seq.id: seq for seq, _ in rows}
    counts = [count for _, count in rows]
    out = sim.forward(ScheduledBatch(seqs, counts, sum(counts)))
    for seq, count in rows:
        seq.num_computed_tokens += count
        for token in out.token_ids.get(seq.id, ()):
            seq.append_token(token)
    return out.token_ids


def sequence(tokens: list[int], table: list[int], seed: int = 0) -> Sequence:
    seq = Sequence(tokens, SIZE, seed=seed)
    seq.block_table = table
    return seq


def test_tokens_do_not_depend_on_chunks_or_company() -> None:
    alone, chunked, other = sequence([1, 2, 3, 4, 5], [0, 1]), sequence([1, 2, 3, 4, 5], [2, 3]), sequence([9], [4])
    sim = runner()
    step(sim, (alone, 5))
    assert step(sim, (chunked, 3), (other, 1)).keys() == {other.id}  # a chunk that is not final samples nothing
    step(sim, (chunked, 2))
    step(sim, (alone, 1), (chunked, 1))
    assert alone.output_tokens == chunked.output_tokens == sim.reference([1, 2, 3, 4, 5], 2)
    assert sim.reference([1, 2, 3, 4, 5], 8, seed=1) != sim.reference([1, 2, 3, 4, 5], 8)
    assert sim.reference([1, 2, 3, 4, 5], 8, choice=1) != sim.reference([1, 2, 3, 4, 5], 8)


def test_eos_rate_follows_option() -> None:
    never, often = runner().reference([1], 400), runner(eos_every=10).reference([1], 400)
    assert never.count(0) == 0
    assert 15 < often.count(0) < 80
    with pytest.raises(ValueError, match="vocab_size"):
        SimulatedRunner(1, 0)


def test_simulated_runner_detects_block_of_another_prefix() -> None:
    sim = runner()
    step(sim, (sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2]), 9))
    right = sequence([1, 2, 3, 4, 5, 6, 7, 8, 0], [0, 1, 3])
    right.num_computed_tokens = 8
    step(sim, (right, 1))
    step(sim, (sequence([2, 2, 3, 4], [4]), 4))
    wrong = sequence([2, 2, 3, 4, 5, 6, 7, 8, 0], [4, 1, 5])  # same second block, other first
    wrong.num_computed_tokens = 8
    with pytest.raises(InconsistentBatchError, match="another prefix"):
        step(sim, (wrong, 1))


def test_simulated_runner_detects_overwritten_partial_block() -> None:
    sim = runner()
    victim = sequence([1, 2, 3], [0])
    step(sim, (victim, 3))
    step(sim, (sequence([5, 6], [0]), 2))
    with pytest.raises(InconsistentBatchError, match="another prefix"):
        step(sim, (victim, 1))


def test_malformed_batches_are_refused() -> None:
    unwritten = sequence([1, 2, 3, 4, 5], [0, 1])
    unwritten.num_computed_tokens = 4
    for seq, count, problem in [
        (sequence([1, 2, 3, 4, 5], [0]), 5, "1 blocks for 5 tokens"),
        (sequence([1], [8]), 1, "outside the pool"),
        (sequence([1], [0]), 0, "0 tokens"),
        (unwritten, 1, "another prefix"),
    ]:
        with pytest.raises(InconsistentBatchError, match=problem):
            step(runner(), (seq, count))
    with pytest.raises(InconsistentBatchError, match="writes a block"):
        step(runner(), (sequence([1], [0]), 1), (sequence([2], [0]), 1))


def test_unchecked_runner_gives_equal_tokens_and_ignores_errors() -> None:
    sim = SimulatedRunner(50, 0, block_size=SIZE, num_blocks=8, check_contexts=False)
    first, second = sequence([1, 2, 3, 4, 5], [0, 1]), sequence([1, 2, 3, 4, 6, 7], [0, 2])
    step(sim, (first, 3))
    step(sim, (first, 2))
    second.num_computed_tokens = 4  # shares the first block
    step(sim, (first, 1), (second, 2))
    step(sim, (first, 1), (second, 1))
    assert first.output_tokens == sim.reference([1, 2, 3, 4, 5], 3)
    assert second.output_tokens == sim.reference([1, 2, 3, 4, 6, 7], 2)
    wrong = sequence([2, 2, 2, 2, 5], [0, 3])
    wrong.num_computed_tokens = 4
    step(sim, (wrong, 1))
    assert wrong.output_tokens == sim.reference([1, 2, 3, 4, 5], 1)


def test_step_time_equals_cost_model_including_own_work() -> None:
    now, waited = [100.0], list[float]()

    def clock() -> float:
        now[0] += 0.25  # each look at the clock, so the work between two takes as long
        return now[0]

    sim = SimulatedRunner(50, 0, FixedCost(1.0, 0.5), block_size=SIZE, clock=clock, sleep=waited.append)
    step(sim, (sequence([1, 2, 3], [0]), 3), (sequence([4], [1]), 1))
    assert waited == [pytest.approx(1.0 + 4 * 0.5 - 0.25)]
    quick = SimulatedRunner(50, 0, FixedCost(0.1), block_size=SIZE, clock=clock, sleep=waited.append)
    step(quick, (sequence([1], [0]), 1))
    assert len(waited) == 1
