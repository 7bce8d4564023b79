"""The event loop's lag: the histogram, and the measurement on a real loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.telemetry.loop_lag import INTERVAL_S, LoopLag, counted
from tests.bench.router.lag_histogram import BOUNDS_S, LagHistogram


def test_lag_quantile_is_upper_bound_of_class() -> None:
    made = LagHistogram()
    for lag_ms in range(10):
        made.record(lag_ms / 1000 + 1e-6)
    assert sum(made.counts) == 10
    assert 0.0045 <= made.quantile(0.5) <= 0.0045 * 1.2
    assert 0.009 <= made.quantile(0.99) <= 0.009 * 1.2
    assert made.quantile(0.0) == BOUNDS_S[0]


def test_stall_counts_for_every_delayed_timer() -> None:
    made = LagHistogram()
    for _ in range(90):
        made.record(0.0)
    for lag_s in counted(10 * INTERVAL_S - INTERVAL_S / 2, INTERVAL_S):
        made.record(lag_s)
    assert sum(made.counts) == 100
    assert made.quantile(0.9) < 0.001
    assert made.quantile(0.99) > 8 * INTERVAL_S


def test_lag_since_counts_only_later_records() -> None:
    made = LagHistogram()
    made.record(0.005)
    earlier = LagHistogram(made.counts)
    assert made.since(earlier).quantile(0.5) == 0.0
    made.record(0.002)
    assert sum(made.since(earlier).counts) == 1
    assert 0.002 <= made.since(earlier).quantile(1.0) <= 0.0024


def test_suspended_process_has_bounded_lag_count() -> None:
    made = LagHistogram()
    for lag_s in counted(1e6, INTERVAL_S):
        made.record(lag_s)
    assert sum(made.counts) == pytest.approx(10 / INTERVAL_S, abs=2)
    assert made.quantile(1.0) <= 10


async def test_blocked_loop_is_measured() -> None:
    interval_s, told = 0.01, list[float]()
    watch = LoopLag(told.append, interval_s=interval_s)
    watch.start()
    await asyncio.sleep(3 * interval_s)
    time.sleep(0.2)  # noqa: ASYNC251  # the stall
    await asyncio.sleep(3 * interval_s)
    watch.stop()
    watch.stop()
    assert max(told) >= 0.18
    # One timer for every interval of the stall.
    assert sum(lag >= interval_s for lag in told) >= 18
    seen = len(told)
    await asyncio.sleep(3 * interval_s)
    assert len(told) == seen


async def test_idle_loop_is_rarely_woken() -> None:
    """Former fault: a hundred wake-ups per second took 1.2 % of a core."""
    told, began = list[float](), time.monotonic()
    watch = LoopLag(told.append)
    watch.start()
    await asyncio.sleep(3.5 * INTERVAL_S)
    watch.stop()
    assert INTERVAL_S >= 0.1
    # On a slow machine too: delayed timers count.
    assert 1 <= len(told) <= (time.monotonic() - began) / INTERVAL_S
