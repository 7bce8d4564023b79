"""Several answers to one prompt compute it once: full blocks are shared, the one that it ends in is copied.

That every answer is the one that it is alone is shown with models (tests/parity); that no slot is read which is not the
prompt's, by the oracle (test_workloads.py).
"""

from __future__ import annotations

import pytest

from common.config import SCHEDULING_POLICIES, Config
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.simulation.runner import SimulatedRunner

SIZE, POOL = 16, 64


def scheduler(**changes: object) -> Scheduler:
    given = {"num_kvcache_blocks": POOL, "kv_cache_block_size": SIZE, "enable_prefix_caching": True, **changes}
    return Scheduler(Config(**given))  # type: ignore[arg-type]


def answers(count: int, length: int, max_tokens: int = 4) -> list[Sequence]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=count)
    prompt = [7 * i % 50 for i in range(length)]
    return [Sequence(prompt, SIZE, params, seed=3, choice=i, shares_prompt=count > 1) for i in range(count)]


class Engine:
    """A scheduler on a runner that objects to foreign KV, and what its steps were like."""

    def __init__(self, sched: Scheduler) -> None:
        self.sched = sched
        self.runner = SimulatedRunner(50, 49, block_size=SIZE, num_blocks=POOL)
        self.batches: list[ScheduledBatch] = []

    def step(self, *, is_discarded: bool = False) -> ScheduledBatch | None:
        scheduled = self.sched.schedule(0.0)
        if scheduled is None:
            return None
        batch, seqs = scheduled
        if is_discarded:
            self.sched.discard(seqs.values(), batch)
        else:
            self.sched.postprocess(seqs.values(), self.runner.forward(batch), batch=batch, now=0.0)
            self.batches.append(batch)
        self.sched.check_integrity()
        return batch

    def finish(self, seqs: list[Sequence]) -> None:
        while self.step() is not None:
            pass
        for seq in seqs:
            expected = self.runner.reference(seq.prompt_token_ids, len(seq.output_tokens), seq.seed, seq.choice)
            assert seq.is_finished
            assert seq.output_tokens == expected

    @property
    def prompt_tokens(self) -> int:
        return sum(batch.total_tokens_num_prefill for batch in self.batches)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("length", [1, 2, SIZE - 1, SIZE, SIZE + 1, SIZE + 2, 3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 5])
@pytest.mark.parametrize("budget", [500, 12])
def test_answers_share_one_prompt_computation(policy: str, length: int, budget: int) -> None:
    """Each further answer computes one token of the prompt. All answers share the full blocks and own one block after
    them."""
    engine, seqs = Engine(scheduler(scheduling_policy=policy, max_num_batched_tokens=budget)), answers(8, length, 20)
    engine.sched.add_group(seqs)
    while sum(seq.first_token_time is not None for seq in seqs) < 8:
        engine.step()
    full = (length - 1) // SIZE
    held = {block for seq in seqs for block in seq.block_table[: full + 1]}
    # A prompt that ends with a block has no more than full ones, of which equal ones are held once.
    assert len(held) == (full + 8 if length % SIZE else full + 1)
    assert [seq.num_cached_tokens for seq in seqs] == [0] + [length - 1] * 7
    engine.finish(seqs)
    assert engine.prompt_tokens == length + 7
    assert sum(len(batch.block_copies) for batch in engine.batches) == (7 if (length - 1) % SIZE else 0)


def test_prompt_stays_cached_for_one_token_answers() -> None:
    engine, seqs = Engine(scheduler()), answers(8, 21, max_tokens=1)
    engine.sched.add_group(seqs)
    engine.finish(seqs)
    assert [batch.num_scheduled_tokens for batch in engine.batches] == [[21], [1] * 7]


