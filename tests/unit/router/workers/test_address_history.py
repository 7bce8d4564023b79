"""An address's record: bounded and growing pauses between dials, and probation after early deaths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.limits import (
    MAX_PROBATION_S,
    MAX_REDIAL_S,
    MAX_REDIAL_UNREADY_S,
    PROBATION_S,
    REDIAL_JITTER,
    REDIAL_S,
    SHORT_LIFE_S,
)
from router.workers.worker_record import AddressHistory


def steady() -> AddressHistory:
    return AddressHistory(lambda: 0.5)


def lives(history: AddressHistory, seconds: list[float], now: float = 0.0) -> float:
    """Processes that live `seconds` each, one second apart; returns the time of the last death."""
    for number, lived_s in enumerate(seconds):
        history.came_up(f"{now}-{number}", now)
        now += lived_s
        history.went_down(now, in_good_order=False)
        now += 1.0
    return now


@given(chance=st.floats(0, 1, exclude_max=True), answers=st.booleans(), young=st.integers(0, 12))
def test_redial_pauses_are_bounded_and_grow_with_failure_time(chance: float, answers: bool, young: int) -> None:
    """Regression: the pause was 250 ms for ever, without jitter."""
    history = AddressHistory(lambda: chance)
    now = lives(history, [1.0] * young)
    longest_s = MAX_REDIAL_UNREADY_S if answers else MAX_REDIAL_S
    before = 0.0
    for _ in range(200):
        pause_s = history.redial_after_s(now, answers=answers)
        assert (1 - REDIAL_JITTER) * REDIAL_S <= pause_s <= (1 + REDIAL_JITTER) * longest_s
        assert pause_s >= before - 1e-9
        before, now = pause_s, now + pause_s
    assert before >= (1 - REDIAL_JITTER) * longest_s


def test_restarting_worker_is_redialled_soon() -> None:
    history = steady()
    now = lives(history, [1000.0])
    begin = now
    while now - begin < 5:
        pause_s = history.redial_after_s(now, answers=False)
        assert pause_s <= REDIAL_S + 1e-9
        now += pause_s
    assert history.redial_after_s(begin + 60, answers=False) <= 3.0
    # Its successful run ends its earlier record.
    history.came_up("new", now)
    assert history.probation_s(now) == 0
    history.went_down(now + 100, in_good_order=False)
    assert history.redial_after_s(now + 100, answers=False) <= REDIAL_S + 1e-9


def test_repeated_early_deaths_lengthen_probation() -> None:
    """Regression: an empty restarted worker got the next requests at once."""
    history, now = steady(), 0.0
    seen: list[float] = []
    for _ in range(8):
        history.came_up(str(now), now)
        seen.append(history.probation_s(now))
        now = now + 5.0
        history.went_down(now, in_good_order=False)
        now += 1.0
    assert seen[:2] == [0.0, 0.0]
    assert seen[2:5] == [PROBATION_S, 2 * PROBATION_S, 4 * PROBATION_S]
    assert seen[5:] == [MAX_PROBATION_S] * 3
    assert history.redial_after_s(now, answers=False) > 4 * REDIAL_S


def test_long_life_or_orderly_end_ends_probation() -> None:
    for redeem in ("long", "goodbye"):
        history = steady()
        now = lives(history, [1.0] * 5)
        history.came_up("redeemed", now)
        assert history.probation_s(now) > 0
        now += SHORT_LIFE_S + 1 if redeem == "long" else 1.0
        history.went_down(now, in_good_order=redeem == "goodbye")
        history.came_up("next", now + 1)
        assert history.probation_s(now + 1) == 0


def test_broken_stream_is_no_worker_death() -> None:
    history, now = steady(), 0.0
    for _ in range(50):
        history.came_up("the same", now)
        assert history.probation_s(now) == 0
        history.went_down(now + 0.5, in_good_order=False)
        assert history.redial_after_s(now + 0.5, answers=False) <= REDIAL_S + 1e-9
        now += 1.0


def test_probation_continues_after_broken_stream() -> None:
    history = steady()
    now = lives(history, [1.0, 1.0])
    history.came_up("third", now)
    assert history.probation_s(now) == PROBATION_S
    history.went_down(now + 4, in_good_order=False)
    history.came_up("third", now + 5)
    assert history.probation_s(now + 5) == PROBATION_S - 5
    assert history.probation_s(now + 50) == 0
