"""The instruments of a process, for OTLP and for scrapers.

Metrics are off unless an OTLP endpoint is set or scrapers have a port; each works without the other, and both read the
same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from common.limits import TELEMETRY_SHUTDOWN_S
from common.process.tasks import task_failures
from common.telemetry import exporter, names
from common.telemetry.failures import failures, harmless, span_counts
from common.telemetry.output import dropped_pieces
from common.telemetry.prometheus import (
    HistogramPoint,
    Kind,
    Labels,
    Observed,
    SeriesHistogram,
    SeriesTable,
    sampled_trace,
)


def setup_metrics(
    service_name: str, instance_id: str, *, is_scraped: bool = False, open_spans: Callable[[], int] = int
) -> Metrics:
    """Metrics by the environment's settings: sent by OTLP if OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME is set.
        instance_id: `service.instance.id`, unique per process start.
        is_scraped: True if the process has a port for scrapers.
        open_spans: number of the process's spans that have not ended.
    """
    table = SeriesTable(exporter.resource_labels(service_name, instance_id)) if is_scraped else None
    export = exporter.MetricExport(service_name, instance_id) if exporter.endpoint("metrics") else None
    metrics = Metrics(None if export is None else export.provider, export, table)
    if metrics.enabled:
        _observe_process(metrics, open_spans)
    return metrics


def _observe_process(metrics: Metrics, open_spans: Callable[[], int]) -> None:
    """Observes the process's losses: dropped log lines and spans, failed observations, restarted tasks."""
    metrics.gauge(names.PROCESS_OPEN_SPANS, "{span}", "Spans that have not ended", lambda: [(open_spans(), {})])
    metrics.counter(
        names.PROCESS_SPANS,
        "{span}",
        "Spans that have ended and were kept, by result",
        lambda: [(count, {names.SPAN_RESULT: result}) for result, count in span_counts().items()],
    )
    metrics.counter(
        names.PROCESS_LOGS_DROPPED, "{line}", "Log lines that could not be written", lambda: [(dropped_pieces(), {})]
    )
    metrics.counter(
        names.PROCESS_TELEMETRY_FAILED,
        "{failure}",
        "Lines, spans and figures that could not be made",
        lambda: [(count, {names.SIGNAL: signal}) for signal, count in failures().items()],
    )
    metrics.counter(
        names.PROCESS_TASKS_FAILED,
        "{failure}",
        "Failures of long-lived tasks, each begun anew, and of callbacks",
        lambda: [(count, {names.TASK: task}) for task, count in task_failures().items()],
    )


class Metrics:
    """The instruments of one process. Without a provider and a table nothing is recorded.

    Args:
        provider: makes the instruments that OTLP exports.
        export: exports the histograms that the SDK does not know, and ends the export.
        table: shows the same figures to scrapers, and those under other servers' names.

    Attributes:
        table: see above; None without a port for scrapers.
    """

    def __init__(
        self,
        provider: MeterProvider | None = None,
        export: exporter.MetricExport | None = None,
        table: SeriesTable | None = None,
    ) -> None:
        self.table = table
        self._meter = provider.get_meter(names.METER) if provider is not None else None
        self._export = export

    @property
    def enabled(self) -> bool:
        """True if metrics are exported or scraped."""
        return self._meter is not None or self.table is not None

    def gauge(self, name: str, unit: str, description: str, read: Callable[[], Observed]) -> None:
        """Exports current values from now on; `read` is called on the exporting thread."""
        if self._meter is not None:
            self._meter.create_observable_gauge(name, [_observer(read)], unit, description)
        self._show(name, "gauge", unit, description, read)

    def counter(self, name: str, unit: str, description: str, read: Callable[[], Observed]) -> None:
        """Exports totals from now on; `read` is called on the exporting thread."""
        if self._meter is not None:
            self._meter.create_observable_counter(name, [_observer(read)], unit, description)
        self._show(name, "counter", unit, description, read)

    def _show(self, name: str, kind: Kind, unit: str, description: str, read: Callable[[], Observed]) -> None:
        if self.table is not None:
            self.table.add(name, kind, unit, description, read)

    def histogram(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> MetricHistogram:
        """Makes a histogram with the buckets between `bounds`."""
        exported = shown = None
        if self._meter is not None:
            exported = self._meter.create_histogram(
                name, unit, description, explicit_bucket_boundaries_advisory=list(bounds)
            )
        if self.table is not None:
            shown = SeriesHistogram(bounds)
            self.table.add_histogram(name, unit, description, bounds, shown.points)
        return MetricHistogram(bounds, exported, shown)

    def series_histogram(
        self, name: str, unit: str, description: str, bounds: Sequence[float]
    ) -> SeriesHistogram | None:
        """Makes a histogram whose series can end, and which costs a seventh of one of the SDK; None if metrics are off.

        OTLP sends it with the buckets between `bounds` and cumulative, whatever the SDK's variables say.
        """
        if not self.enabled:
            return None
        histogram = SeriesHistogram(bounds)
        if self.table is not None:
            self.table.add_histogram(name, unit, description, bounds, histogram.points)
        if self._export is not None:
            self._export.add_histogram(name, unit, description, histogram)
        return histogram

    def shutdown(self, timeout_s: float = TELEMETRY_SHUTDOWN_S) -> None:
        """Sends the last figures, within `timeout_s` seconds."""
        if self._export is not None:
            self._export.shutdown(timeout_s)


class MetricHistogram:
    """A histogram for OTLP, for scrapers, for both or for neither; any thread may call it to record a value.

    Attributes:
        bounds: upper bounds of its buckets, ascending.
    """

    def __init__(self, bounds: Sequence[float], exported: Histogram | None, shown: SeriesHistogram | None) -> None:
        self.bounds = bounds
        self._exported, self._shown = exported, shown

    @harmless("metrics")
    def __call__(self, value: float, labels: Labels) -> None:
        """Records a value."""
        if self._shown is not None:
            self._shown.record(value, labels)
        if self._exported is not None:
            self._exported.record(value, labels, _exemplar_context(sampled_trace()))

    def points(self) -> list[HistogramPoint]:
        """The values that scrapers see."""
        return [] if self._shown is None else self._shown.points()


@functools.lru_cache
def _exemplar_context(trace: tuple[str, str] | None) -> Context | None:
    """Context with a sampled trace, from which the SDK takes exemplars; None without one."""
    if trace is None:
        return None
    trace_id, span_id = (int(part, 16) for part in trace)
    span = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(span))


def _observer(read: Callable[[], Observed]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for value, labels in read()]

    return observe
