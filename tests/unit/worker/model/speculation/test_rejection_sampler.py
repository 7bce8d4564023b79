"""Accepted drafts, and the rows that verify them, against their definitions."""

from __future__ import annotations

from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.params.sampling_params import SamplingParams
from kernels.no_token import NO_TOKEN
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.sampled_rows import SampledRows
from worker.model.sampler import SampledTokens
from worker.model.speculation.rejection_sampler import RejectionSampler, SpecDecodeMetadata

DRAFTS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5)


def accepted(drafts: list[list[int]], drawn: list[list[int]]) -> list[list[int]]:
    """Tokens of each sequence by definition: all up to the first that its draft is not."""
    found = []
    for own, tokens in zip(drafts, drawn, strict=True):
        right = 0
        while right < len(own) and own[right] == tokens[right]:
            right += 1
        found.append(tokens[: right + 1])
    return found


@given(DRAFTS, st.data())
def test_drafts_are_accepted_up_to_first_wrong(drafts: list[list[int]], data: st.DataObject) -> None:
    drawn = [data.draw(st.lists(st.integers(0, 2), min_size=len(own) + 1, max_size=len(own) + 1)) for own in drafts]
    found = RejectionSampler().accept(SpecDecodeMetadata.of(drafts), [*chain.from_iterable(drawn)])
    assert list(map(list, found)) == accepted(drafts, drawn)


def check_on_the_device(drafts: list[list[int]], drawn: list[list[int]], known: list[bool]) -> None:
    """The host knows the drafts of some sequences, which makes no difference."""
    expected = accepted(drafts, drawn)
    ids = torch.tensor([*chain.from_iterable(drawn)], dtype=torch.int64)
    fed = torch.tensor([*chain.from_iterable(drafts)], dtype=torch.int64)
    given = [own if is_known else [NO_TOKEN] * len(own) for own, is_known in zip(drafts, known, strict=True)]
    metadata = SpecDecodeMetadata.of(given)
    found = RejectionSampler().verify(metadata, ids, fed)
    assert found.newest.tolist() == [tokens[-1] for tokens in expected]
    num_rejected = [len(own) + 1 - len(tokens) for own, tokens in zip(drafts, expected, strict=True)]
    assert found.num_rejected.tolist() == num_rejected
    tokens = RejectionSampler().accepted(metadata, ids.tolist(), found.num_rejected.numpy())
    assert list(map(list, tokens)) == expected
    assert metadata.are_known == (NO_TOKEN not in chain.from_iterable(given))
    # The step: a row that has no part in it, then those of each sequence, its newest token in front of its drafts.
    count = len(drafts)
    rows = SampledRows(list(range(count)), np.arange(0), np.arange(0), 1 + np.arange(len(ids)), metadata)
    step = torch.tensor([7, *chain.from_iterable([9, *own] for own in drafts)])
    sampled = SampledTokens(rows, ids, step, lambda numbers: numbers.tolist)
    assert list(map(list, sampled.output.token_ids.values())) == expected
    assert sampled.newest.tolist() == [tokens[-1] for tokens in expected]
    assert sampled.num_rejected.tolist() == num_rejected


@given(DRAFTS, st.data())
def test_device_counts_equal_accepted_drafts(drafts: list[list[int]], data: st.DataObject) -> None:
    """Nothing may be drawn too, and is no draft."""
    tokens = st.integers(NO_TOKEN, 2)
    drawn = [data.draw(st.lists(tokens, min_size=len(own) + 1, max_size=len(own) + 1)) for own in drafts]
    check_on_the_device(drafts, drawn, data.draw(st.lists(st.booleans(), min_size=len(drafts), max_size=len(drafts))))


def every_case_of_two() -> None:
    """Two sequences, all drafts and all draws of two ids and none."""
    for counts in product(range(3), repeat=2):
        for ids in product(range(2), repeat=sum(counts)):
            drafts = [list(ids[: counts[0]]), list(ids[counts[0] :])]
            for tokens in product((NO_TOKEN, 0, 1), repeat=sum(counts)):
                drawn = [[*tokens[: counts[0]], 1], [*tokens[counts[0] :], 0]]
                check_on_the_device(drafts, drawn, [False, True])


MUTANTS = [
    Mutant("others' drafts count", RejectionSampler, "verify", "torch.minimum(runs, num_drafts)", "runs"),
    Mutant("right behind wrong", RejectionSampler, "verify", ".cumprod(1)", ""),
    Mutant("the last row's token", RejectionSampler, "verify", "first + num_right", "first + num_drafts"),
    Mutant("nothing is wrong", RejectionSampler, "verify", "num_drafts - num_right", "num_drafts * 0"),
    Mutant("a wrong draft is taken", RejectionSampler, "accepted", "counts - num_rejected", "counts"),
    Mutant("unknown drafts are compared", SampledTokens, "_accepted_tokens", "if metadata.are_known", "if True"),
    Mutant("the row in front", SampledRows, "draft_rows", " + 1", ""),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    with mutant.applied(), pytest.raises((*OBJECTIONS, IndexError)):
        every_case_of_two()


def test_every_case_of_two_sequences() -> None:
    every_case_of_two()


def test_verification_rows_follow_every_draft() -> None:
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
