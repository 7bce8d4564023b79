"""Load of each model over this router's workers, and the names that vLLM has for a router's figures. Pure.

A router counts its own requests. So the sum over all routers is that of the fleet, which an autoscaler wants. The use
of KV caches is as workers report it, whoever their requests come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from common.telemetry import names
from common.telemetry.metrics import MetricHistogram
from common.telemetry.prometheus import HistogramPoint, Observed, SeriesTable
from router.workers.session import WorkerState
from router.workers.worker_record import KnownWorker

# Finish reasons with another name in vLLM.
_VLLM_REASONS: Final = {"tool_calls": "stop"}
_DESCRIPTIONS: Final = {
    names.VLLM_TTFT: "From a request's arrival to its first token",
    names.VLLM_TPOT: "Mean time per token after the first, of a complete answer",
    names.VLLM_LATENCY: "From a successful request's arrival to its end",
}


@dataclass(slots=True)
class ModelLoad:
    """Load of one model.

    Attributes:
        waiting: requests that wait in this router.
        running: requests of this router on workers and on their way.
        free_blocks: KV blocks of its workers that are free or can be evicted.
        blocks: KV blocks of its workers, by tokens per block.
    """

    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    blocks: Counter[int] = field(default_factory=Counter)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that sequences hold, 0 to 1."""
        total = self.blocks.total()
        return 1 - self.free_blocks / total if total else 0.0


def model_loads(waiting: Mapping[str, int], workers: Iterable[KnownWorker]) -> dict[str, ModelLoad]:
    """Loads of the models that connected workers serve or requests wait for.

    Args:
        waiting: number of waiting requests of each model.
        workers: all workers.
    """
    loads = {model: ModelLoad(number) for model, number in waiting.items()}
    for worker in workers:
        if worker.state is WorkerState.UNCONNECTED:
            continue
        load = loads.setdefault(worker.model, ModelLoad())
        load.running += worker.running
        if worker.load is not None:
            load.free_blocks += worker.load.free_blocks
            load.blocks[worker.block_size] += worker.load.total_blocks
    return loads


def merged(points: Iterable[HistogramPoint], labels: Mapping[str, str], *, without: str = "") -> list[HistogramPoint]:
    """Adds up the series that agree in some labels.

    Args:
        points: series of one histogram.
        labels: the labels to keep, with their new names. Series without one of them are left out.
        without: series with this label are left out.
    """
    found: dict[tuple[str, ...], HistogramPoint] = {}
    for point in points:
        if without in point.labels or not labels.keys() <= point.labels.keys():
            continue
        key = tuple(point.labels[name] for name in labels)
        kept = dict(zip(labels.values(), key, strict=True))
        before = found.get(key)
        if before is None:
            found[key] = HistogramPoint(kept, point.counts, point.total, point.exemplars)
        else:
            counts = tuple(map(sum, zip(before.counts, point.counts, strict=True)))
            exemplars = {**before.exemplars, **point.exemplars}
            found[key] = HistogramPoint(kept, counts, before.total + point.total, exemplars)
    return list(found.values())


def show_as_vllm(
    table: SeriesTable,
    loads: Callable[[], Mapping[str, ModelLoad]],
    usage: Callable[[], Mapping[tuple[str, str], tuple[int, int, int]]],
    finished: Callable[[], Mapping[tuple[str, str], int]],
    histograms: Mapping[str, MetricHistogram],
) -> None:
    """Adds vLLM's names for a router's figures to a table.

    Args:
        table: of the metrics for scrapers.
        loads: returns the load of each model.
        usage: returns prompt, cached and generated tokens, by model and status.
        finished: returns the number of complete answers, by model and finish reason.
        histograms: histograms of the router, by their names there.
    """

    def of_models(value: Callable[[ModelLoad], float]) -> Callable[[], Observed]:
        return lambda: [(value(load), {names.VLLM_MODEL: model}) for model, load in loads().items()]

    def cache_configs() -> Observed:
        return [
            (1, {names.VLLM_MODEL: model, "block_size": str(size), "num_gpu_blocks": str(blocks)})
            for model, load in loads().items()
            for size, blocks in load.blocks.items()
        ]

    def tokens(which: int) -> Callable[[], Observed]:
        def read() -> Observed:
            totals = Counter[str]()
            for (model, _), used in usage().items():
                totals[model] += used[which]
            return [(total, {names.VLLM_MODEL: model}) for model, total in totals.items()]

        return read

    def successes() -> Observed:
        totals = Counter[tuple[str, str]]()
        for (model, reason), count in finished().items():
            totals[model, _VLLM_REASONS.get(reason, reason)] += count
        return [
            (count, {names.VLLM_MODEL: model, names.VLLM_REASON: reason}) for (model, reason), count in totals.items()
        ]

    def by_model(histogram: MetricHistogram) -> Callable[[], list[HistogramPoint]]:
        labels = {names.REQUEST_MODEL: names.VLLM_MODEL}
        return lambda: merged(histogram.points(), labels, without=names.ERROR_TYPE)

    add = table.add
    add(names.VLLM_WAITING, "gauge", "", "Requests that wait in this router", of_models(lambda m: m.waiting))
    add(names.VLLM_RUNNING, "gauge", "", "Requests of this router on workers", of_models(lambda m: m.running))
    add(names.VLLM_KV_USAGE, "gauge", "", "Part of the workers' KV blocks in use", of_models(lambda m: m.kv_usage))
    add(names.VLLM_CACHE_CONFIG, "gauge", "", "KV blocks of all workers", cache_configs)
    add(names.VLLM_PROMPT_TOKENS, "counter", "", "Prompt tokens", tokens(0))
    add(names.VLLM_CACHE_QUERIES, "counter", "", "Prompt tokens looked up in prefix caches", tokens(0))
    add(names.VLLM_CACHE_HITS, "counter", "", "Prompt tokens found in prefix caches", tokens(1))
    add(names.VLLM_GENERATION_TOKENS, "counter", "", "Tokens sent to clients", tokens(2))
    add(names.VLLM_SUCCESS, "counter", "", "Complete answers, by finish reason", successes)
    for name, histogram in histograms.items():
        table.add_histogram(name, "s", _DESCRIPTIONS[name], histogram.bounds, by_model(histogram))
