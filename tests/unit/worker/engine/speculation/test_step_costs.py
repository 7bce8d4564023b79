"""What steps take by their number of rows: measured, corrected, and told apart from what makes all of them slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.speculation.step_costs import StepCosts


def test_what_is_not_measured_lies_between_what_is() -> None:
    assert StepCosts().of(3) == StepCosts().of(30)
    costs = StepCosts({2: 1.0, 4: 3.0})
    assert [costs.of(rows) for rows in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 5.0])


def test_none_is_shorter_than_a_smaller_one() -> None:
    assert StepCosts({1: 5.0, 2: 2.0, 4: 3.0}).table == {1: 2.0, 2: 2.0, 4: 3.0}


def test_verification_takes_what_it_was_measured_to_take() -> None:
    costs = StepCosts({1: 1.0, 4: 2.0}, 0.5)
    assert (costs.of(4), costs.verification(4)) == (2.0, 2.5)
    costs.note(4, 2.5, verifies=True)
    assert costs.verification(4) == pytest.approx(2.5)


@given(
    st.dictionaries(st.integers(1, 300), st.floats(0.1, 10.0), max_size=6),
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 10.0)), max_size=9),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_verifications_of_one_draft_after_the_other_are_those_of_each(
    table: dict[int, float], steps: list[tuple[int, float]], rows: int, most: int
) -> None:
    costs = StepCosts(table, 0.5)
    for size, seconds in steps:
        costs.note(size, seconds)
    each = [costs.verification(rows + count) for count in range(1, most + 1)]
    assert costs.verifications(rows, most).tolist() == pytest.approx(each)


def test_what_makes_all_steps_slower_says_nothing_about_their_sizes() -> None:
    costs = StepCosts({1: 1.0, 8: 2.0})
    for _ in range(50):
        costs.note(1, 3.0)
    assert costs.of(1) == pytest.approx(3.0, rel=0.01)
    assert costs.of(8) / costs.of(1) == pytest.approx(2.0, rel=0.06)


def test_steps_of_other_sizes_in_turns_correct_the_table() -> None:
    costs = StepCosts({1: 1.0, 8: 1.0})
    for _ in range(10):
        costs.note(1, 1.0)
        costs.note(8, 2.0)
    assert costs.of(8) / costs.of(1) == pytest.approx(2.0, rel=0.1)


def test_what_comes_with_a_size_by_chance_does_not_add_up() -> None:
    """Groups of eight begin with short contexts and end with long ones: sizes that they never have keep their place."""
    costs = StepCosts({rows: 1.0 + 0.1 * rows for rows in (1, 2, 4, 8, 16, 32)})
    for _ in range(200):
        for rows in (8, 4, 2, 1):
            for _ in range(10):
                costs.note(rows, (1.0 + 0.1 * rows) * (1.3 - 0.03 * rows))
    assert costs.of(32) / costs.of(8) == pytest.approx(4.2 / 1.8, rel=0.25)


def test_one_slow_step_counts_little() -> None:
    costs = StepCosts({1: 1.0})
    costs.note(1, 500.0)
    assert costs.of(1) < 1.3
    for _ in range(10):
        costs.note(1, 1.0)
    assert costs.of(1) == pytest.approx(1.0, rel=0.03)


def test_a_size_far_from_the_others_is_new() -> None:
    costs = StepCosts({1: 1.0, 8: 1.0})
    costs.note(64, 1.5)
    assert costs.table.keys() == {1, 8, 64}
    assert costs.of(64) == pytest.approx(1.5)
    costs.note(66, 1.5)
    assert costs.table.keys() == {1, 8, 64}


def test_a_clock_that_stands_still_is_no_fault() -> None:
    costs = StepCosts({1: 0.0})
    costs.note(1, 0.0)
    costs.note(32, 0.0)
    assert costs.of(32) > 0


def test_tries_are_bounded_by_what_is_known() -> None:
    assert StepCosts().most_rows(8) > 1000
    assert StepCosts({1: 1.0, 16: 2.0}).most_rows(8) == 32
    assert StepCosts({16: 2.0}).most_rows(8) == 8
