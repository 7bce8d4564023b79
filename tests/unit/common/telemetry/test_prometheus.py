"""The text for scrapers, as Prometheus' own parsers read it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import MAX_HISTOGRAM_SERIES
from common.telemetry.failures import failures
from common.telemetry.metrics import Metrics
from common.telemetry.prometheus import (
    Family,
    HistogramPoint,
    SeriesHistogram,
    SeriesTable,
    current_traceparent,
    label_name,
    metric_name,
    openmetrics_text,
    prometheus_text,
)
from router.telemetry.model_loads import merged
from tests.scraped import read_openmetrics, read_text
from worker.engine.figures import EngineFigures, observe_engine, show_engine_as_vllm

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
Sample = tuple[str, tuple[tuple[str, str], ...], float]


def samples(families: Iterable[Any]) -> Counter[Sample]:
    return Counter(
        (each.name, tuple(sorted(each.labels.items())), each.value) for family in families for each in family.samples
    )


def both(families: list[Family]) -> tuple[Counter[Sample], Counter[Sample]]:
    """The samples in both formats."""
    text, openmetrics = prometheus_text(families).decode(), openmetrics_text(families).decode()
    return samples(read_text(text)), samples(read_openmetrics(openmetrics))


NUMBERS = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False))
LABELS = st.dictionaries(st.text(min_size=1, max_size=12), st.text(max_size=20), max_size=4)


@given(st.lists(st.tuples(NUMBERS, LABELS), min_size=1, max_size=6), st.text(max_size=30), st.text(max_size=12))
def test_any_labels_and_help_survive_both_formats(
    values: list[tuple[float, dict[str, str]]], description: str, name: str
) -> None:
    """Names, labels, escapes: every value that is written is read again, under labels that Prometheus accepts."""
    plain, unit = metric_name(f"fissile.{name}", "s", "gauge")
    distinct = {tuple(sorted(wanted(labels).items())): (value, labels) for value, labels in values}
    families = [Family(plain, "gauge", unit, description, list(distinct.values()))]
    expected = Counter((plain, labels, float(value)) for labels, (value, _) in distinct.items())
    for found in both(families):
        assert found == expected


def wanted(labels: dict[str, str]) -> dict[str, str]:
    return {label_name(name): value for name, value in labels.items()}


@given(st.lists(st.floats(0, 10), max_size=40), st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), unique=True))
def test_histogram_buckets_count_like_brute_force(values: list[float], bounds: list[float]) -> None:
    histogram = SeriesHistogram(sorted(bounds))
    for value in values:
        histogram.record(value, {"a.b": "x"})
    families = [Family("h_seconds", "histogram", "seconds", "", bounds=histogram.bounds, points=histogram.points())]
    for found in both(families):
        read = {(name, dict(labels).get("le")): value for name, labels, value in found}
        if not values:
            assert read == {}
            continue
        for bound in [*bounds, math.inf]:
            le = "+Inf" if bound == math.inf else repr(bound)
            assert read["h_seconds_bucket", le] == sum(value <= bound for value in values)
        assert read["h_seconds_count", None] == len(values)
        assert read["h_seconds_sum", None] == pytest.approx(math.fsum(values))


@pytest.mark.parametrize(
    ("name", "unit", "kind", "found"),
    [
        ("fissile.engine.kv_cache.usage", "1", "gauge", ("fissile_engine_kv_cache_usage_ratio", "ratio")),
        ("fissile.engine.steps", "{step}", "counter", ("fissile_engine_steps", "")),
        ("gen_ai.server.request.duration", "s", "histogram", ("gen_ai_server_request_duration_seconds", "seconds")),
        ("vllm:time_to_first_token_seconds", "s", "histogram", ("vllm:time_to_first_token_seconds", "seconds")),
        ("things.total", "", "counter", ("things", "")),
    ],
)  # fmt: skip
def test_names_follow_rules_of_opentelemetry(name: str, unit: str, kind: Any, found: tuple[str, str]) -> None:
    assert metric_name(name, unit, kind) == found


def test_kinds_units_and_end_are_said() -> None:
    table = SeriesTable({"service.name": "fissile-router", "service.version": "1"})
    table.add("a.count", "counter", "{x}", "Things", lambda: [(3, {"m": "x"})])
    table.add("vllm:cache_config_info", "gauge", "", "Blocks", lambda: [(1, {"block_size": "16"})])
    table.add("none", "gauge", "", "Without series", lambda: [])
    histogram = SeriesHistogram([1.0])
    histogram.record(0.5, {})
    table.add_histogram("t", "s", "Times", histogram.bounds, histogram.points)
    families = table.collect()
    text = {each.name: each for each in read_text(prometheus_text(families).decode())}
    assert {name: each.type for name, each in text.items()} == {
        "target_info": "gauge",
        "a_count": "counter",
        "vllm:cache_config_info": "gauge",
        "t_seconds": "histogram",
    }
    openmetrics = {each.name: each for each in read_openmetrics(openmetrics_text(families).decode())}
    assert {name: (each.type, each.unit) for name, each in openmetrics.items()} == {
        "target": ("info", ""),
        "a_count": ("counter", ""),
        "vllm:cache_config_info": ("gauge", ""),
        "t_seconds": ("histogram", "seconds"),
    }
    assert openmetrics["target"].samples[0].labels == {"service_name": "fissile-router", "service_version": "1"}


def test_exemplars_are_of_sampled_traces_only() -> None:
    histogram = SeriesHistogram([1.0, 2.0])
    for value, flags in ((0.5, "01"), (1.5, "00")):
        token = current_traceparent.set(f"00-{TRACE}-{SPAN}-{flags}")
        histogram.record(value, {})
        current_traceparent.reset(token)
    histogram.record(9.0, {})
    families = [Family("t", "histogram", "", "", bounds=histogram.bounds, points=histogram.points())]
    (family,) = read_openmetrics(openmetrics_text(families).decode())
    found = {each.labels["le"]: each.exemplar for each in family.samples if each.exemplar is not None}
    assert {le: (one.labels, one.value) for le, one in found.items()} == {
        "1.0": ({"trace_id": TRACE, "span_id": SPAN}, 0.5)
    }
    assert TRACE not in prometheus_text(families).decode()


def test_series_of_a_histogram_are_bounded() -> None:
    histogram, before = SeriesHistogram([1.0]), failures().get("metrics", 0)
    for i in range(MAX_HISTOGRAM_SERIES + 5):
        histogram.record(1, {"m": str(i)})
    assert len(histogram.points()) == MAX_HISTOGRAM_SERIES
    assert failures()["metrics"] == before + 5


def test_series_of_departed_workers_end() -> None:
    histogram = SeriesHistogram([1.0])
    for worker in ("w0", "w1"):
        histogram.record(1, {"worker": worker})
    histogram.keep("worker", {"w1", "w2"})
    assert [point.labels for point in histogram.points()] == [{"worker": "w1"}]


def test_one_metric_that_fails_leaves_the_others() -> None:
    table, before = SeriesTable({}), failures().get("metrics", 0)
    table.add("bad", "gauge", "", "", lambda: [(1 / 0, {})])
    table.add("good", "gauge", "", "", lambda: [(1, {})])
    assert [family.name for family in table.collect()] == ["target_info", "good"]
    assert failures()["metrics"] == before + 1


def test_second_family_of_a_name_is_left_out() -> None:
    families = [Family("a", "gauge", "", "", [(1, {})]), Family("a", "gauge", "", "", [(2, {})])]
    for found in both(families):
        assert found == Counter([("a", (), 1.0)])


def test_merged_adds_up_series_of_a_label() -> None:
    points = [
        HistogramPoint({"m": "x", "op": "chat"}, (1, 2), 3.0),
        HistogramPoint({"m": "x", "op": "text"}, (0, 4), 8.0),
        HistogramPoint({"m": "x", "error": "INTERNAL"}, (9, 9), 9.0),
        HistogramPoint({"m": "y"}, (1, 0), 0.5),
        HistogramPoint({}, (5, 5), 5.0),
    ]
    assert merged(points, {"m": "model_name"}, without="error") == [
        HistogramPoint({"model_name": "x"}, (1, 6), 11.0),
        HistogramPoint({"model_name": "y"}, (1, 0), 0.5),
    ]


def test_engine_has_vllm_names_for_its_figures() -> None:
    ended = {"eos": 2, "stop_sequence": 1, "length": 4, "deadline": 1, "cancelled": 1, "not_a_number": 1}
    figures: list[EngineFigures | None] = [None]
    metrics = Metrics(table=SeriesTable({}))
    assert metrics.table is not None
    observe_engine(metrics, lambda: figures[0], {"gen_ai.request.model": "m"})
    show_engine_as_vllm(metrics.table, lambda: figures[0], "m")
    assert [family.name for family in metrics.table.collect() if family.values] == ["target_info"]
    figures[0] = EngineFigures(
        running=3, waiting=2, free_blocks=25, total_blocks=100, block_size=16, prompt_tokens=50, cached_tokens=20,
        generated_tokens=70, preemptions=1, ended=ended,
    )  # fmt: skip
    text, openmetrics = both(metrics.table.collect())
    assert text == openmetrics
    found = {(name, labels): value for name, labels, value in text if name.startswith("vllm:")}
    m = ("model_name", "m")
    assert found == {
        ("vllm:num_requests_running", (m,)): 3,
        ("vllm:num_requests_waiting", (m,)): 2,
        ("vllm:kv_cache_usage_perc", (m,)): 0.75,
        ("vllm:cache_config_info", (("block_size", "16"), m, ("num_gpu_blocks", "100"))): 1,
        ("vllm:prompt_tokens_total", (m,)): 50,
        ("vllm:generation_tokens_total", (m,)): 70,
        ("vllm:prefix_cache_queries_total", (m,)): 50,
        ("vllm:prefix_cache_hits_total", (m,)): 20,
        ("vllm:num_preemptions_total", (m,)): 1,
        ("vllm:spec_decode_num_draft_tokens_total", (m,)): 0,
        ("vllm:spec_decode_num_accepted_tokens_total", (m,)): 0,
        ("vllm:request_success_total", (("finished_reason", "stop"), m)): 3,
        ("vllm:request_success_total", (("finished_reason", "length"), m)): 4,
        ("vllm:request_success_total", (("finished_reason", "abort"), m)): 2,
        ("vllm:request_success_total", (("finished_reason", "error"), m)): 1,
    }
    own = {name: value for name, _, value in text if not name.startswith("vllm:")}
    assert own["fissile_engine_kv_cache_usage_ratio"] == 0.75
    assert own["fissile_engine_tokens_generated_total"] == 70
