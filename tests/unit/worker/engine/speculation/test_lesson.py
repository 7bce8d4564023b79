"""A lesson in scheduling: its trace, its nine pitfalls, its acceptance criteria.

The runner here is arithmetic that raises when a batch is inconsistent. What needs a model is elsewhere: pitfalls 6 and
8 in test_model_traps.py, that one sequence alone gives the model's own tokens in tests/parity, and that a kernel reads
no block behind a sequence's end in tests/unit/kernels.
"""

from __future__ import annotations

import pytest

from common.config import MIXED, Config
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.simulation.runner import SimulatedRunner

VOCAB, EOS, SIZE = 1000, 1, 16
A, B, C = 10, 11, 12


class Lesson:
    """An engine under the policy `mixed`, and the batches that it has made."""

    def __init__(self, budget: int = 64) -> None:
        config = Config(num_kvcache_blocks=32, max_num_batched_tokens=budget, eos_token_id=EOS, scheduling_policy=MIXED)
        self.runner = SimulatedRunner(VOCAB, EOS, num_blocks=32)
        self.core = EngineCore(config, self, clock=lambda: 0.0)
        self.batches: list[ScheduledBatch] = []
        self.streams: dict[int, list[int]] = {}

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.batches.append(batch)
        return self.runner.forward(batch)

    def add(self, seq_id: int, length: int, max_tokens: int = 8) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens)
        seq = Sequence([(seq_id * 31 + i) % VOCAB for i in range(length)], SIZE, params, id=seq_id)
        self.core.add_request(seq)
        return seq

    def step(self) -> ScheduledBatch:
        result = self.core.step()
        for seq_id, tokens in result.new_tokens.items():
            self.streams.setdefault(seq_id, []).extend(tokens)
        return self.batches[-1]

    def trace(self) -> dict[int, int]:
        """One step, as a trace: how many tokens of which request."""
        batch = self.step()
        return dict(zip(batch.req_ids, batch.num_scheduled_tokens, strict=True))


def three() -> tuple[Lesson, list[Sequence], list[dict[int, int]]]:
    """The three requests of section 5.1, each arriving while those before it decode."""
    lesson = Lesson()
    seqs = [lesson.add(A, 8)]
    steps = [lesson.trace()]
    seqs.append(lesson.add(B, 32))
    steps.append(lesson.trace())
    seqs.append(lesson.add(C, 5))
    steps += [lesson.trace(), lesson.trace()]
    return lesson, seqs, steps


