"""A router in figures: what is counted where it happens, and snapshots of the rest for the exporting thread.

Labels are bounded: models that are served, the workers that there are, and names of our own. Nothing that a client
makes up (tenants, sessions, request ids, models that are not served) becomes one. Off unless an OTLP endpoint is set or
scrapers have a port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import grpc

from common.errors import ApiError, is_client_fault
from common.telemetry import names
from common.telemetry.metrics import Metrics
from common.telemetry.prometheus import Observed, SeriesTable
from common.telemetry.request_record import RequestRecord
from router.telemetry.model_loads import ModelLoad, model_loads, show_as_vllm
from router.telemetry.router_snapshot import Failure, NewestSnapshot, RouterSnapshot, Usage
from router.telemetry.worker_metrics import DURATION_BOUNDS, TPOT_BOUNDS, TTFT_BOUNDS, WorkerMetrics
from router.workers.session import WorkerState

_LAG_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class RequestMeasure:
    """The times of one request.

    Attributes:
        labels: of its figures; the model is added when it is known to be one that is served.
        used: what the answer has come to, None before it begins.
    """

    def __init__(self, labels: dict[str, str], metrics: RouterMetrics) -> None:
        self.labels = labels
        self.used: Usage | None = None
        self._metrics = metrics

    def model(self, name: str) -> None:
        """The request is for this model."""
        self.labels[names.REQUEST_MODEL] = name

    def first_token(self, seconds: float, worker_id: str, on_worker_s: float | None) -> None:
        """Records the first token.

        Args:
            seconds: since the request's arrival.
            worker_id: the worker that made it.
            on_worker_s: since that worker was sent the request, None if the attempt was lost since.
        """
        self._metrics.ttft(seconds, dict(self.labels))
        if on_worker_s is not None:
            self._metrics.workers.record(names.WORKER_TTFT, on_worker_s, worker_id, self.labels[names.REQUEST_MODEL])

    def usage(self, prompt: int, cached: int, generated: int) -> None:
        """The request has come to an end, perhaps a bad one, with so many tokens."""
        self.used = Usage(prompt, cached, generated)

    def finished(self, seconds: float, tokens: int, reason: str, worker_id: str) -> None:
        """Counts a complete answer.

        Args:
            seconds: from its first token to its last.
            tokens: of the answer.
            reason: why it ended, such as `stop`.
            worker_id: the worker that made all of it, "" if it needed several.
        """
        model = self.labels[names.REQUEST_MODEL]
        self._metrics.finished[model, reason] += 1
        if tokens > 1:
            self._metrics.tpot(seconds / (tokens - 1), dict(self.labels))
            if worker_id:
                self._metrics.workers.record(names.WORKER_TPOT, seconds / (tokens - 1), worker_id, model)


class RouterMetrics:
    """The instruments of one router.

    Args:
        metrics: of this process.

    Attributes:
        failed: requests that have failed.
        usage: what answers have come to, by model and status.
        finished: complete answers, by model and finish reason.
        workers: figures by worker.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.failed: Counter[Failure] = Counter()
        self.finished: Counter[tuple[str, str]] = Counter()
        self.usage: dict[tuple[str, str], Usage] = {}
        self._metrics = metrics
        self._snapshots = NewestSnapshot()
        self._snapshot = self._snapshots.read
        self._last_loads: tuple[RouterSnapshot, dict[str, ModelLoad]] = RouterSnapshot(), {}
        # First, because a new snapshot ends the series of workers that have left.
        self._observe_gauges()
        self.duration = metrics.histogram(
            names.SERVER_DURATION, "s", "From a request's arrival to its end", DURATION_BOUNDS
        )
        self.ttft = metrics.histogram(
            names.SERVER_TTFT, "s", "From a request's arrival to its first token", TTFT_BOUNDS
        )
        self.tpot = metrics.histogram(
            names.SERVER_TPOT, "s", "Mean time per token behind the first, of an answer that is complete", TPOT_BOUNDS
        )
        self._stages = metrics.series_histogram(
            names.ROUTER_STAGE_DURATION, "s", "Time of a request in one stage", DURATION_BOUNDS
        )
        self.workers = WorkerMetrics(metrics, lambda: self._snapshot().workers)
        self._lag = metrics.histogram(names.ROUTER_LOOP_LAG, "s", "How late the router's event loop is", _LAG_BOUNDS)
        self._observe_counters()
        if metrics.table is not None:
            self._show_as_vllm(metrics.table)

    @contextlib.asynccontextmanager
    async def request(
        self,
        operation: str,
        arrival: float,
        clock: Callable[[], float],
        broken_off: Callable[[], grpc.StatusCode],
        record: RequestRecord,
    ) -> AsyncIterator[RequestMeasure]:
        """Measures a request for as long as the block runs; what the block raises is counted as its failure.

        Args:
            operation: `names.TEXT_COMPLETION` or `names.CHAT`.
            arrival: of the request, from which the time to its first token counts, too.
            clock: monotonic seconds.
            broken_off: the status of a call that is cancelled: its deadline arrives as that too.
            record: of the call, with its ledger.
        """
        labels = {names.OPERATION: operation, names.PROVIDER: names.PROVIDER_FISSILE}
        measure = RequestMeasure(labels, self)
        try:
            yield measure
        except BaseException as error:
            code, reason = _failure(error, broken_off)
            is_client = is_client_fault(code, reason)
            model = labels.get(names.REQUEST_MODEL, "")
            self.failed[Failure(model, reason or code.name, "client" if is_client else "server")] += 1
            labels[names.ERROR_TYPE] = code.name
            raise
        finally:
            now = clock()
            self.duration(now - arrival, labels)
            self._record_stages(record.ledger.parts(now), labels.get(names.REQUEST_MODEL, ""))
            self._use(measure)

    def _record_stages(self, parts: Mapping[names.Stage, float], model: str) -> None:
        if self._stages is not None:
            labels = {names.REQUEST_MODEL: model} if model else {}
            for stage, seconds in parts.items():
                self._stages.record(seconds, {**labels, names.STAGE: stage})

    def _use(self, measure: RequestMeasure) -> None:
        if measure.used is not None:
            ended = (measure.labels[names.REQUEST_MODEL], measure.labels.get(names.ERROR_TYPE, "OK"))
            self.usage[ended] = self.usage.get(ended, Usage()).plus(measure.used)

    @property
    def enabled(self) -> bool:
        """True if metrics are exported or scraped."""
        return self._metrics.enabled

    @property
    def table(self) -> SeriesTable | None:
        """All metrics for scrapers; None without a port for them."""
        return self._metrics.table

    def lag(self, seconds: float) -> None:
        """The event loop was late."""
        self._lag(seconds, {})

    def start(self, make: Callable[[], RouterSnapshot]) -> None:
        """Makes snapshots with `make` on the running event loop, when they are read."""

        def make_next() -> RouterSnapshot:
            snapshot = make()
            self.workers.forget_departed(snapshot.workers)
            return snapshot

        self._snapshots.start(make_next)

    def stop(self) -> None:
        """Makes the last snapshot, on the event loop."""
        self._snapshots.stop()

    def shutdown(self, timeout_s: float) -> None:
        """Sends the last figures."""
        self._metrics.shutdown(timeout_s)

    def _observe_gauges(self) -> None:
        gauge = self._metrics.gauge
        gauge(names.ROUTER_IN_FLIGHT, "{request}", "Requests that have not ended", self._one(lambda f: f.in_flight))
        gauge(names.ROUTER_QUEUED, "{request}", "Requests that wait in the router", self._queued)
        gauge(names.ROUTER_OLDEST_AGE, "s", "Age of the oldest request that waits in the router", self._oldest_ages)
        gauge(names.ROUTER_LANES, "{lane}", "Lanes of workers, by what they do", self._lanes)
        gauge(names.ROUTER_WORKERS, "{worker}", "Workers of this router", self._workers)
        gauge(
            names.ROUTER_TABLES,
            "{entry}",
            "Entries of the router's tables",
            self._counts(lambda f: f.tables, names.TABLE),
        )
        gauge(
            names.ROUTER_CONFIG_VERSION,
            "{version}",
            "Version of the configuration",
            self._one(lambda f: f.config_version),
        )
        gauge(names.MODEL_WAITING, "{request}", "Requests that wait here, by model", self._model(lambda m: m.waiting))
        gauge(names.MODEL_RUNNING, "{request}", "Requests on workers, by model", self._model(lambda m: m.running))
        gauge(names.MODEL_KV_USAGE, "1", "Part of a model's KV blocks in use", self._model(lambda m: m.kv_usage))
        gauge(names.MODEL_KV_BLOCKS, "{block}", "KV blocks of a model's workers", self._kv_blocks)

    def _observe_counters(self) -> None:
        counter = self._metrics.counter
        counter(
            names.ROUTER_FAILED,
            "{request}",
            "Requests that have failed, by model, reason and fault",
            self._failed,
        )
        counter(names.ROUTER_PROMPT_TOKENS, "{token}", "Prompt tokens of answers", self._used(lambda u: u.prompt))
        counter(names.ROUTER_CACHED_TOKENS, "{token}", "Those of them in a cache", self._used(lambda u: u.cached))
        counter(names.ROUTER_GENERATED_TOKENS, "{token}", "Tokens sent to clients", self._used(lambda u: u.generated))
        counter(names.ROUTER_FINISHED, "{answer}", "Complete answers, by finish reason", self._finished)
        counter(
            names.ROUTER_LOST,
            "{attempt}",
            "Attempts whose worker was lost, by worker and loss",
            self._lost,
        )
        counter(
            names.ROUTER_AUDITS,
            "{answer}",
            "Answers chosen to be audited, by the result",
            self._counts(lambda f: f.audits, names.AUDIT_RESULT),
        )
        counter(
            names.ROUTER_KV_DIGESTS,
            "{block}",
            "KV blocks compared between workers, by result",
            self._counts(lambda f: f.kv_digests, names.AUDIT_RESULT),
        )
        counter(
            names.ROUTER_KV_DISPUTES,
            "{block}",
            "KV blocks on which workers differed, by result",
            self._counts(lambda f: f.kv_disputes, names.AUDIT_RESULT),
        )
        counter(names.ROUTER_RELEASES, "{group}", "Groups sent to workers", self._one(lambda f: f.releases))
        counter(names.ROUTER_RELEASED, "{request}", "Requests sent to workers", self._one(lambda f: f.released))
        counter(names.ROUTER_ADOPTED, "{request}", "Requests that went on elsewhere", self._one(lambda f: f.adopted))
        counter(names.ROUTER_UNADOPTED, "{request}", "Those that began anew", self._one(lambda f: f.unadopted))

    def _one(self, value: Callable[[RouterSnapshot], float]) -> Callable[[], Observed]:
        return lambda: [(value(self._snapshot()), {})]

    def _loads(self) -> dict[str, ModelLoad]:
        snapshot, loads = self._last_loads
        if snapshot is not (newest := self._snapshot()):
            snapshot = newest
            loads = model_loads(snapshot.waiting, snapshot.workers)
            self._last_loads = snapshot, loads
        return loads

    def _model(self, value: Callable[[ModelLoad], float]) -> Callable[[], Observed]:
        """Observations of the models that are served or waited for."""
        return lambda: [(value(load), {names.REQUEST_MODEL: model}) for model, load in self._loads().items()]

    def _kv_blocks(self) -> Observed:
        return [
            (blocks, {names.REQUEST_MODEL: model, names.KV_BLOCK_SIZE: str(size)})
            for model, load in self._loads().items()
            for size, blocks in load.blocks.items()
        ]

    def _failed(self) -> Observed:
        return [
            (
                count,
                {
                    **({names.REQUEST_MODEL: each.model} if each.model else {}),
                    names.ERROR_REASON: each.reason,
                    names.FAULT: each.fault,
                },
            )
            for each, count in self._snapshot().failed.items()
        ]

    def _lost(self) -> Observed:
        return [
            (count, {names.WORKER_ID: worker_id, names.ATTEMPT_LOSS: loss})
            for (worker_id, loss), count in self._snapshot().lost.items()
        ]

    def _finished(self) -> Observed:
        return [
            (count, {names.REQUEST_MODEL: model, names.END_REASON: reason})
            for (model, reason), count in self._snapshot().finished.items()
        ]

    def _show_as_vllm(self, table: SeriesTable) -> None:
        show_as_vllm(
            table,
            self._loads,
            lambda: self._snapshot().usage,
            lambda: self._snapshot().finished,
            {names.VLLM_TTFT: self.ttft, names.VLLM_TPOT: self.tpot, names.VLLM_LATENCY: self.duration},
        )

    def _queued(self) -> Observed:
        return [(each.waiting, {names.PRIORITY: each.name}) for each in self._snapshot().queues]

    def _oldest_ages(self) -> Observed:
        return [(each.oldest_age_s, {names.PRIORITY: each.name}) for each in self._snapshot().queues]

    def _lanes(self) -> Observed:
        lanes = self._snapshot().lanes
        states = {"idle": lanes.idle, "open": lanes.open, "held": lanes.held}
        return [(number, {names.LANE_STATE: state}) for state, number in states.items()]

    def _workers(self) -> Observed:
        found = Counter(worker.state for worker in self._snapshot().workers)
        return [(found[state], {names.WORKER_STATE: state.name.lower()}) for state in WorkerState]

    def _counts(self, values: Callable[[RouterSnapshot], Mapping[str, int]], label: str) -> Callable[[], Observed]:
        return lambda: [(count, {label: key}) for key, count in values(self._snapshot()).items()]

    def _used(self, value: Callable[[Usage], int]) -> Callable[[], Observed]:
        return lambda: [
            (value(used), {names.REQUEST_MODEL: model, names.RPC_STATUS: status})
            for (model, status), used in self._snapshot().usage.items()
        ]


def _failure(error: BaseException, broken_off: Callable[[], grpc.StatusCode]) -> tuple[grpc.StatusCode, str]:
    """Status and reason of a request's failure; "" if its status has no reason."""
    if isinstance(error, ApiError):
        return error.code, error.reason
    if not isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.INTERNAL, "ROUTER_ERROR"
    return broken_off(), ""
