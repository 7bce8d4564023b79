"""The table, medians and warnings that `fissile bench` prints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from common.cli.bench.figures import CpuShares, DraftCounts, Figures, Setting, drafts_between, figures_of
from common.cli.bench.records import Record
from common.cli.bench.report import SCHEMA, as_json, details, failure_line, medians, number, percent, table, warnings

CPU = CpuShares(0.1, 0.8, 0.03, 0.0)


def row(setting: Setting, repeat: int = 0, *, slow: float = 1.0, count: int = 4, **changed: object) -> Figures:
    """Each request gets 3 tokens, `slow` seconds apart."""
    records = [
        Record(i, 0.0, 0.0, 3 * slow, arrivals=[slow, 2 * slow, 3 * slow], input_tokens=5, output_tokens=3)
        for i in range(count)
    ]
    for record in records:
        record.worker_id, record.queue_s, record.cached_tokens = f"worker-{record.index % 2}", 0.004, record.index
    made = figures_of(records, setting, repeat, {"ttft": 2.0}, CPU)
    return replace(made, **changed)  # type: ignore[arg-type]


def test_numbers_have_three_digits_or_more() -> None:
    assert [number(value) for value in (0.0, 1.234, 12.34, 123.4, 12345.6)] == ["0.00", "1.23", "12.3", "123", "12346"]
    assert [percent(share) for share in (None, 0.0, 0.126, 1.0)] == ["-", "0%", "13%", "100%"]


def test_bench_table_is_aligned() -> None:
    lines = table([row(Setting(concurrency=8)), row(Setting(rate=2.5), slow=0.001, goodput=None)]).splitlines()
    assert lines[0].split() == (
        "LOAD OK FAIL REQ/S OUT/S TTFT P99 TPOT P99 ITL P99 LATENCY FOREIGN GOOD".split()  # noqa: SIM905
    )
    assert lines[1].split() == "c=8 4 0 1.33 4.00 1000 1000 1000 1000 1000 3000 3% 100%".split()  # noqa: SIM905
    assert lines[2].split() == "2.5/s 4 0 1333 4000 1.00 1.00 1.00 1.00 1.00 3.00 3% -".split()  # noqa: SIM905
    assert len({len(line) for line in lines}) == 1


def test_bench_table_of_large_service_fits_100_columns() -> None:
    widest = replace(row(Setting(concurrency=4096), slow=99.0, count=20_000), output_tokens_per_s=654_321.0)
    assert max(map(len, table([widest, row(Setting(concurrency=1))]).splitlines())) <= 100


def test_unmeasured_figure_is_a_dash() -> None:
    line = table([figures_of([], Setting(concurrency=1))]).splitlines()[1]
    assert line.split() == ["c=1", "0", "0", "0.00", "0.00", *["-"] * 7]


def test_details_of_a_row() -> None:
    text = details(row(Setting(concurrency=8)))
    assert "c=8: 4 requests in 3.0 s, at most 4 in flight" in text
    assert "tokens: 20 in (6.67/s, 6 of them cached), 12 out (4.00/s)" in text
    assert "CPU: client 10%, service 80%, foreign 3%, stolen 0%" in text
    assert "workers: worker-0 2, worker-1 2" in text
    (queue,) = [line for line in text.splitlines() if line.startswith("queue")]
    assert queue.split()[2:] == ["4.00"] * 5
    assert "prefill" not in text
    assert "more than one worker" not in text
    assert "tokens: 20 in (6.67/s), 12 out" in details(row(Setting(concurrency=8), cached_tokens=None))
    assert "2 requests were given to more than one worker" in details(row(Setting(concurrency=8), retried=2))


def test_drafts_of_a_row() -> None:
    drafts = drafts_between([(5, 5), (5, 5)], [(15, 13), (13, 8), (0, 0)])
    assert drafts == [DraftCounts(10, 8), DraftCounts(8, 3)]
    told = [line for line in details(row(Setting(concurrency=8), drafts=tuple(drafts))).splitlines() if "draft" in line]
    assert told == ["drafts: 18 verified, 11 accepted (61%; by position 80% 38%), 2.10 tokens a verification"]
    assert "draft" not in details(row(Setting(concurrency=8)))
    assert row(Setting(concurrency=8)).tokens_per_verification == 1


def test_repetitions_are_summarized_by_median() -> None:
    rows = [row(Setting(concurrency=1), i, slow=slow) for i, slow in enumerate((1.0, 2.0, 4.0))]
    assert medians([*rows, row(Setting(concurrency=2))]) == (
        "c=1, 3 times: 2.00 (1.00 to 4.00) output tokens/s, TTFT 2000 (1000 to 4000) ms, TPOT 2000 (1000 to 4000) ms"
    )
    assert medians([row(Setting(concurrency=1))]) == ""


def test_disturbed_rows_have_warnings() -> None:
    assert warnings([row(Setting(concurrency=1))]) == []
    late = Record(0, 0.0, 0.5, 1.0)
    disturbed = figures_of([late], Setting(rate=3.0), cpu=replace(CPU, foreign=0.34))
    assert warnings([disturbed]) == [
        "3/s: other processes took 34% of this machine; measure again",
        "3/s: this client sent 500 ms late (p99); it is a bottleneck",
    ]


def test_failures_of_all_rows_are_one_line() -> None:
    failed = [
        figures_of([Record(0, 0, 0, 1.0, "UNAVAILABLE", "gone"), Record(1, 0, 0, 2.0)], Setting(concurrency=1)),
        figures_of([Record(0, 0, 0, 1.0, "INTERNAL", "x"), Record(1, 0, 0, 2.0, "UNAVAILABLE", "y")], Setting(rate=1)),
    ]
    assert failure_line(failed) == "3 of 4 requests failed: 2 UNAVAILABLE: gone; 1 INTERNAL: x"
    assert failure_line([row(Setting(concurrency=1))]) == ""


def test_bench_json_names_schema_and_version() -> None:
    rows = [row(Setting(concurrency=1)), row(Setting(rate=1 / 3, burstiness=math.inf))]
    about: dict[str, Any] = {"model": {}, "options": {"seed": 0}, "environment": {"cpu": "x"}}
    made = as_json(rows, mode="serve", started="2026-11-21T18:00:00Z", interrupted=False, **about)
    again = json.loads(json.dumps(made, allow_nan=False))
    assert (again["schema"], again["version"], again["mode"]) == (SCHEMA, 1, "serve")
    assert again["rows"][0]["setting"] == {"concurrency": 1, "rate": None, "burstiness": None}
    assert again["rows"][1]["setting"] == {"concurrency": None, "rate": 0.333333, "burstiness": "inf"}
    assert [each["repeats"] for each in again["overviews"]] == [1, 1]