def slots_of(batch: ScheduledBatch) -> list[int]:
    """Every slot that the step writes."""
    rows = zip(batch.block_tables, batch.num_computed_tokens, batch.context_lens, strict=True)
    return [table[p // SIZE] * SIZE + p % SIZE for table, start, end in rows for p in range(start, end)]


def test_trace_of_lesson() -> None:
    _, _, steps = three()
    assert steps == [{A: 8}, {A: 1, B: 32}, {A: 1, B: 1, C: 5}, {A: 1, B: 1, C: 1}]


def test_acceptance_a_single_sequence_equals_reference() -> None:
    lesson = Lesson()
    seq = lesson.add(A, 8, max_tokens=20)
    while lesson.core.has_unfinished():
        lesson.step()
    assert lesson.streams[A] == lesson.runner.reference(seq.prompt_token_ids, 20)


def test_trace_with_arrivals_of_lesson() -> None:
    """A at step 0, B at step 10, C at step 15: whoever decodes goes on in every step."""
    lesson = Lesson()
    lesson.add(A, 8, max_tokens=40)
    steps = [lesson.trace() for _ in range(10)]
    lesson.add(B, 32, max_tokens=40)
    steps += [lesson.trace() for _ in range(5)]
    lesson.add(C, 5, max_tokens=40)
    steps += [lesson.trace() for _ in range(3)]
    assert steps == [
        {A: 8},
        *[{A: 1}] * 9,
        {A: 1, B: 32},
        *[{A: 1, B: 1}] * 4,
        {A: 1, B: 1, C: 5},
        *[{A: 1, B: 1, C: 1}] * 2,
    ]


def test_acceptance_b_and_c_mixed_step_keeps_tokens_of_each() -> None:
    lesson, seqs, _ = three()
    while lesson.core.has_unfinished():
        lesson.step()
    for seq in seqs:
        assert lesson.streams[seq.id] == lesson.runner.reference(seq.prompt_token_ids, 8)
        assert seq.leave_reason == "max_tokens"
    assert any(batch.total_seqs_num_decode and batch.total_seqs_num_prefill for batch in lesson.batches)


def test_pitfall_1_a_prefill_moves_on_by_all_it_computed() -> None:
    lesson = Lesson()
    seq = lesson.add(B, 32)
    lesson.step()
    assert seq.num_computed_tokens == 32


def test_pitfall_2_nothing_is_computed_twice() -> None:
    lesson, seqs, _ = three()
    while lesson.core.has_unfinished():
        lesson.step()
    for seq in seqs:
        rows = [(b, b.req_ids.index(seq.id)) for b in lesson.batches if seq.id in b.req_ids]
        positions = [p for b, i in rows for p in range(b.num_computed_tokens[i], b.context_lens[i])]
        assert positions == list(range(seq.num_tokens - 1))


def test_pitfall_3_a_prefill_consumes_the_next_chunk_of_the_prompt() -> None:
    lesson = Lesson(budget=12)
    seq = lesson.add(B, 32)
    chunks = [lesson.step().scheduled_tokens[0] for _ in range(3)]
    assert [token for chunk in chunks for token in chunk] == seq.prompt_token_ids


def test_pitfall_4_block_tables_are_not_padded() -> None:
    lesson, seqs, _ = three()
    assert lesson.batches[-1].block_tables == [seq.block_table for seq in seqs]
    for batch in lesson.batches:
        assert [len(table) for table in batch.block_tables] == [-(-length // SIZE) for length in batch.context_lens]
        blocks = [block for table in batch.block_tables for block in table]
        assert len(blocks) == len(set(blocks))


def test_pitfall_5_no_slot_is_written_twice() -> None:
    lesson, seqs, _ = three()
    while lesson.core.has_unfinished():
        lesson.step()
    written = [slot for batch in lesson.batches for slot in slots_of(batch)]
    assert len(written) == len(set(written)) == sum(seq.num_tokens - 1 for seq in seqs)
    for batch in lesson.batches:
        assert len(set(batch.req_ids)) == len(batch.req_ids)


def test_pitfall_6_every_row_has_its_own_history() -> None:
    lesson = Lesson()
    params = SamplingParams(max_tokens=8, repetition_penalty=1.5)
    seqs = [Sequence(list(range(1, n + 1)), SIZE, params, id=i) for i, n in ((A, 8), (B, 32), (C, 5))]
    for seq in seqs:
        lesson.core.add_request(seq)
    lesson.step()
    known = [(seq.prompt_token_ids, seq.completion_token_ids) for seq in seqs]
    histories = lesson.step().histories
    assert [(h.prompt_ids.tolist(), h.output_ids) for _, h in sorted(histories.items())] == known


def test_pitfall_7_an_end_of_sequence_id_is_no_padding() -> None:
    lesson = Lesson()
    seq = Sequence([0, 0, EOS], SIZE, SamplingParams(max_tokens=4), id=A)
    lesson.core.add_request(seq)
    while lesson.core.has_unfinished():
        lesson.step()
    assert seq.leave_reason == "max_tokens"
    assert seq.token_ids[:3] == [0, 0, EOS]


def test_pitfall_8_every_row_is_sampled() -> None:
    lesson, seqs, _ = three()
    assert [batch.is_final for batch in lesson.batches] == [[True], [True] * 2, [True] * 3, [True] * 3]
    assert [len(lesson.streams[seq.id]) for seq in seqs] == [4, 3, 2]


@pytest.mark.parametrize("length", [1, 16, 17, 32])
def test_pitfall_9_a_fresh_prompt_has_blocks_for_all_it_computes(length: int) -> None:
    lesson = Lesson(budget=12)
    seq = lesson.add(A, length, max_tokens=2)
    batch = lesson.step()
    assert len(seq.block_table) == -(-length // SIZE)
    assert batch.block_tables[0] == seq.block_table[: -(-batch.context_lens[0] // SIZE)]


def test_pitfall_9_a_decode_has_a_slot_for_its_token() -> None:
    lesson = Lesson()
    lesson.add(A, 15, max_tokens=4)
    assert [len(lesson.step().block_tables[0]) for _ in range(4)] == [1, 1, 2, 2]
