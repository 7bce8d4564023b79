"""OpenTelemetry's instruments, and a snapshot of a worker's engine that they read. The snapshot is pure.

The exporting thread reads the snapshot that the engine's last turn left, which is replaced, never changed. So nothing
is counted on the engine's thread. Metrics are off unless an OTLP endpoint is set, like traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from opentelemetry.metrics import CallbackOptions, Histogram, Observation
from opentelemetry.sdk.metrics import MeterProvider

from common.limits import TELEMETRY_SHUTDOWN_S
from common.process.tasks import task_failures
from common.telemetry import exporter, names
from common.telemetry.failures import failures, harmless
from common.telemetry.output import dropped_pieces


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Snapshot of an engine; totals count from its start.

    Attributes:
        running: sequences in the running set.
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


Labels = Mapping[str, str]
# Values with their labels. Labels that are missing from the next reading are no longer exported.
Observed = Iterable[tuple[float, Labels]]
Record = Callable[[float, Labels], None]
ReadFigures = Callable[[], EngineFigures | None]


class _Instrument(NamedTuple):
    name: str
    unit: str
    description: str
    value: Callable[[EngineFigures], float]


_GAUGES: Final = (
    _Instrument(names.ENGINE_RUNNING, "{sequence}", "Sequences in the running set", lambda f: f.running),
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


def setup_metrics(service_name: str, instance_id: str) -> Metrics:
    """Metrics by the environment's settings: off unless OTEL_EXPORTER_OTLP_ENDPOINT is set.

    Args:
        service_name: `service.name`, unless OTEL_SERVICE_NAME is set.
        instance_id: `service.instance.id`, unique per process start.
    """
    if not exporter.endpoint("metrics"):
        return Metrics()
    export = exporter.MetricExport(service_name, instance_id)
    metrics = Metrics(export.provider, export)
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
    """The instruments of one process. Without a provider nothing is recorded."""

    def __init__(self, provider: MeterProvider | None = None, export: _MeterShutdown | None = None) -> None:
        self._meter = provider.get_meter(names.METER) if provider is not None else None
        self._export = export

    @property
    def enabled(self) -> bool:
        """True if metrics are exported."""
        return self._meter is not None

    def observe_engine(self, read: ReadFigures, labels: Labels) -> None:
        """Exports an engine's figures from now on.

        Args:
            read: returns the newest figures, None before the engine has started; called on the exporting thread.
            labels: attributes of every figure: few, and with constant values (`names.REQUEST_MODEL`, ...).
        """
        if self._meter is None:
            return
        for one in _GAUGES:
            self._meter.create_observable_gauge(one.name, [_callback(read, one, labels)], one.unit, one.description)
        for one in _COUNTERS:
            self._meter.create_observable_counter(one.name, [_callback(read, one, labels)], one.unit, one.description)
        for place, one in enumerate(_OF_DRAFTS):
            observed = _drafts(read, one, place, labels)
            self._meter.create_observable_counter(one.name, [observed], one.unit, one.description)
        self._meter.create_observable_counter(
            names.ENGINE_ENDED, [_ended(read, labels)], "{sequence}", "Sequences that have ended, by the reason"
        )

    def gauge(self, name: str, unit: str, description: str, read: Callable[[], Observed]) -> None:
        """Exports current values from now on; `read` is called on the exporting thread."""
        if self._meter is not None:
            self._meter.create_observable_gauge(name, [_observer(read)], unit, description)

    def counter(self, name: str, unit: str, description: str, read: Callable[[], Observed]) -> None:
        """Exports totals from now on; `read` is called on the exporting thread."""
        if self._meter is not None:
            self._meter.create_observable_counter(name, [_observer(read)], unit, description)

    def histogram(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> Record:
        """Makes a function that records values into the buckets between `bounds`; any thread may call it."""
        if self._meter is None:
            return _ignore
        made = self._meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=list(bounds))
        return _harmless_record(made)

    def shutdown(self, timeout_s: float = TELEMETRY_SHUTDOWN_S) -> None:
        """Sends the last figures, within `timeout_s` seconds."""
        if self._export is not None:
            self._export.shutdown(timeout_s)


def _harmless_record(histogram: Histogram) -> Record:
    @harmless("metrics")
    def record(value: float, labels: Labels) -> None:
        histogram.record(value, labels)

    return record


_Callback = Callable[[CallbackOptions], Iterable[Observation]]


def _callback(read: ReadFigures, one: _Instrument, labels: Labels) -> _Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        figures = read()
        return [] if figures is None else [Observation(one.value(figures), labels)]

    return observe


def _drafts(read: ReadFigures, one: _Instrument, place: int, labels: Labels) -> _Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        figures = read()
        if figures is None:
            return []
        if not figures.drafts:
            return [Observation(one.value(figures), labels)]
        return [
            Observation(counts[place], {**labels, names.DRAFT_METHOD: method, names.DRAFT_POSITION: str(position)})
            for (method, position), counts in figures.drafts.items()
        ]

    return observe


def _observer(read: Callable[[], Observed]) -> _Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for value, labels in read()]

    return observe


def _ignore(value: float, labels: Labels) -> None:
    pass


def _ended(read: ReadFigures, labels: Labels) -> _Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        figures = read() or EngineFigures()
        return [Observation(count, {**labels, names.END_REASON: why}) for why, count in figures.ended.items()]

    return observe
