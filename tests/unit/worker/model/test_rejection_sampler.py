"""Which drafts are accepted, and the rows that verify them, against their definitions."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from common.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.rejection_sampler import RejectionSampler, SpecDecodeMetadata
from worker.model.sampled_rows import SampledRows

DRAFTS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5)


@given(DRAFTS, st.data())
def test_drafts_count_up_to_the_first_wrong_one(drafts: list[list[int]], data: st.DataObject) -> None:
    drawn = [data.draw(st.lists(st.integers(0, 2), min_size=len(own) + 1, max_size=len(own) + 1)) for own in drafts]
    accepted = RejectionSampler().accept(SpecDecodeMetadata.of(drafts), [*chain.from_iterable(drawn)])
    assert len(accepted) == len(drafts)
    for own, tokens, found in zip(drafts, drawn, accepted, strict=True):
        right = 0
        while right < len(own) and own[right] == tokens[right]:
            right += 1
        assert list(found) == tokens[: right + 1]


def test_rows_are_those_behind_every_draft() -> None:
    params = SamplingParams(repetition_penalty=1.2)
    seqs = [Sequence(list(range(n)), 16, params) for n in (9, 5, 3)]
    seqs[1].num_computed_tokens = 4
    drafts = {seqs[1].id: [21, 22]}
    batch = ScheduledBatch(
        {seq.id: seq for seq in seqs}, [6, 3, 3], 12, num_spec_step=2, scheduled_spec_decode_tokens=drafts
    )
    rows = SampledRows.of(batch)
    assert (rows.seq_ids, len(rows)) == ([seqs[1].id, seqs[2].id], 4)
    assert rows.sequences.tolist() == [1, 1, 1, 2]
    assert rows.positions.tolist() == [5, 6, 7, 3]
    assert rows.step_rows.tolist() == [6, 7, 8, 11]
    assert rows.metadata.target_logits_indices.tolist() == [0, 1]
    assert rows.metadata.bonus_logits_indices.tolist() == [2, 3]
    histories = rows.histories(batch, batch.histories)
    assert [histories[row].output_ids for row in range(4)] == [[], [21], [21, 22], []]
    assert histories[2].output_from(1) == [22]
