"""The account of what drafts save: losses end them, and the time that passes lets them begin again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.speculation.draft_savings import DraftSavings


def test_gains_allow_and_losses_do_not() -> None:
    savings = DraftSavings()
    savings.step(2.0, 1.0, 1, 1.0)
    savings.accepted(0)
    assert not savings.allows
    for _ in range(99):
        savings.step(1.0, 1.0, 1, None)
    assert savings.allows
    for _ in range(50):
        savings.step(1.5, 1.0, 2, 1.0)
        savings.accepted(2)
    assert savings.allows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(1.0, 2.0), st.sampled_from([0, 0, 0, 1, 4])), min_size=1, max_size=300))
def test_no_more_is_lost_than_a_small_part(steps: list[tuple[float, int]]) -> None:
    """Steps with drafts whenever they are allowed, which take so long and have so many accepted of two sequences."""
    savings, seconds, plain = DraftSavings(), 0.0, 0.0
    for duration_s, accepted in steps:
        has_drafts = savings.allows
        taken = duration_s if has_drafts else 1.0
        savings.step(taken, 1.0, 2, 1.0 if has_drafts else None)
        seconds, plain = seconds + taken, plain + 1.0
        if has_drafts:
            savings.accepted(accepted)
            plain += accepted / 2
    # A part of the time, and the step that was one too many.
    assert seconds <= 1.02 * plain + 2.0


def test_what_interrupts_a_step_counts_no_more_than_in_a_plain_one() -> None:
    """However long a step is for which a model drafts: it is no more to blame for what else the machine does."""
    for expected_s in (1.0, 3.0):
        interrupted, longer = DraftSavings(), DraftSavings()
        interrupted.of_model = longer.of_model = True
        interrupted.step(expected_s + 9.0, 1.0, 1, expected_s)
        longer.step(expected_s + 1.0, 1.0, 1, expected_s)
        # But for the part of the time that may be lost.
        assert interrupted.allows_beyond(expected_s)
        assert not longer.allows_beyond(expected_s - 0.1)
