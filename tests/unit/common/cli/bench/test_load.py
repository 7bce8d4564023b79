"""Closed and open loops against a simulated service, and the distribution of arrival times."""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cli.bench.load import ClosedLoop, Extent, Load, OpenLoop, gaps

SERVICE_TIMES = st.lists(st.floats(0.01, 5), min_size=1, max_size=8)


def drive(load: Load, service_times: list[float]) -> list[tuple[float, float, float]]:
    """(intended, sent, ended) of every request; the service uses the service times cyclically."""
    now, running, seen = 0.0, list[float](), list[tuple[float, float, float]]()
    times = itertools.cycle(service_times)
    while True:
        for intended in load.take(now, len(running)):
            ended = now + next(times)
            seen.append((intended, now, ended))
            heapq.heappush(running, ended)
        due = None if load.exhausted(now) else load.next_time()
        moments = [moment for moment in (due, running[0] if running else None) if moment is not None]
        if not moments:
            return seen
        now = max(now, min(moments))
        while running and running[0] <= now:
            heapq.heappop(running)


def in_flight(seen: list[tuple[float, float, float]], at: float) -> int:
    return sum(sent <= at < ended for _, sent, ended in seen)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 40), SERVICE_TIMES)
def test_closed_loop_stays_full_until_last_request(concurrency: int, requests: int, service_times: list[float]) -> None:
    seen = drive(ClosedLoop(concurrency, Extent(requests)), service_times)
    assert len(seen) == requests
    assert all(intended == sent for intended, sent, _ in seen)
    last_sent = seen[-1][1]
    for _, sent, _ in seen:
        assert in_flight(seen, sent) == min(concurrency, requests) or sent == last_sent
        assert in_flight(seen, sent) <= concurrency


@settings(max_examples=30)
@given(st.integers(1, 9), st.floats(0.1, 10), SERVICE_TIMES)
def test_closed_loop_sends_none_after_its_duration(
    concurrency: int, duration: float, service_times: list[float]
) -> None:
    seen = drive(ClosedLoop(concurrency, Extent(duration_s=duration)), service_times)
    assert all(sent < duration for _, sent, _ in seen)
    # A slot that becomes free before the end is used.
    ends = [ended for _, _, ended in seen if ended < duration]
    assert len(seen) == concurrency + len(ends)


@settings(max_examples=30)
@given(st.floats(0.5, 50), st.sampled_from([0.3, 1.0, 4.0, math.inf]), st.integers(1, 50), SERVICE_TIMES)
def test_open_loop_times_ignore_service_speed(
    rate: float, burstiness: float, requests: int, service_times: list[float]
) -> None:
    seen = drive(OpenLoop(gaps(rate, burstiness, 7), Extent(requests)), service_times)
    expected = itertools.accumulate(itertools.islice(gaps(rate, burstiness, 7), requests))
    assert [intended for intended, _, _ in seen] == list(expected)
    assert all(sent == intended for intended, sent, _ in seen)


def test_late_open_loop_requests_keep_intended_time() -> None:
    load = OpenLoop(iter([1.0] * 10), Extent(5))
    assert load.take(0.5, 0) == []
    assert load.take(3.5, 0) == [1.0, 2.0, 3.0]
    assert (load.next_time(), load.exhausted(3.5)) == (4.0, False)
    assert load.take(99.0, 3) == [4.0, 5.0]
    assert load.exhausted(99.0)
    assert load.take(100.0, 0) == []


@settings(max_examples=30)
@given(st.floats(1, 20), st.floats(0.2, 5))
def test_open_loop_sends_requests_due_within_duration(rate: float, duration: float) -> None:
    seen = drive(OpenLoop(gaps(rate, math.inf, 0), Extent(duration_s=duration)), [1.0])
    assert all(intended < duration for intended, _, _ in seen)
    assert len(seen) == pytest.approx(duration * rate, abs=1.000001)


def test_load_ends_at_first_limit() -> None:
    assert len(drive(ClosedLoop(1, Extent(3, 10.0)), [1.0])) == 3
    assert len(drive(ClosedLoop(1, Extent(30, 10.0)), [1.0])) == 10


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_have_requested_mean_and_variance(burstiness: float) -> None:
    rate = 8.0
    values = list(itertools.islice(gaps(rate, burstiness, 3), 20_000))
    assert statistics.fmean(values) == pytest.approx(1 / rate, rel=0.05)
    assert statistics.variance(values) == pytest.approx(1 / (rate**2 * burstiness), rel=0.1)


def test_gaps_of_a_poisson_process_are_exponential() -> None:
    """Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand; the seed is fixed."""
    values = sorted(itertools.islice(gaps(2.0, 1.0, 5), 5000))
    distance = max(abs(1 - math.exp(-2.0 * value) - (i + 0.5) / 5000) for i, value in enumerate(values))
    assert distance < 1.95 / math.sqrt(5000)


def test_equal_distances_and_seeds() -> None:
    def first(loop: Iterator[float]) -> list[float]:
        return list(itertools.islice(loop, 5))

    assert first(gaps(4.0, math.inf, 1)) == [0.25] * 5
    assert first(gaps(4.0, 1.0, 1)) == first(gaps(4.0, 1.0, 1)) != first(gaps(4.0, 1.0, 2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Extent, "a number of requests or a duration"),
        (lambda: Extent(0), "requests is 0"),
        (lambda: Extent(None, 0.0), r"duration is 0\.0 s"),
        (lambda: Extent(None, math.nan), "duration is nan s"),
        (lambda: ClosedLoop(0, Extent(1)), "concurrency is 0"),
        (lambda: gaps(0.0, 1.0, 0), r"rate is 0\.0"),
        (lambda: gaps(math.inf, 1.0, 0), "rate is inf"),
        (lambda: gaps(1.0, 0.0, 0), r"burstiness is 0\.0"),
        (lambda: gaps(1.0, math.nan, 0), "burstiness is nan"),
    ],
)
def test_numbers_out_of_range_are_refused(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=said):
        make()
