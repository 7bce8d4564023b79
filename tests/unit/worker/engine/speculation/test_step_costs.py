"""Durations of steps: interpolated tables, one level for all of them, and the time between steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.speculation.step_costs import Proposal, StepCosts


def test_step_cost_is_linear_between_and_beyond_measured_rows() -> None:
    assert StepCosts().decode(3) == StepCosts().decode(30)
    costs = StepCosts({2: 1.0, 4: 3.0})
    assert [costs.decode(rows) for rows in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 5.0])


def test_step_costs_never_fall_with_more_rows() -> None:
    assert StepCosts({1: 5.0, 2: 2.0, 4: 3.0}).table == {1: 2.0, 2: 2.0, 4: 3.0}


def test_making_is_interpolated_by_rows_and_sequences() -> None:
    costs = StepCosts({1: 1.0}, 0.0, {1: 1.0, 8: 2.4}, {1: 0.5, 8: 0.5})
    assert [costs.making_s(Proposal(rows, rows, 1)) for rows in (1, 3, 8, 15)] == pytest.approx([1.0, 1.4, 2.4, 3.8])
    assert costs.making_s(Proposal(8, 4, 3)) == pytest.approx(3.4)
    assert costs.making_s(Proposal(8)) == pytest.approx(2.4)
    assert StepCosts({1: 1.0}).making_s(Proposal(8, 8, 4)) == costs.making_s(None) == 0.0


@given(
    st.dictionaries(st.integers(1, 300), st.floats(0.1, 10.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 10.0)), max_size=9),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_longer_is_cost_ratio_of_each_number_of_drafts(
    table: dict[int, float], steps: list[tuple[int, float]], rows: int, most: int
) -> None:
    costs = StepCosts(table, 0.5)
    for size, seconds in steps:
        costs.note_plain(size, seconds, seconds + 0.1)
    each = [costs.drafting_s(rows + count) / costs.plain_s(rows) for count in range(1, most + 1)]
    assert costs.longer(rows, most).tolist() == pytest.approx(each)


def test_slower_steps_raise_costs_of_all_sizes() -> None:
    costs = StepCosts({1: 1.0, 8: 2.0}, 0.5, {1: 0.3}, {1: 0.1})
    for _ in range(50):
        costs.note_plain(1, 3.0, 3.5)
    assert costs.plain_s(1) == pytest.approx(3.5, rel=0.01)
    assert costs.plain_s(8) == pytest.approx(6.5, rel=0.01)
    assert costs.drafting_s(8, Proposal(8, 8, 2)) == pytest.approx(3 * 2.9 + 0.5, rel=0.01)


def test_one_slow_step_counts_little() -> None:
    costs = StepCosts({1: 1.0})
    costs.note_plain(1, 500.0, 900.0)
    assert costs.level < 1.3
    for _ in range(20):
        costs.note_plain(1, 1.0, 1.0)
    assert costs.plain_s(1) == pytest.approx(1.0, rel=0.03)


def test_costs_beyond_measured_rows_are_learnt() -> None:
    costs = StepCosts({1: 1.0, 8: 1.0}, 0.5)
    costs.note(8, 9.0)
    costs.note(64, 2.0, is_verifying=True)
    assert costs.table == {1: 1.0, 8: 1.0, 64: 1.5}
    for _ in range(20):
        costs.note(64, 3.0)
    assert costs.decode(64) == pytest.approx(3.0, rel=0.02)
    unmeasured = StepCosts()
    unmeasured.note(4, 2.0)
    assert unmeasured.table == {4: 2.0}


def test_tried_rows_are_bounded_by_measured_rows() -> None:
    assert StepCosts().most_rows(8) > 1000
    assert StepCosts({1: 1.0, 16: 2.0}).most_rows(8) == 32
    assert StepCosts({16: 2.0}).most_rows(8) == 8


def test_clock_that_stands_still_causes_no_division_by_zero() -> None:
    costs = StepCosts({1: 0.0})
    for _ in range(5000):
        costs.note_plain(1, 0.0, 0.0)
    assert costs.plain_s(32) > 0
    assert costs.longer(1, 3).tolist() == [1.0] * 3
