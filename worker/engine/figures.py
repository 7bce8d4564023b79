"""Figures of an engine, and the metrics that show them. The figures are pure.

The exporting thread reads the snapshot that the engine's last turn left, which is replaced, never changed. So nothing
is counted on the engine's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from common.telemetry import names
from common.telemetry.metrics import Metrics
from common.telemetry.prometheus import Labels, Observed, SeriesTable


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
        step_tokens: tokens that they compute, prompts' tokens and drafts too.
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
        tier_blocks: KV blocks by tier and by what became of them there.
        tier_traffic: bytes and seconds of KV tiers, by tier and operation.
    """

    running: int = 0
    max_running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    steps: int = 0
    step_tokens: int = 0
    preemptions: int = 0
    nan_rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafts: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    tier_blocks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    tier_traffic: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


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
# Parts of `EngineFigures.tier_traffic`.
_OF_TIERS: Final = (
    (names.ENGINE_TIER_BYTES, "By", "Bytes read from and written to KV tiers"),
    (names.ENGINE_TIER_TIME, "s", "Time of threads that read from and write to KV tiers"),
)
_STEP_BOUNDS: Final = tuple(2.0**power for power in range(17))
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


def observe_engine(metrics: Metrics, read: ReadFigures, labels: Labels) -> None:
    """Exports an engine's figures from now on.

    Args:
        metrics: of this process.
        read: returns the newest figures, None before the engine has started; called on the exporting thread.
        labels: attributes of every figure: few, and with constant values (`names.REQUEST_MODEL`, ...).
    """
    for one in _GAUGES:
        metrics.gauge(one.name, one.unit, one.description, _figure(read, one, labels))
    for one in _COUNTERS:
        metrics.counter(one.name, one.unit, one.description, _figure(read, one, labels))
    for place, one in enumerate(_OF_DRAFTS):
        metrics.counter(one.name, one.unit, one.description, _drafts(read, one, place, labels))
    metrics.counter(names.ENGINE_ENDED, "{sequence}", "Sequences that have ended, by the reason", _ended(read, labels))
    metrics.counter(names.ENGINE_TIER_BLOCKS, "{block}", "KV blocks in tiers, by result", _tiers(read, labels))
    for place, (name, unit, description) in enumerate(_OF_TIERS):
        metrics.counter(name, unit, description, _tier_traffic(read, place, labels))


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


def _tiers(read: ReadFigures, labels: Labels) -> Callable[[], Observed]:
    def observe() -> Observed:
        figures = read() or EngineFigures()
        return [
            (count, {**labels, names.KV_TIER: tier, names.TIER_RESULT: result})
            for (tier, result), count in figures.tier_blocks.items()
        ]

    return observe


def _tier_traffic(read: ReadFigures, place: int, labels: Labels) -> Callable[[], Observed]:
    def observe() -> Observed:
        figures = read() or EngineFigures()
        return [
            (done[place], {**labels, names.KV_TIER: tier, names.TIER_OPERATION: operation})
            for (tier, operation), done in figures.tier_traffic.items()
        ]

    return observe


class StepTokens:
    """Histogram of the tokens that each step computes.

    Args:
        metrics: of this process.
        labels: attributes of every figure, as in `observe_engine`.
    """

    def __init__(self, metrics: Metrics, labels: Labels) -> None:
        self._histogram = metrics.series_histogram(
            names.ENGINE_STEP_TOKENS, "{token}", "Tokens that a step computes", _STEP_BOUNDS
        )
        self._labels = labels
        self._last = EngineFigures()

    def take(self, figures: EngineFigures) -> None:
        """Records the steps since the last figures, usually one."""
        # A new engine counts from 0.
        last = self._last if figures.steps >= self._last.steps else EngineFigures()
        self._last, steps = figures, figures.steps - last.steps
        if self._histogram is None:
            return
        for _ in range(steps):
            self._histogram.record((figures.step_tokens - last.step_tokens) / steps, self._labels)


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
