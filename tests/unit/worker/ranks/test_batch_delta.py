"""Batches arrive at a rank as they were, whatever has been sent before."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.params.sampling_params import SamplingParams
from worker.engine.batch import BlockCopy, ScheduledBatch, ScheduledBatchOutput, SequenceColumns
from worker.engine.sequence import Sequence
from worker.ranks.batch_delta import BatchDecoder, BatchEncoder
from worker.ranks.frames import FrameReader, encode

SIZE = 4
PLAIN = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125)
STEERED = SamplingParams(repetition_penalty=2.0, min_tokens=3)
WEIGHED = SamplingParams(logprobs=2, prompt_logprobs=0, logprob_token_ids=(5,))
# Sequence, tokens to compute, whether its table is replaced (preemption), and whether the columns object is kept.
STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), min_size=1, unique=True), st.integers(1, 9), st.booleans()), max_size=12
)


class Pair:
    """The engine's encoder and a rank's decoder, joined by real frames."""

    def __init__(self, *batches_kept: int) -> None:
        self.encoder = BatchEncoder(*batches_kept)
        self.decoder = BatchDecoder()
        self.sizes: list[int] = []

    def send(self, batch: ScheduledBatch) -> ScheduledBatch:
        frame = encode(self.encoder.encode(batch))
        self.sizes.append(len(frame))
        (sent,) = FrameReader().feed(frame)
        return self.decoder.decode(*sent)


def view(batch: ScheduledBatch, last: ScheduledBatchOutput) -> dict[str, Any]:
    """Everything that a runner asks a batch for."""
    return {
        "fields": [as_lists(getattr(batch, name)) for name in NAMES],
        "sampling": {name: array.tolist() for name, array in vars(batch.sampling).items()},
        "logprob_params": as_lists(batch.columns.logprob_params),
        "tokens": as_lists(batch.input_tokens(last)),
        "flat": as_lists([batch.known_token_ids, batch.late_rows]),
        "histories": [
            (i, h.params, h.prompt_ids.tolist(), list(h.output_ids)) for i, h in batch.token_histories(last).items()
        ],
    }


NAMES = (
    *("req_ids", "num_scheduled_tokens", "num_computed_tokens", "context_lens", "is_final", "block_tables"),
    *("last_block_num_tokens", "num_cached_tokens", "temperatures"),
    *("total_tokens_num", "total_seqs_num_decode", "is_dummy_run", "is_plain_decode", "num_spec_step"),
    *(
        "from_last_output",
        "scheduled_spec_decode_tokens",
        "drafts_wanted",
        "feeds_draft_model",
        "next_token_ids",
        "targets",
        "is_greedy",
        "block_copies",
    ),
)


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, list | tuple) else value


def sequences() -> list[Sequence]:
    kinds = [PLAIN, STEERED, WEIGHED, STEERED]
    made = [Sequence([i + 1] * 3, SIZE, kinds[i % 4], seed=2**64 - 1 - i, choice=i) for i in range(6)]
    for i, seq in enumerate(made):
        seq.block_table = [100 * i]
    return made


@settings(max_examples=150)
@given(STEPS, st.sampled_from([1, 2, 64]))
def test_batches_arrive_unchanged(steps: list[tuple[list[int], int, bool]], batches_kept: int) -> None:
    seqs, pair = sequences(), Pair(batches_kept)
    columns: SequenceColumns | None = None
    last = ScheduledBatchOutput({seq.id: (9,) for seq in seqs})
    for members, count, replace in steps:
        rows = [seqs[i] for i in members]
        for seq in rows:
            seq.token_ids += [seq.id % 50] * count
            if replace:
                seq.num_computed_tokens = 0
                seq.block_table = [block + 7 for block in seq.block_table]
            while len(seq.block_table) * SIZE < len(seq.token_ids) + SIZE:
                seq.block_table.append(1000 + len(seq.block_table))
        counts = [len(seq.token_ids) - seq.num_computed_tokens for seq in rows]
        decodes = len(rows) if counts == [1] * len(rows) else 0
        if columns is None or columns.rows != rows:
            columns = SequenceColumns(rows)
        batch = ScheduledBatch(
            {seq.id: seq for seq in rows},
            counts,
            sum(counts),
            total_seqs_num_decode=decodes,
            columns=columns,
            block_copies=[BlockCopy(count, 100 * member) for member in members[:count]],
        )
        assert view(pair.send(batch), last) == view(batch, last)
        for seq, computed in zip(rows, counts, strict=True):
            seq.num_computed_tokens += computed


def test_tables_of_ended_sequences_are_dropped() -> None:
    """Both ends kept the tables of the last 8192 sequences, which are gigabytes if they were long."""
    pair = Pair()
    for _ in range(1000):
        seq = Sequence([1] * 30, SIZE, PLAIN)
        seq.block_table = list(range(8))
        pair.send(ScheduledBatch({seq.id: seq}, [30], 30))
    assert len(pair.encoder._sent) == len(pair.decoder._tables) <= 128


def test_drafts_dummies_and_tokens_in_flight_arrive() -> None:
    seqs, pair = sequences(), Pair()
    last = ScheduledBatchOutput({seq.id: (40 + i,) for i, seq in enumerate(seqs)})
    seqs[0].num_computed_tokens, seqs[0].num_inflight_tokens, seqs[0].num_placeholder = 2, 1, 1
    seqs[1].num_computed_tokens = 2
    rows = {seq.id: seq for seq in seqs[:2]}
    drafts = {seqs[1].id: [8, 9]}
    batch = ScheduledBatch(rows, [1, 3], 4, is_dummy_run=True, num_spec_step=2, scheduled_spec_decode_tokens=drafts)
    found = pair.send(batch)
    assert view(found, last) == view(batch, last)
    assert as_lists(found.input_tokens(last)) == [[40], [2, 8, 9]]
    assert found.is_dummy_run


def test_unchanged_batch_fields_are_not_resent() -> None:
    """256 sequences of 8000 tokens: a decode is some kilobytes, not half a megabyte of block tables."""
    seqs = [Sequence([1] * 8000, 16, PLAIN) for _ in range(256)]
    for seq in seqs:
        seq.block_table = list(range(501))
        seq.num_computed_tokens = 7999
    pair, columns = Pair(), SequenceColumns(seqs)
    for _ in range(3):
        rows = {seq.id: seq for seq in seqs}
        pair.send(ScheduledBatch(rows, [1] * 256, 256, total_seqs_num_decode=256, columns=columns))
        for seq in seqs:
            seq.append_token(5)
            seq.num_computed_tokens += 1
    assert pair.sizes[0] > 250_000
    assert pair.sizes[2] < 3_000


def test_penalty_histories_are_sent_once() -> None:
    """Former fault: a frame had the whole output of every penalized sequence, 10 MB for 256 rows of 8,000 tokens."""
    seqs, pair = sequences(), Pair()
    columns = SequenceColumns(seqs)
    for seq in seqs:
        seq.token_ids += [300 + token for token in range(4000)]
        seq.block_table = list(range(2500))
        seq.num_computed_tokens = len(seq.token_ids) - 1
    for _ in range(3):
        counts = [1] * len(seqs)
        by_id = {seq.id: seq for seq in seqs}
        batch = ScheduledBatch(by_id, counts, len(seqs), total_seqs_num_decode=len(seqs), columns=columns)
        last = ScheduledBatchOutput({seq.id: (9,) for seq in seqs})
        assert view(pair.send(batch), last) == view(batch, last)
        for seq in seqs:
            seq.append_token(9)
            seq.num_computed_tokens += 1
    assert len(batch.histories) == 3
    assert pair.sizes[0] > 30_000
    assert max(pair.sizes[1:]) < 1_500
