"""Figures as text for Prometheus and OpenMetrics. Pure.

Why not `opentelemetry-exporter-prometheus` or a reader of the SDK's `MetricsData` (measured with version 1.45, 64
workers and 5 models, 395 points):

- The exporter drops exemplars, collects anew for every scrape, and takes 12 ms for each. This text takes 2 ms.
- The SDK's aggregation remembers the labels of every worker that ever was. After 2,000 it merges all new ones into one
  overflow series, for good. Here a series exists for as long as its instrument reports it.
- Autoscalers want names with a colon (`vllm:num_requests_waiting`), which the SDK refuses.

So `Metrics` gives each instrument both to the SDK and to a `SeriesTable`, and OTLP and this text read the same values.
Names follow OpenTelemetry's rules for Prometheus, so a collector's exporter would give a metric the same name.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from common.limits import MAX_HISTOGRAM_SERIES
from common.telemetry.failures import count_failure

Kind = Literal["gauge", "counter", "histogram"]
Labels = Mapping[str, str]
# Values with their labels. Labels that are missing from the next reading are no longer exported.
Observed = Iterable[tuple[float, Labels]]

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Trace parent of the current task's request; "" outside of one. Values that are recorded meanwhile get it as exemplar.
current_traceparent: ContextVar[str] = ContextVar("current_traceparent", default="")

_UNITS: Final = {"s": "seconds", "ms": "milliseconds", "By": "bytes"}
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_:]+")
_NOT_IN_LABELS: Final = re.compile(r"[^a-zA-Z0-9_]")
_SAMPLED: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def sampled_trace() -> tuple[str, str] | None:
    """Ids of the current request's trace and span, in hexadecimal; None if the trace is not sampled."""
    return _sampled_ids(current_traceparent.get())


@functools.lru_cache  # A request records some twenty values.
def _sampled_ids(traceparent: str) -> tuple[str, str] | None:
    found = _SAMPLED.fullmatch(traceparent)
    return None if found is None else (found[1], found[2])


