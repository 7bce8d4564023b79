"""Counts of drafts by position, against counting every draft."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from common.wire.draft_counts import Counts, add_counts
from worker.engine.speculation.spec_stats import DraftCounter

# Verifications: (number of drafts, number of accepted drafts).
OUTCOMES = st.integers(1, 16).flatmap(lambda num: st.tuples(st.just(num), st.integers(0, num)))


def counted(outcomes: list[tuple[int, int]]) -> tuple[Counts, ...]:
    verified, accepted = Counter[int](), Counter[int]()
    for num_drafts, num_accepted in outcomes:
        verified.update(range(num_drafts))
        accepted.update(range(num_accepted))
    return tuple((verified[position], accepted[position]) for position in sorted(verified))


def by_position(outcomes: list[tuple[int, int]]) -> tuple[Counts, ...]:
    counter = DraftCounter()
    for outcome, times in Counter(outcomes).items():
        counter.count(*outcome, times)
    return counter.by_position


@given(st.lists(OUTCOMES, max_size=40), st.integers(0, 40))
def test_positions_count_every_draft_once(outcomes: list[tuple[int, int]], cut: int) -> None:
    assert by_position(outcomes) == counted(outcomes)
    total: list[Counts] = []
    for part in (outcomes[:cut], outcomes[cut:]):
        add_counts(total, by_position(part))
    assert tuple(total) == counted(outcomes)
