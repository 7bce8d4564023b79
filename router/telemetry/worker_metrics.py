"""Figures by worker, which name a worker that is slow, away or lost. Pure.

Latencies by worker measure the worker, not the router: they begin when it gets the request, and an answer that needed
several workers counts for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from common.telemetry import names
from common.telemetry.metrics import Metrics
from common.telemetry.prometheus import Observed, SeriesHistogram
from router.workers.session import WorkerState
from router.workers.worker_record import KnownWorker

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
_LATENCIES: Final = (
    (names.WORKER_TTFT, "From the sending of a request to a worker to its first token", TTFT_BOUNDS),
    (names.WORKER_TPOT, "Mean time per token after the first, of an answer of one worker", TPOT_BOUNDS),
)


class WorkerMetrics:
    """The instruments of a router's workers.

    Args:
        metrics: of this process.
        workers: returns the workers.
    """

    def __init__(self, metrics: Metrics, workers: Callable[[], Iterable[KnownWorker]]) -> None:
        self._workers = workers
        self._latencies: dict[str, SeriesHistogram] = {}
        for name, description, bounds in _LATENCIES:
            # The SDK would export the series of a worker for good.
            if (histogram := metrics.series_histogram(name, "s", description, bounds)) is not None:
                self._latencies[name] = histogram
        gauge = metrics.gauge
        gauge(names.WORKER_UP, "{worker}", "1 if this router is connected to a worker, else 0", self._up)
        gauge(names.WORKER_RUNNING, "{request}", "Requests of this router on a worker", self._each(_running))
        gauge(names.WORKER_QUEUED, "{request}", "Requests that wait here for a worker", self._each(_queued))
        gauge(names.WORKER_OUTSTANDING, "{token}", "Prompt tokens still to compute", self._each(_outstanding))
        gauge(names.WORKER_REPORT_AGE, "s", "Age of a worker's last report", self._each(_report_age))
        gauge(names.WORKER_KV_USAGE, "1", "Part of a worker's KV blocks in use", self._each(_kv_usage))

    def record(self, name: str, seconds: float, worker_id: str, model: str) -> None:
        """Adds a latency of a worker; a no-op if metrics are off.

        Args:
            name: `names.WORKER_TTFT` or `names.WORKER_TPOT`.
            seconds: the latency.
            worker_id: the worker.
            model: its model.
        """
        if (histogram := self._latencies.get(name)) is not None:
            histogram.record(seconds, {names.WORKER_ID: worker_id, names.REQUEST_MODEL: model})

    def forget_departed(self, workers: Iterable[KnownWorker]) -> None:
        """Ends the latencies' series of workers that are not in `workers`."""
        known = {worker.worker_id for worker in workers}
        for histogram in self._latencies.values():
            histogram.keep(names.WORKER_ID, known)

    def _up(self) -> Observed:
        return [(int(_is_connected(worker)), self._labels(worker, has_address=True)) for worker in self._workers()]

    def _each(self, value: Callable[[KnownWorker], float]) -> Callable[[], Observed]:
        """Observations of the connected workers."""
        return lambda: [(value(worker), self._labels(worker)) for worker in self._workers() if _is_connected(worker)]

    def _labels(self, worker: KnownWorker, *, has_address: bool = False) -> dict[str, str]:
        labels = {names.WORKER_ID: worker.worker_id, names.REQUEST_MODEL: worker.model}
        if has_address:
            labels[names.WORKER_ADDRESS] = worker.address
        # A worker that was never up has no name and no model yet.
        return {name: value for name, value in labels.items() if value}


def _is_connected(worker: KnownWorker) -> bool:
    return worker.state is not WorkerState.UNCONNECTED


def _running(worker: KnownWorker) -> float:
    return worker.running


def _queued(worker: KnownWorker) -> float:
    return 0 if worker.load is None else worker.load.queued


def _outstanding(worker: KnownWorker) -> float:
    return 0 if worker.load is None else worker.load.outstanding_tokens


def _report_age(worker: KnownWorker) -> float:
    return 0 if worker.load is None else worker.load.report_age_ms / 1000


def _kv_usage(worker: KnownWorker) -> float:
    load = worker.load
    return 0 if load is None or not load.total_blocks else 1 - load.free_blocks / load.total_blocks
