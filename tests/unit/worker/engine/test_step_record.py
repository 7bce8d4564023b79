"""The flight recorder: which steps it keeps, and that its records say what the runner was given."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.params.sampling_params import SamplingParams
from tests.unit.worker.engine import test_core
from tests.unit.worker.engine.small_engine import BLOCK, engine, prompts
from tests.unit.worker.engine.test_core import Clock, random_engine, random_outputs, random_sequence
from worker.engine.core import EngineDeadError
from worker.engine.sequence import Sequence
from worker.engine.step_record import RowKind, StepRecord, StepRing, StepRow


def record(number: int, num_rows: int = 1) -> StepRecord:
    ids = [10 * number + i for i in range(num_rows)]
    ones = [1] * num_rows
    return StepRecord(number, 0.5, 0.75, ids, [""] * num_rows, ones, ones, ones, 0, 3, 4, 0, 0, [])


@given(
    rows=st.lists(st.integers(0, 6), max_size=40),
    max_steps=st.integers(1, 8),
    max_rows=st.integers(1, 12),
    count=st.one_of(st.none(), st.integers(0, 12)),
)
@settings(max_examples=200, deadline=None)
def test_ring_keeps_longest_tail_within_bounds(
    rows: list[int], max_steps: int, max_rows: int, count: int | None
) -> None:
    ring = StepRing(max_steps, max_rows)
    for number, num_rows in enumerate(rows):
        ring.append(record(number, num_rows))
        kept = [each.number for each in ring.newest()]
        fitting = [
            first
            for first in range(number + 1)
            if number + 1 - first <= max_steps and sum(rows[first : number + 1]) <= max_rows
        ]
        assert kept == list(range(min(fitting, default=number), number + 1))
        newest = [each.number for each in ring.newest(count)]
        assert newest == (kept if count is None else kept[len(kept) - min(count, len(kept)) :])


@pytest.mark.parametrize("number", range(20))
def test_records_equal_batches_of_runner(number: int) -> None:
    rnd, clock = random.Random(number), Clock()
    core, runner = random_engine(rnd, clock)
    seqs = [random_sequence(rnd, core, clock.now) for _ in range(rnd.randint(1, 8))]
    num_tokens = sum(len(output.output_tokens) for output in random_outputs(rnd, core, clock, seqs))
    records = core.steps.newest()
    assert [each.number for each in records] == list(range(1, core.num_steps + 1))
    for step, batch in zip(records, runner.batches, strict=True):
        drafts = {seq_id: len(ids) for seq_id, ids in batch.scheduled_spec_decode_tokens.items()}
        rows = zip(batch.req_ids, batch.num_scheduled_tokens, batch.num_computed_tokens, strict=True)
        assert [(row.seq_id, row.num_tokens, row.num_computed) for row in step.rows()] == list(rows)
        kinds = [row.kind for row in step.rows()]
        assert kinds.count(RowKind.PREFILL) == batch.total_seqs_num_prefill
        assert {row.seq_id: row.num_tokens - 1 for row in step.rows() if row.kind is RowKind.VERIFY} == drafts
        assert step.waited is not None
        assert step.finished is not None
        assert step.scheduled <= step.launched <= step.waited <= step.finished
    assert sum(each.num_new_tokens for each in records) == num_tokens


def test_record_of_each_kind_of_row() -> None:
    step = StepRecord(1, 0.0, 0.0, [5, 6, 7], ["a", "", "b"], [1, 3, 40], [20, 30, 16], [0, 16, 16], 1, 3, 4, 0, 0, [])
    assert list(step.rows()) == [
        StepRow(5, "a", RowKind.DECODE, 1, 20, 0),
        StepRow(6, "", RowKind.VERIFY, 3, 30, 16),
        StepRow(7, "b", RowKind.PREFILL, 40, 16, 16),
    ]


def test_records_name_preempted_sequences_and_blocks_used() -> None:
    core = engine()
    seqs = [Sequence(prompt, BLOCK, SamplingParams(max_tokens=30)) for prompt in prompts(16)]
    core.add_group(seqs)
    while core.has_unfinished():
        core.step()
    records = core.steps.newest()
    preempted = [seq_id for each in records for seq_id in each.preempted]
    assert {seq.id: preempted.count(seq.id) for seq in seqs} == {seq.id: len(seq.preempted_at) for seq in seqs}
    assert preempted
    assert {each.total_blocks for each in records} == {5}
    assert min(each.free_blocks for each in records) == 0
    assert max(each.num_waiting for each in records) > 0


def test_failed_step_stays_unfinished_in_ring() -> None:
    core, runner = test_core.engine()
    core.add_group([Sequence([1, 2], BLOCK)])
    runner.fails = True
    with pytest.raises(EngineDeadError):
        core.step()
    failed = core.steps.newest()[0]
    assert failed.waited is not None
    assert failed.finished is None
    assert [row.num_tokens for row in failed.rows()] == [2]


def test_newest_steps_of_sequence_are_finished_bounded_and_behind_its_arrival() -> None:
    ring = StepRing()
    for number in range(1, 7):
        step = record(number, 2)
        step.seq_ids = [7, number]
        step.launched = float(number)
        step.finished = None if number == 6 else number + 0.5
        ring.append(step)
    assert [each.number for each in ring.newest_of(7, since=2.0, count=10)] == [2, 3, 4, 5]
    assert [each.number for each in ring.newest_of(7, since=0.0, count=2)] == [4, 5]
    assert [each.number for each in ring.newest_of(3, since=0.0, count=10)] == [3]
    assert ring.newest_of(9, since=0.0, count=10) == []
