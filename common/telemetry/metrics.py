"""OpenTelemetry's instruments, and a snapshot of a worker's engine that they read. The snapshot is pure.

The exporting thread reads the snapshot that the engine's last turn left, which is replaced, never changed. So nothing
is counted on the engine's thread. Metrics are off unless an OTLP endpoint is set or scrapers have a port; each works
without the other, and both read the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from common.limits import TELEMETRY_SHUTDOWN_S
from common.process.tasks import task_failures
from common.telemetry import exporter, names
from common.telemetry.failures import failures, harmless
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


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Snapshot of an engine; totals count from its start.

    Attributes:
        running: sequences in the running set.
        max_running: most sequences that the running set may hold.
        waiting: sequences that wait for a step.
        free_blocks: KV blocks that are free or can be evicted.
        total_blocks: KV blocks in all.
        block_size: tokens per KV block.
        steps: steps computed.
        preemptions: sequences queued again because blocks ran out.
        nan_rows: rows of logits without a finite maximum; each ended its sequence.
        prompt_tokens: prompt tokens of the sequences that have output a token.
        cached_tokens: prompt tokens found in the prefix cache up to the first output token. Tokens that a preempted
            sequence finds again do not count.
        generated_tokens: tokens delivered.
        draft_tokens: verified drafts.
        accepted_tokens: accepted drafts.
        drafts: verified and accepted drafts by method and by the draft's position after a token, from 0 on.
        ended: sequences by the reason of their end.
    """

    running: int = 0
    max_running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    steps: int = 0
    preemptions: int = 0
    nan_rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafts: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


# Upper bounds of histograms' buckets, from 0.2 ms to an hour; between them those that the GenAI conventions advise.
_SHORT: Final = (0.0002, 0.0005)
_LONG: Final = (20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 3600.0)
DURATION_BOUNDS: Final = (
    *_SHORT, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
    81.92, 163.84, 327.68, 655.36, 1310.72, 3600.0,
)  # fmt: skip
TTFT_BOUNDS: Final = (
    *_SHORT, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, *_LONG,
)  # fmt: skip
TPOT_BOUNDS: Final = (
    *_SHORT, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
    *_LONG,
)  # fmt: skip

ReadFigures = Callable[[], EngineFigures | None]


class _Instrument(NamedTuple):
    name: str
    unit: str
    description: str
    value: Callable[[EngineFigures], float]


_GAUGES: Final = (
    _Instrument(names.ENGINE_RUNNING, "{sequence}", "Sequences in the running set", lambda f: f.running),
    _Instrument(names.ENGINE_MAX_RUNNING, "{sequence}", "Most sequences in the running set", lambda f: f.max_running),
    _Instrument(names.ENGINE_WAITING, "{sequence}", "Sequences that wait for a step", lambda f: f.waiting),
    _Instrument(names.ENGINE_KV_USAGE, "1", "Part of the KV blocks that sequences hold", lambda f: f.kv_usage),
    _Instrument(names.ENGINE_KV_BLOCKS, "{block}", "KV blocks in all", lambda f: f.total_blocks),
    _Instrument(names.ENGINE_KV_BLOCK_SIZE, "{token}", "Tokens per KV block", lambda f: f.block_size),
)
_COUNTERS: Final = (
    _Instrument(names.ENGINE_STEPS, "{step}", "Steps computed", lambda f: f.steps),
    _Instrument(names.ENGINE_PREEMPTIONS, "{preemption}", "Sequences put back for blocks", lambda f: f.preemptions),
    _Instrument(names.ENGINE_NAN_ROWS, "{row}", "Logits that were no numbers", lambda f: f.nan_rows),
    _Instrument(names.ENGINE_PROMPT_TOKENS, "{token}", "Prompt tokens", lambda f: f.prompt_tokens),
    _Instrument(names.ENGINE_CACHED_TOKENS, "{token}", "Prompt tokens found in the cache", lambda f: f.cached_tokens),
    _Instrument(names.ENGINE_GENERATED_TOKENS, "{token}", "Tokens delivered", lambda f: f.generated_tokens),
)  # fmt: skip
# Metrics of drafts by position; with one zero entry if there are no drafts.
_OF_DRAFTS: Final = (
    _Instrument(names.ENGINE_DRAFT_TOKENS, "{token}", "Draft tokens verified", lambda f: f.draft_tokens),
    _Instrument(names.ENGINE_ACCEPTED_TOKENS, "{token}", "Draft tokens accepted", lambda f: f.accepted_tokens),
)
# vLLM's names for these figures.
_VLLM_GAUGES: Final = (
    _Instrument(names.VLLM_RUNNING, "", "Sequences in the running set", lambda f: f.running),
    _Instrument(names.VLLM_WAITING, "", "Sequences that wait for a step", lambda f: f.waiting),
    _Instrument(names.VLLM_KV_USAGE, "", "Part of the KV blocks that sequences hold", lambda f: f.kv_usage),
)
_VLLM_COUNTERS: Final = (
    _Instrument(names.VLLM_PROMPT_TOKENS, "", "Prompt tokens", lambda f: f.prompt_tokens),
    _Instrument(names.VLLM_GENERATION_TOKENS, "", "Tokens delivered", lambda f: f.generated_tokens),
    _Instrument(names.VLLM_CACHE_QUERIES, "", "Prompt tokens looked up in the prefix cache", lambda f: f.prompt_tokens),
    _Instrument(names.VLLM_CACHE_HITS, "", "Prompt tokens found in the prefix cache", lambda f: f.cached_tokens),
    _Instrument(names.VLLM_PREEMPTIONS, "", "Sequences put back for blocks", lambda f: f.preemptions),
    _Instrument(names.VLLM_DRAFT_TOKENS, "", "Draft tokens verified", lambda f: f.draft_tokens),
    _Instrument(names.VLLM_ACCEPTED_TOKENS, "", "Draft tokens accepted", lambda f: f.accepted_tokens),
)
# Reasons of a sequence's end in vLLM; all others are `error`.
_VLLM_REASONS: Final = {
    "eos": "stop",
    "stop_token": "stop",
    "stop_sequence": "stop",
    "constraint": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
}


