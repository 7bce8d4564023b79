"""Ledger of a request: its parts add up, whatever the clocks say."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from common.telemetry.ledger import Blame, Ledger
from common.telemetry.names import Stage

_SECONDS = st.floats(-10, 100, allow_nan=False)
_SHARES = st.dictionaries(st.sampled_from(Stage), _SECONDS, max_size=4)
_MOVES = st.lists(st.tuples(st.sampled_from(Stage), _SECONDS, _SHARES), max_size=12)


def test_parts_are_stages_between_their_times() -> None:
    ledger = Ledger(Stage.PREPARE, 10.0)
    ledger.enter(Stage.TOKENIZE, 10.5)
    ledger.enter(Stage.QUEUE, 11.5)
    ledger.enter(Stage.PREPARE, 13.5)
    assert ledger.parts(14.0) == {Stage.PREPARE: 1.0, Stage.TOKENIZE: 1.0, Stage.QUEUE: 2.0}


def test_shares_take_their_seconds_and_the_running_stage_keeps_the_rest() -> None:
    ledger = Ledger(Stage.WIRE, 0.0)
    ledger.enter(Stage.DELIVERY, 10.0, {Stage.DECODE: 6.0, Stage.PREFILL: 3.0})
    assert ledger.parts(10.0) == {Stage.WIRE: 1.0, Stage.PREFILL: 3.0, Stage.DECODE: 6.0}


def test_shares_beyond_the_interval_are_scaled_down_to_it() -> None:
    ledger = Ledger(Stage.WIRE, 0.0)
    ledger.enter(Stage.DELIVERY, 3.0, {Stage.DECODE: 8.0, Stage.PREFILL: 4.0})
    assert ledger.parts(3.0) == {Stage.PREFILL: 1.0, Stage.DECODE: 2.0}


def test_time_before_the_running_stage_counts_as_its_beginning() -> None:
    ledger = Ledger(Stage.QUEUE, 5.0)
    ledger.enter(Stage.DECODE, 2.0)
    assert ledger.parts(6.0) == {Stage.DECODE: 1.0}


def test_fork_keeps_the_history_and_continues_alone() -> None:
    ledger = Ledger(Stage.PREPARE, 0.0)
    ledger.enter(Stage.QUEUE, 1.0)
    other = ledger.fork()
    other.enter(Stage.DECODE, 2.0)
    assert other.parts(3.0) == {Stage.PREPARE: 1.0, Stage.QUEUE: 1.0, Stage.DECODE: 1.0}
    assert ledger.parts(3.0) == {Stage.PREPARE: 1.0, Stage.QUEUE: 2.0}


def test_request_that_cost_most_is_blamed() -> None:
    ledger = Ledger(Stage.PREPARE, 0.0)
    for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        ledger.blame(Stage.QUEUE, Blame(name, "", seconds))
    assert ledger.blames[Stage.QUEUE].request_id == "b"


@given(began=_SECONDS, moves=_MOVES, end=_SECONDS)
def test_parts_add_up_to_the_whole_and_none_is_negative(
    began: float, moves: list[tuple[Stage, float, dict[Stage, float]]], end: float
) -> None:
    ledger = Ledger(Stage.PREPARE, began)
    newest = began
    for stage, now, shares in moves:
        ledger.enter(stage, now, shares)
        newest = max(newest, now)
    parts = ledger.parts(end)
    assert min(parts.values(), default=0.0) >= 0
    assert math.isclose(sum(parts.values()), max(newest, end) - began, abs_tol=1e-9)
