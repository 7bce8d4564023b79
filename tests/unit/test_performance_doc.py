"""docs/reference/performance.md, the notebook and the plots equal those generated from tests/bench/results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench.peers.floors import Machine, closed_loop_bound
from tests.bench.peers.report import weight_bytes
from tests.bench.plots import charts, page
from tests.bench.plots.results import Result, Row, load
from tests.bench.plots.svg import Panel, Point, Style, render, ticks
from tests.bench.plots.tables import TABLES

RESULTS = load()
MADE = page.files(RESULTS)
IMAGES = {path.name for path in (page.DOCS / "img").glob("performance-*.svg")}
FIGURES = [
    pytest.param(run, row, id=f"{run.name}-{row.labels['concurrency']}-{row.labels['peer']}")
    for run in RESULTS
    for row in run.find("of_bound")
    if run.limit("memory_read") and run.limit("arithmetic")
]
UNITS = {
    *(
        "us",
        "ms",
        "s",
        "ms/s",
        "us/token",
        "us/request",
        "s per 1000 tokens",
        "GB/s",
        "GFLOP/s",
        "TFLOP/s",
        "MiB",
        "bytes",
    ),
    *("schemas", "instances", "answers"),
    *("tokens", "million tokens", "tokens/s", "requests", "requests/s", "%", "% of a core", "times", "ratio"),
}


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_performance_files_equal_generated_ones(path: Path) -> None:
    """`python -m tests.bench.plots` would change no file."""
    assert path.read_text() == MADE[path]


def test_pages_show_every_table_and_plot_once() -> None:
    text = "".join(path.read_text() for path in page.PAGES)
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", text)) == sorted(TABLES)
    assert sorted(re.findall(r"\]\(../img/([\w.-]+)\)", text)) == sorted(IMAGES)
    assert {path.name for path in page.plots(RESULTS)} == IMAGES


def _with_other_figure(metric: str, kind: str) -> list[Result]:
    def changed(run: Result) -> Result:
        rows = [replace(row, value=row.value + 1) if row.metric == metric else row for row in run.rows]
        return replace(run, rows=rows)

    return [changed(run) if run.bench == "peers" and run.machine.kind == kind else run for run in RESULTS]


def test_changed_figure_changes_its_page_and_plot() -> None:
    """The comparison above detects one changed figure, in its own files only."""
    made = page.files(_with_other_figure("ttft_p50", "zen4"))
    assert {path.name for path in made if made[path] != MADE[path]} == {"service.md", "performance-zen4.svg"}


def test_performance_page_is_short() -> None:
    assert len(page.PAGE.read_text().splitlines()) <= 200


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        page.filled("<!-- table: nothing -->\n<!-- end -->", RESULTS)


@pytest.mark.parametrize(("run", "row"), FIGURES)
def test_shares_of_limit_follow_formula(run: Result, row: Row) -> None:
    """The share printed at measurement equals that of the rates and tokens per second in the file."""
    rates = run.limit("memory_read"), run.limit("arithmetic")
    assert rates[0] is not None
    assert rates[1] is not None
    peer, concurrency = str(row.labels["peer"]), int(row.labels["concurrency"])
    machine = Machine(rates[0] * 1e9, rates[1] * 1e9)
    limit = closed_loop_bound(
        charts.SHAPE, machine, concurrency, charts.PROMPT, charts.OUTPUT, weight_bytes(peer)
    ).in_series
    speed = run.find("output_tokens_per_s", peer=peer, concurrency=concurrency)[0]
    # Rates and speeds in the file are rounded, too.
    assert 100 * float(speed.value) / limit == pytest.approx(float(row.value), abs=1.0)


@pytest.mark.parametrize("run", RESULTS, ids=lambda run: run.name)
def test_results_are_complete(run: Result) -> None:
    assert run.name.startswith(run.date[:10])
    assert run.commit is None or re.fullmatch(r"[0-9a-f]{7,40}", run.commit)
    assert run.machine.kind in (*charts.KINDS, "unrecorded")
    assert (run.machine.processor is None) == (run.machine.kind == "unrecorded")
    assert {row.unit for row in run.rows} <= UNITS
    same = Counter((row.metric, row.repetition, *sorted(row.labels.items())) for row in run.rows)
    assert [key for key, count in same.items() if count > 1] == []


_ENTRY: dict[str, Any] = {"metric": "load", "unit": "s", "value": 1}


@pytest.mark.parametrize("entry", [{**_ENTRY, "value": "1"}, {**_ENTRY, "value": True}, {**_ENTRY, "value": None}])
def test_values_are_numbers(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a number"):
        Row.of(entry)


def test_figures_keep_their_digits(tmp_path: Path) -> None:
    """1.40 is not written as 1.4, nor a range as its lower end."""
    machine = '{"kind": "amx", "processor": "p", "instruction_set": "amx", "cores": 2}'
    load_s = '"metric": "load", "unit": "s"'
    rows = f'[{{{load_s}, "value": 1.40}}, {{{load_s}, "value": 1, "value_max": 2.0}}]'
    head = '"bench": "b", "commit": null, "date": "2026-01-01", "command": null, "workload": null, "about": ""'
    (tmp_path / "r.json").write_text(f'{{{head}, "machine": {machine}, "rows": {rows}}}')
    assert [row.text for row in load(tmp_path)[0].rows] == ["1.40", "1 to 2.0"]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("least", "most"), [(4.2, 57.5), (20, 440.0), (1, 1), (691, 215_000), (0.01, 0.02)])
def test_ticks_enclose_the_data(least: float, most: float, log: bool) -> None:
    marks = ticks(least, most, log=log)
    assert marks[0] <= least
    assert marks[-1] >= most
    assert list(marks) == sorted(set(marks))
    assert len(marks) >= 2


def _circles(points: Sequence[Point]) -> list[ElementTree.Element]:
    panel = Panel("title <&>", False, {"a": points})
    image = render("plot", "x", ["1", "2"], [panel], {"a": Style("A", "#111111"), "absent": Style("B", "#222222")})
    tree = ElementTree.fromstring(image)
    assert "B" not in [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    # The last circle belongs to the legend.
    return list(tree.iter("{http://www.w3.org/2000/svg}circle"))[:-1]


def test_plot_points_are_at_their_values() -> None:
    """Half the value has half the height; an excluded point is hollow."""
    low, high = _circles([Point(0, 50.0), Point(1, 100.0, counts=False)])
    bottom = 62 + 210
    assert float(low.attrib["cx"]) < float(high.attrib["cx"])
    assert bottom - float(low.attrib["cy"]) == pytest.approx((bottom - float(high.attrib["cy"])) / 2, abs=0.1)
    assert (low.attrib["fill"], high.attrib["fill"]) == ("#111111", "#ffffff")
