"""How the comparison of doors counts streams, and the result that it writes. Nothing here is about speed."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from tests.bench.doors.clients import Outcome, StreamEnd
from tests.bench.doors.report import markdown_of, result_of, text_of
from tests.bench.doors.stacks import Entry
from tests.bench.plots.results import Result


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (StreamEnd("abc"), (1, 0, 0)),
        (StreamEnd("abd"), (0, 1, 0)),
        (StreamEnd("ab"), (0, 1, 0)),
        (StreamEnd("ab", "connection closed"), (0, 0, 1)),
        (StreamEnd("", "HTTP 503"), (0, 0, 1)),
        (StreamEnd("b", "connection closed"), (0, 1, 1)),
    ],
)
def test_stream_counts_as_whole_changed_or_failed(end: StreamEnd, expected: tuple[int, int, int]) -> None:
    """A broken stream is changed too if its text is not a beginning of the answer."""
    outcome = Outcome.from_ends([end], ["abc"])
    assert (outcome.whole, outcome.changed, outcome.failed) == expected


def test_errors_are_counted_by_kind() -> None:
    ends = [StreamEnd("a"), StreamEnd("a", "HTTP 503"), StreamEnd("", "connection closed"), StreamEnd("", "HTTP 503")]
    assert Outcome.from_ends(ends, ["a"] * 4).seen == "2 x HTTP 503, 1 x connection closed"
    assert Outcome.from_ends(ends[:1], ["a"]).seen == "no error"


def test_result_file_has_all_rows_and_says_that_the_machine_was_busy() -> None:
    labels: Entry = {"streams": 1, "step": "instant", "door": "d"}
    entries: list[Entry] = [
        {**labels, "counts": False, "metric": "tokens_per_s", "unit": "tokens/s", "value": 1234},
        {**labels, "counts": False, "metric": "door_cpu", "unit": "s per 1000 tokens", "value": 0.0123},
        {**labels, "counts": False, "metric": "others", "unit": "%", "value": 9},
    ]
    made = result_of(entries, "command")
    run = Result.of("", json.loads(text_of(made), parse_float=Decimal))
    assert [row.value for row in run.rows] == [1234, Decimal("0.0123"), 9]
    assert "up to 9 % of the cores" in run.about
    assert "provisional" in run.about
    assert "| instant | 1 | d | 1,234 | 0.0123 |" in markdown_of(made)
    quiet = result_of([{**each, "counts": True} for each in entries], "command")
    assert "provisional" not in quiet["about"]
