"""The bound on log lines of refused calls."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from common.limits import MAX_REFUSAL_LINES, REFUSAL_LINES_PER_S
from common.rpc.request_log import RefusalLines


@given(st.lists(st.tuples(st.sampled_from(["CANCELLED", "UNAUTHENTICATED"]), st.floats(0, 0.01)), max_size=4000))
def test_refusals_are_bounded_and_all_counted(calls: list[tuple[str, float]]) -> None:
    """Regression: each refused call of 50 bytes cost a log line of 256 bytes."""
    lines, now, written = RefusalLines(), 1000.0, Counter[str]()
    for status, pause in calls:
        now += pause
        written[status] += lines.take(status, now)
    unwritten = lines.take_unwritten()
    assert written + Counter(unwritten) == Counter(status for status, _ in calls)
    assert written.total() <= MAX_REFUSAL_LINES + (now - 1000.0) * REFUSAL_LINES_PER_S
    assert written.total() >= min(len(calls), MAX_REFUSAL_LINES)
    assert not lines.take_unwritten()


def test_refusals_after_a_pause_have_lines_again() -> None:
    lines = RefusalLines()
    assert sum(lines.take("CANCELLED", 0.0) for _ in range(5000)) == MAX_REFUSAL_LINES
    assert sum(lines.take("CANCELLED", 1.0) for _ in range(5000)) == REFUSAL_LINES_PER_S