class Exemplar(NamedTuple):
    """One recorded value with the trace of its request; `time_s` is Unix time."""

    value: float
    time_s: float
    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """Values of one series of a histogram.

    Attributes:
        labels: of the series.
        counts: values in each bucket, not cumulative; the last bucket has no upper bound.
        total: sum of the values.
        exemplars: newest value with a sampled trace, by bucket.
    """

    labels: Labels
    counts: tuple[int, ...]
    total: float
    exemplars: Mapping[int, Exemplar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one metric.

    Attributes:
        name: without the suffix `_total` of a counter.
        kind: of the metric.
        unit: the name's last word if it is a unit, else "".
        description: one line.
        values: of a gauge or a counter.
        bounds: upper bounds of a histogram's buckets, ascending.
        points: of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    values: Sequence[tuple[float, Labels]] = ()
    bounds: Sequence[float] = ()
    points: Sequence[HistogramPoint] = ()


def metric_name(name: str, unit: str, kind: Kind) -> tuple[str, str]:
    """An instrument's name in Prometheus, and the unit in it.

    Args:
        name: in OpenTelemetry, such as `fissile.engine.kv_cache.usage`.
        unit: in UCUM; one in braces is an annotation and no part of the name.
        kind: of the instrument.
    """
    plain = _NOT_IN_NAMES.sub("_", name)
    if plain[:1].isdigit() or not plain:
        plain = f"_{plain}"
    suffix = "ratio" if unit == "1" and kind == "gauge" else _UNITS.get(unit, "")
    if suffix and not plain.endswith(f"_{suffix}"):
        plain = f"{plain}_{suffix}"
    return plain.removesuffix("_total") if kind == "counter" else plain, suffix


def label_name(name: str) -> str:
    """An attribute's name as a label: `gen_ai.request.model` is `gen_ai_request_model`."""
    plain = _NOT_IN_LABELS.sub("_", name)
    # Names that begin with two underscores are Prometheus' own.
    return f"_{plain.lstrip('_')}" if not plain or plain[0].isdigit() or plain.startswith("__") else plain


class SeriesHistogram:
    """A histogram whose values any thread may record.

    Series beyond MAX_HISTOGRAM_SERIES are dropped and counted as failures.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._series: dict[tuple[tuple[str, str], ...], _Buckets] = {}

    def record(self, value: float, labels: Labels) -> None:
        """Adds one value, with the current trace as exemplar if it is sampled."""
        key = tuple(sorted(labels.items()))
        # Prometheus' buckets contain their upper bound.
        place = bisect.bisect_left(self.bounds, value)
        trace = sampled_trace()
        with self._lock:
            buckets = self._series.get(key)
            if buckets is None:
                if len(self._series) >= MAX_HISTOGRAM_SERIES:
                    count_failure("metrics")
                    return
                buckets = self._series[key] = _Buckets(dict(labels), [0] * (len(self.bounds) + 1))
            buckets.counts[place] += 1
            buckets.total += value
            if trace is not None:
                buckets.exemplars[place] = Exemplar(value, time.time(), *trace)

    def keep(self, label: str, values: Collection[str]) -> None:
        """Drops the series whose `label` has none of `values`."""
        with self._lock:
            for key in [key for key, each in self._series.items() if each.labels.get(label) not in values]:
                del self._series[key]

    def points(self) -> list[HistogramPoint]:
        """The values of all series."""
        with self._lock:
            return [
                HistogramPoint(each.labels, tuple(each.counts), each.total, dict(each.exemplars))
                for each in self._series.values()
            ]


@dataclass(slots=True)
class _Buckets:
    labels: Labels
    counts: list[int]
    total: float = 0.0
    exemplars: dict[int, Exemplar] = field(default_factory=dict)


class SeriesTable:
    """All metrics that a process shows to scrapers, each with the function that reads it.

    Args:
        resource: attributes of the process; they become the metric `target_info`.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._reads: list[Callable[[], Family]] = [
            lambda: Family("target_info", "gauge", "", "The process that is scraped", [(1, dict(resource))])
        ]

    def add(self, name: str, kind: Kind, unit: str, description: str, read: Callable[[], Observed]) -> None:
        """Adds a gauge or a counter; `read` is called on the thread that answers scrapers."""
        plain, suffix = metric_name(name, unit, kind)
        self._reads.append(lambda: Family(plain, kind, suffix, description, list(read())))

    def add_histogram(
        self,
        name: str,
        unit: str,
        description: str,
        bounds: Sequence[float],
        read: Callable[[], Sequence[HistogramPoint]],
    ) -> None:
        """Adds a histogram."""
        plain, suffix = metric_name(name, unit, "histogram")
        self._reads.append(lambda: Family(plain, "histogram", suffix, description, bounds=bounds, points=read()))

    def collect(self) -> list[Family]:
        """Reads all metrics. One that cannot be read is left out and counted as a failure."""
        families = []
        for read in self._reads:
            try:
                families.append(read())
            except Exception:
                count_failure("metrics")
        return families


def prometheus_text(families: Iterable[Family]) -> bytes:
    """The families in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for family in _with_series(families):
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {family.description.translate(_HELP_ESCAPES)}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines += _samples(family, has_exemplars=False)
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")


def openmetrics_text(families: Iterable[Family]) -> bytes:
    """The families in OpenMetrics' text format, version 1.0.0, with exemplars."""
    lines: list[str] = []
    for family in _with_series(families):
        # `target_info` is the only one; its type's name ends before `_info`.
        is_info = family.name == "target_info"
        name = "target" if is_info else family.name
        lines.append(f"# TYPE {name} {'info' if is_info else family.kind}")
        if family.unit:
            lines.append(f"# UNIT {name} {family.unit}")
        lines.append(f"# HELP {name} {family.description.translate(_ESCAPES)}")
        lines += _samples(family, has_exemplars=True)
    return "".join(f"{line}\n" for line in [*lines, "# EOF"]).encode("utf-8", "backslashreplace")


def _with_series(families: Iterable[Family]) -> Iterator[Family]:
    """The families that have series, each name once: a second family of a name would make the whole text invalid."""
    seen = set[str]()
    for family in families:
        if (family.values or family.points) and family.name not in seen:
            seen.add(family.name)
            yield family


def _samples(family: Family, *, has_exemplars: bool) -> Iterator[str]:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    for value, labels in family.values:
        yield f"{name}{_label_set(labels)} {_number(value)}"
    if not family.points:
        return
    bounds = [*map(_number, map(float, family.bounds)), "+Inf"]
    for point in family.points:
        inner = _inner_labels(point.labels)
        before = f"{name}_bucket{{{inner}," if inner else f"{name}_bucket{{"
        count = 0
        for place, bound in enumerate(bounds):
            count += point.counts[place]
            exemplar = _exemplar(point.exemplars.get(place)) if has_exemplars else ""
            yield f'{before}le="{bound}"}} {count}{exemplar}'
        after = f"{{{inner}}}" if inner else ""
        yield f"{name}_count{after} {count}"
        yield f"{name}_sum{after} {_number(point.total)}"


def _label_set(labels: Labels) -> str:
    return f"{{{_inner_labels(labels)}}}" if labels else ""


def _inner_labels(labels: Labels) -> str:
    # Of attributes whose names become one label, the last one counts.
    plain = {label_name(name): value for name, value in labels.items()}
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in plain.items())


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    ids = f'trace_id="{exemplar.trace_id}",span_id="{exemplar.span_id}"'
    return f" # {{{ids}}} {_number(exemplar.value)} {exemplar.time_s:.3f}"


def _number(value: float) -> str:
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
