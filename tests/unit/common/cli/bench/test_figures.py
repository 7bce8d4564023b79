"""Statistics against numpy, and the figures of made-up requests."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cli.bench.figures import (
    CpuShares,
    Failures,
    Goodput,
    Setting,
    Spread,
    failures_of,
    figures_of,
    max_in_flight,
    overviews,
)
from common.cli.bench.records import INTERRUPTED, WRONG_TOKEN_COUNT, Record
from common.cli.bench.statistics import Summary, percentile

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
TIMES = st.floats(0, 100)


@settings(max_examples=30)
@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9)


@settings(max_examples=30)
@given(VALUES, st.sampled_from([1.0, 1e3]))
def test_summaries_are_numpys(values: list[float], scale: float) -> None:
    summary, scaled = Summary.of(values, scale), np.asarray(values) * scale
    assert summary is not None
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(float(scaled.mean()), rel=1e-9)
    assert [summary.p50, summary.p90, summary.p99] == pytest.approx(np.percentile(scaled, [50, 90, 99]), rel=1e-9)
    assert summary.max == scaled.max()
    assert scaled.min() <= summary.p50 <= summary.p90 <= summary.p99 <= summary.max


def test_summary_of_no_values_is_none() -> None:
    assert Summary.of([]) is None


def answered(index: int = 0, begin: float = 0.0, *arrivals: float, **given_: object) -> Record:
    """A request that is sent on time and ends with its last token."""
    times = [begin + at for at in arrivals]
    record = Record(index, begin, begin, times[-1], arrivals=times, input_tokens=10, output_tokens=len(times))
    return replace(record, **given_)  # type: ignore[arg-type]


def test_record_has_times_of_request() -> None:
    record = Record(0, 1.0, 1.5, 4.25, arrivals=[2.0, 2.5, 4.0], output_tokens=5)
    assert (record.ttft, record.tpot, record.itl, record.latency) == (1.0, 0.5, [0.5, 1.5], 3.25)
    assert answered(0, 0.0, 1.0).tpot is None


@pytest.mark.parametrize(
    ("came", "said", "prompt", "exact", "message"),
    [
        (4, 4, 10, True, ""),
        (3, 3, 10, True, "3 tokens came, 4 were asked for"),
        (5, 5, 10, True, "5 tokens came, 4 were asked for"),
        (3, 3, 10, False, ""),
        (0, 0, 10, False, "0 tokens came, 1 to 4 were asked for"),
        (5, 5, 10, False, "5 tokens came, 1 to 4 were asked for"),
        (4, 3, 10, True, "4 tokens came, the service counted 3"),
        (4, 4, 9, True, "the service counted 9 prompt tokens, 10 were sent"),
    ],
)
def test_answer_of_wrong_length_fails(came: int, said: int, prompt: int, exact: bool, message: str) -> None:
    record = Record(0, 0, 0, input_tokens=prompt, output_tokens=came)
    record.check_lengths(4, 10, said, exact=exact)
    assert (record.status, record.message) == (WRONG_TOKEN_COUNT if message else "OK", message)
    unknown = Record(0, 0, 0, input_tokens=9, output_tokens=4)
    unknown.check_lengths(4, None, 4, exact=True)
    assert unknown.ok


def test_figures_of_a_run() -> None:
    records = [
        answered(0, 0.0, 1.0, 2.0, 3.0, queue_s=0.25, prefill_s=0.5, service_ttft_s=0.75, worker_id="b"),
        answered(1, 1.0, 2.0, 3.0, cached_tokens=8, worker_id="a", attempts=2),
        Record(2, 1.0, 1.5, 2.0, status="UNAVAILABLE", message="later", output_tokens=7),
        Record(3, 2.0, 2.0, 4.0, status=INTERRUPTED),
    ]
    cpu = CpuShares(0.25, 0.5, 0.125, 0.0)
    row = figures_of(records, Setting(concurrency=2), 1, {"ttft": 1.5}, cpu)
    assert (row.ok, row.failed, row.interrupted, row.repeat, row.retried) == (2, 1, 1, 1, 1)
    assert row.failures == (Failures("UNAVAILABLE", 1, "later"),)
    assert row.duration_s == 4.0
    assert (row.input_tokens, row.cached_tokens, row.output_tokens) == (20, 8, 5)
    assert (row.requests_per_s, row.input_tokens_per_s, row.output_tokens_per_s) == (0.5, 5.0, 1.25)
    assert row.ttft_ms == Summary(2, 1500.0, 1500.0, 1900.0, 1990.0, 2000.0)
    assert row.tpot_ms == Summary.of([1000.0, 1000.0])
    assert row.itl_ms == Summary.of([1000.0] * 3)
    assert row.latency_ms == Summary.of([3000.0, 3000.0])
    assert (row.queue_ms, row.prefill_ms) == (Summary.of([250.0]), Summary.of([500.0]))
    assert row.service_ttft_ms == Summary.of([750.0])
    assert row.send_lag_ms == Summary.of([0.0, 0.0, 500.0, 0.0])
    assert row.workers == {"a": 1, "b": 1}
    assert list(row.workers) == ["a", "b"]
    assert row.goodput == Goodput(0.25, 1 / 3)
    assert row.cpu == cpu
    assert json.loads(json.dumps(row.as_dict()))["ttft_ms"]["max"] == 2000.0


def test_figures_without_records_are_zero() -> None:
    row = figures_of([], Setting(rate=1.0), objectives={"ttft": 1.0})
    assert (row.ok, row.duration_s, row.output_tokens_per_s, row.ttft_ms) == (0, 0.0, 0.0, None)
    assert row.goodput == Goodput(0.0, 0.0)


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        ({}, 2),
        ({"ttft": 1.0}, 1),
        ({"tpot": 0.9}, 1),
        ({"itl": 2.0}, 2),
        ({"itl": 1.9}, 1),
        ({"latency": 3.0}, 1),
        ({"ttft": 2.0, "latency": 4.0}, 2),
        ({"ttft": 1.0, "tpot": 0.9}, 0),
    ],
)
def test_goodput_needs_every_objective(objectives: dict[str, float], met: int) -> None:
    """Either one token after 2 s, or three tokens at 1 s, 2 s and 4 s."""
    records = [answered(0, 0.0, 2.0, ended=3.5), answered(1, 0.0, 1.0, 2.0, 4.0)]
    if "latency" in objectives and len(objectives) == 1:
        records[0].ended = 2.0
    row = figures_of(records, Setting(concurrency=2), objectives=objectives)
    assert row.goodput is not None
    assert row.goodput.share == met / 2


def test_failures_are_counted_by_status_with_the_earliest_message() -> None:
    failed = [("A", 3.0, "third"), ("B", 1.0, "first"), ("B", 2.0, "second"), ("A", 0.5, "zeroth"), ("A", 4.0, "")]
    records = [Record(i, 0, 0, at, status, said) for i, (status, at, said) in enumerate(failed)]
    assert failures_of(records) == (Failures("A", 3, "zeroth"), Failures("B", 2, "first"))


@settings(max_examples=30)
@given(st.lists(st.tuples(TIMES, st.floats(0.01, 50)), max_size=20))
def test_most_in_flight_is_the_most_at_any_sending(spans: list[tuple[float, float]]) -> None:
    records = [Record(i, sent, sent, sent + length) for i, (sent, length) in enumerate(spans)]
    expected = max((sum(r.sent <= at.sent < r.ended for r in records) for at in records), default=0)
    assert max_in_flight(records) == expected


def test_repetitions_of_a_load_share_one_overview() -> None:
    runs = [
        figures_of([answered(0, 0.0, *times)], setting, repeat)
        for repeat, last in enumerate((2.0, 4.0, 8.0))
        for setting, times in ((Setting(concurrency=1), (1.0, last)), (Setting(rate=2.0), (last,)))
    ]
    closed, opened = overviews(runs)
    assert (closed.setting, closed.repeats) == (Setting(concurrency=1), 3)
    assert closed.output_tokens_per_s == Spread(0.5, 0.25, 1.0)
    assert closed.tpot_ms_p50 == Spread(3000.0, 1000.0, 7000.0)
    assert opened.ttft_ms_p99 == Spread(4000.0, 2000.0, 8000.0)
    assert opened.tpot_ms_p50 is None
    assert [str(setting.setting) for setting in (closed, opened)] == ["c=1", "2/s"]