def setup_metrics(service_name: str, instance_id: str, *, is_scraped: bool = False) -> Metrics:
    """Metrics by the environment's settings: sent by OTLP if OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME is set.
        instance_id: `service.instance.id`, unique per process start.
        is_scraped: True if the process has a port for scrapers.
    """
    table = SeriesTable(exporter.resource_labels(service_name, instance_id)) if is_scraped else None
    export = exporter.MetricExport(service_name, instance_id) if exporter.endpoint("metrics") else None
    metrics = Metrics(None if export is None else export.provider, export, table)
    if metrics.enabled:
        _observe_process(metrics)
    return metrics


def _observe_process(metrics: Metrics) -> None:
    """Observes the process's losses: dropped log lines, failed observations, restarted tasks."""
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


class _MeterShutdown(Protocol):
    def shutdown(self, timeout_s: float) -> None: ...


class Metrics:
    """The instruments of one process. Without a provider and a table nothing is recorded.

    Args:
        provider: makes the instruments that OTLP exports.
        export: ends the export.
        table: shows the same figures to scrapers, and those under other servers' names.

    Attributes:
        table: see above; None without a port for scrapers.
    """

    def __init__(
        self,
        provider: MeterProvider | None = None,
        export: _MeterShutdown | None = None,
        table: SeriesTable | None = None,
    ) -> None:
        self.table = table
        self._meter = provider.get_meter(names.METER) if provider is not None else None
        self._export = export

    @property
    def enabled(self) -> bool:
        """True if metrics are exported or scraped."""
        return self._meter is not None or self.table is not None

    def observe_engine(self, read: ReadFigures, labels: Labels) -> None:
        """Exports an engine's figures from now on.

        Args:
            read: returns the newest figures, None before the engine has started; called on the exporting thread.
            labels: attributes of every figure: few, and with constant values (`names.REQUEST_MODEL`, ...).
        """
        for one in _GAUGES:
            self.gauge(one.name, one.unit, one.description, _figure(read, one, labels))
        for one in _COUNTERS:
            self.counter(one.name, one.unit, one.description, _figure(read, one, labels))
        for place, one in enumerate(_OF_DRAFTS):
            self.counter(one.name, one.unit, one.description, _drafts(read, one, place, labels))
        self.counter(names.ENGINE_ENDED, "{sequence}", "Sequences that have ended, by the reason", _ended(read, labels))

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
            self._exported.record(value, labels, _exemplar_context())

    def points(self) -> list[HistogramPoint]:
        """The values that scrapers see."""
        return [] if self._shown is None else self._shown.points()


def _exemplar_context() -> Context | None:
    """Context with the current trace, from which the SDK takes exemplars; None if the trace is not sampled."""
    if (ids := sampled_trace()) is None:
        return None
    trace_id, span_id = (int(part, 16) for part in ids)
    span = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(span))


def _figure(read: ReadFigures, one: _Instrument, labels: Labels) -> Callable[[], Observed]:
    def observe() -> Observed:
        figures = read()
        return [] if figures is None else [(one.value(figures), labels)]

    return observe


def _drafts(read: ReadFigures, one: _Instrument, place: int, labels: Labels) -> Callable[[], Observed]:
    def observe() -> Observed:
        figures = read()
        if figures is None:
            return []
        if not figures.drafts:
            return [(one.value(figures), labels)]
        return [
            (counts[place], {**labels, names.DRAFT_METHOD: method, names.DRAFT_POSITION: str(position)})
            for (method, position), counts in figures.drafts.items()
        ]

    return observe


def _ended(read: ReadFigures, labels: Labels) -> Callable[[], Observed]:
    def observe() -> Observed:
        figures = read() or EngineFigures()
        return [(count, {**labels, names.END_REASON: why}) for why, count in figures.ended.items()]

    return observe


def show_engine_as_vllm(table: SeriesTable, read: ReadFigures, model: str) -> None:
    """Adds vLLM's names for an engine's figures to a table.

    Args:
        table: of the metrics for scrapers.
        read: returns the newest figures, None before the engine has started.
        model: the model's name.
    """
    labels = {names.VLLM_MODEL: model}

    def cache_config() -> Observed:
        figures = read()
        if figures is None:
            return []
        blocks, size = str(figures.total_blocks), str(figures.block_size)
        return [(1, {**labels, "block_size": size, "num_gpu_blocks": blocks})]

    def successes() -> Observed:
        totals = Counter[str]()
        for reason, count in (read() or EngineFigures()).ended.items():
            totals[_VLLM_REASONS.get(reason, "error")] += count
        return [(count, {**labels, names.VLLM_REASON: reason}) for reason, count in totals.items()]

    for one in _VLLM_GAUGES:
        table.add(one.name, "gauge", "", one.description, _figure(read, one, labels))
    for one in _VLLM_COUNTERS:
        table.add(one.name, "counter", "", one.description, _figure(read, one, labels))
    table.add(names.VLLM_CACHE_CONFIG, "gauge", "", "KV blocks", cache_config)
    table.add(names.VLLM_SUCCESS, "counter", "", "Sequences that have ended, by the reason", successes)


def _observer(read: Callable[[], Observed]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for value, labels in read()]

    return observe
