"""Texts that grammars force, beside a model that keeps everything and counts anew."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.mutants import OBJECTIONS, Mutant
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_rates import DraftRates
from worker.engine.speculation.forced_text import ForcedText

Event: TypeAlias = tuple[int, list[int], tuple[int, list[int]] | None]
# For each step of one of two sequences: tokens that come, of few ids so that some are right, and a run that is noted
# behind so many of the known ones, or none.
RUNS = st.none() | st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=5))
STEPS = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=4), RUNS), max_size=30)


def check(steps: list[Event]) -> None:
    forced, seqs = ForcedText(), [Sequence([7], 4, id=i) for i in range(2)]
    # By sequence: position of the run, and its tokens.
    known: list[tuple[int, list[int]] | None] = [None, None]
    every, own = DraftRates(), dict[int, DraftRates]()
    for place, tokens, run in steps:
        seq = seqs[place]
        before = seq.num_tokens
        seq.token_ids += tokens
        forced.come(seq)
        found = comparisons(known[place], seq, before)
        if run is not None:
            first = max(1, seq.num_tokens - run[0])
            forced.note(seq, first, tuple(run[1]))
            known[place] = (first, run[1])
            own.setdefault(place, every.copy())
            found += comparisons(known[place], seq, first)
        for position, is_right in found:
            own[place].learn(position, is_right, 0.12)
            every.learn(position, is_right, 0.01)
        assert forced.rates(seq) == own.get(place, every)
        assert forced.of(seq) == left(known[place], seq)
    forced.forget(seqs[0])
    assert forced.of(seqs[0]) == []
    assert forced.of(seqs[1]) == left(known[1], seqs[1])
    assert bool(forced) == (known[1] is not None)


def comparisons(run: tuple[int, list[int]] | None, seq: Sequence, since: int) -> list[tuple[int, bool]]:
    """Tokens from a position on beside a run: up to the first that is wrong."""
    found: list[tuple[int, bool]] = []
    if run is None:
        return found
    for place, token in enumerate(run[1]):
        position = run[0] + place
        if position >= seq.num_tokens:
            break
        is_right = seq.token_ids[position] == token
        if position >= since:
            found.append((place, is_right))
        if not is_right:
            break
    return found


def left(run: tuple[int, list[int]] | None, seq: Sequence) -> list[int]:
    if run is None or any(not right for _, right in comparisons(run, seq, 0)):
        return []
    return run[1][seq.num_tokens - run[0] :]


@given(STEPS)
def test_rates_of_forced_text_equal_brute_force(steps: list[Any]) -> None:
    check(steps)


def test_new_sequence_starts_with_rates_of_others() -> None:
    forced, seqs = ForcedText(), [Sequence([7], 4, id=i) for i in range(2)]
    assert forced.rates(seqs[0]).first(1) == [1.0]
    for _ in range(20):
        forced.note(seqs[0], seqs[0].num_tokens, (1, 2))
        seqs[0].append_token(1)
        seqs[0].append_token(5)
        forced.come(seqs[0])
    forced.note(seqs[1], 1, (1, 2))
    for seq in seqs:
        assert forced.rates(seq).first(2)[0] == 1.0
        assert forced.rates(seq).first(2)[1] < 0.4


MUTANTS = [
    Mutant("goes on behind a wrong one", ForcedText, "come", "run.token_ids = ()", "pass"),
    Mutant("compares twice", ForcedText, "come", "run.first + run.count :", "run.first :"),
    Mutant("from the beginning", ForcedText, "of", "seq.num_tokens - run.first", "0"),
    Mutant("keeps all", ForcedText, "forget", "self._runs.pop(seq.id, None)", "pass"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    first: Event = (0, [], (0, [1, 2, 0, 1, 1, 1]))
    second: Event = (1, [], (0, [2, 2]))
    steps = [first, (0, [1], None), (0, [2], None), (0, [1, 1], None), second, (1, [2], first[2])]
    steps.append(first)
    check(steps)
    with mutant.applied(), pytest.raises((*OBJECTIONS, IndexError)):
        check(steps)