def test_answers_share_no_blocks_without_cache_or_across_salts() -> None:
    engine, seqs = Engine(scheduler(enable_prefix_caching=False)), answers(4, 21)
    engine.sched.add_group(seqs)
    engine.finish(seqs)
    assert engine.prompt_tokens == 4 * 21
    engine, seqs = Engine(scheduler()), answers(4, 21)
    for seq, salt in zip(seqs, (b"a", b"b", b"a", b"b"), strict=True):
        seq.cache_salt, seq.hash_root = salt, salt[0]
    engine.sched.add_group(seqs)
    engine.finish(seqs)
    assert engine.prompt_tokens == 2 * (21 + 1)


def test_prompt_with_one_answer_caches_full_blocks_only() -> None:
    """A single answer neither waits for a last block nor keeps one."""
    engine, (first, second) = Engine(scheduler()), [answers(1, 21)[0] for _ in range(2)]
    engine.sched.add_group([first, second])
    engine.finish([first, second])
    assert [batch.num_scheduled_tokens for batch in engine.batches[:2]] == [[21], [5]]
    assert second.num_cached_tokens == SIZE


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_cancelled_first_answer_hands_prompt_to_next(steps: int) -> None:
    """Before the prompt is computed, another answer computes it; afterwards its block still serves without an owner."""
    engine, seqs = Engine(scheduler(max_num_batched_tokens=24)), answers(4, 40, 12)
    engine.sched.add_group(seqs)
    for _ in range(steps):
        engine.step()
    engine.sched.abort(seqs[0].id, now=0.0)
    engine.sched.check_integrity()
    engine.finish(seqs[1:])
    # Of the first one's two chunks of 24 and 16 tokens, a block of the first is left, or all of both.
    assert engine.prompt_tokens == {1: 24 + (40 - SIZE) + 2, 2: 40 + 3, 3: 40 + 3}[steps]


def test_copied_block_may_be_its_destination() -> None:
    """The pool has no other free block."""
    engine, seqs = Engine(scheduler(num_kvcache_blocks=3, max_model_len=40)), answers(3, 37, max_tokens=1)
    engine.sched.add_group(seqs)
    engine.finish(seqs)
    assert engine.prompt_tokens == 37 + 2
    assert engine.batches[1].block_copies[0].source == engine.batches[1].block_copies[0].target


def test_interrupted_step_discards_its_block_copies() -> None:
    engine, seqs = Engine(scheduler()), answers(3, 21)
    engine.sched.add_group(seqs)
    engine.step()
    batch = engine.step(is_discarded=True)
    assert batch is not None
    assert len(batch.block_copies) == 2
    assert [seq.num_cached_tokens for seq in seqs[1:]] == [SIZE, SIZE]
    engine.finish(seqs)


def test_preempted_answer_recomputes_its_tokens() -> None:
    engine, seqs = Engine(scheduler()), answers(3, 21, 12)
    engine.sched.add_group(seqs)
    for _ in range(4):
        engine.step()
    engine.sched.preempt(seqs[1])
    engine.finish(seqs)
    assert len(seqs[1].preempted_at) == 1


def test_answers_never_copy_nan_block() -> None:
    """The first one's step gave none, so the second computes the prompt, as it would alone."""
    sched, seqs = scheduler(), answers(3, 21)
    sched.add_group(seqs)
    batch, rows = sched.schedule(0.0) or pytest.fail("no step")
    sched.postprocess(rows.values(), ScheduledBatchOutput({seqs[0].id: (-1,)}), batch=batch, now=0.0)
    batch, rows = sched.schedule(0.0) or pytest.fail("no step")
    assert (batch.req_ids, batch.num_scheduled_tokens, batch.block_copies) == ([seqs[1].id], [21], [])


def test_flush_drops_kept_partial_blocks() -> None:
    engine, seqs = Engine(scheduler()), answers(2, 21, max_tokens=1)
    engine.sched.add_group(seqs[:1])
    engine.finish(seqs[:1])
    assert engine.sched.block_manager.flush() == 1
    engine.sched.check_integrity()
    engine.sched.add_group(seqs[1:])
    engine.finish(seqs[1:])
    assert engine.prompt_tokens == 2 * 21
