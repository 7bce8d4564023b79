"""The gate's rule, its bound, and a timer that never spins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.delay_gate import DelayGate

SECONDS = st.floats(0, 100)


@pytest.mark.parametrize(
    ("factor", "age", "latency", "decoding", "waiting", "expected"),
    [
        (0.0, 0.0, 9.0, True, True, True),  # factor 0 is off
        (0.5, 0.0, 0.1, False, False, True),  # an idle worker gains nothing from waiting
        (0.5, 0.04, 0.1, True, False, False),
        (0.5, 0.05, 0.1, True, False, False),  # the rule is strict
        (0.5, 0.06, 0.1, True, False, True),
        (0.5, 0.04, 0.1, False, True, False),  # work waits there: not idle
        (9.0, 0.24, 1.0, True, False, False),
        (9.0, 0.26, 1.0, True, False, True),  # the longest hold
        (1.0, 0.0, 0.0, True, False, False),
    ],
)
def test_delay_gate_follows_its_rule(
    factor: float, age: float, latency: float, decoding: bool, waiting: bool, expected: bool
) -> None:
    gate = DelayGate(factor, max_hold_s=0.25)
    figures: dict[str, Any] = {"last_prompt_latency_s": latency, "decoding": decoding, "waiting_at_worker": waiting}
    assert gate.is_open(age_s=age, **figures) is expected
    assert (gate.opens_in(age_s=age, **figures) == 0) is expected


@given(st.floats(0, 10), SECONDS, SECONDS, st.floats(0, 1e8), st.booleans(), st.booleans())
def test_delay_gate_is_open_when_its_timer_fires(
    factor: float, latency: float, age: float, arrival: float, decoding: bool, waiting: bool
) -> None:
    gate, now = DelayGate(factor), arrival + age
    figures: dict[str, Any] = {"last_prompt_latency_s": latency, "decoding": decoding, "waiting_at_worker": waiting}
    wait = gate.opens_in(age_s=now - arrival, **figures)
    assert 0 <= wait <= gate.max_hold_s + 1e-3
    assert gate.is_open(age_s=now + wait - arrival, **figures)
    assert wait == 0 or now + wait > now
