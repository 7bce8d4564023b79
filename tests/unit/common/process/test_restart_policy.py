from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from common.process.restart_policy import (
    FIRST_DELAY_S,
    MAX_DEATHS,
    MAX_DELAY_S,
    WINDOW_S,
    GiveUp,
    Restart,
    RestartPolicy,
)

# Gaps often add up to just under or over the window, where decisions change.
gaps = st.lists(
    st.floats(min_value=0, max_value=200, allow_nan=False) | st.sampled_from([1.0, 29.5, 30.0, 30.5, 60.0, 60.5]),
    min_size=1,
    max_size=40,
)


def decisions(times: list[float]) -> list[Restart | GiveUp]:
    policy = RestartPolicy()
    return [policy.died(now) for now in times]


def test_delays_double_up_to_the_longest() -> None:
    # Deaths 31 s apart: never three within a minute, and never a minute without a death.
    found = decisions([31.0 * i for i in range(7)])
    assert found == [Restart(delay) for delay in (0.5, 1, 2, 4, 8, 8, 8)]


def test_three_deaths_within_a_minute_give_up() -> None:
    assert decisions([100, 130, 160]) == [Restart(0.5), Restart(1), GiveUp(3)]
    assert decisions([100, 130, 160.1]) == [Restart(0.5), Restart(1), Restart(2)]


def test_restart_delay_resets_after_a_minute() -> None:
    assert decisions([0, 40, 101]) == [Restart(0.5), Restart(1), Restart(0.5)]


def test_very_many_deaths_do_not_overflow() -> None:
    assert decisions([31.0 * i for i in range(3000)])[-1] == Restart(MAX_DELAY_S)


@settings(max_examples=200)
@given(gaps)
def test_gives_up_exactly_when_the_window_holds_too_many_deaths(gaps_s: list[float]) -> None:
    times = list(itertools.accumulate(gaps_s))
    for i, decision in enumerate(decisions(times)):
        within = sum(1 for death in times[: i + 1] if times[i] - death <= WINDOW_S)
        assert isinstance(decision, GiveUp) == (within >= MAX_DEATHS)


@settings(max_examples=200)
@given(gaps)
def test_restart_delays_double_within_window(gaps_s: list[float]) -> None:
    times = list(itertools.accumulate(gaps_s))
    expected = 0.0
    for i, decision in enumerate(decisions(times)):
        fresh = i == 0 or times[i] - times[i - 1] > WINDOW_S
        expected = FIRST_DELAY_S if fresh else min(MAX_DELAY_S, expected * 2)
        assert isinstance(decision, GiveUp) or decision == Restart(expected)
