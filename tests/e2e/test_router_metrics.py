"""A router's figures at a real collector: the router in this process, scripted workers, OTLP over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, Self

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from common.telemetry import names
from router.api.tenants import TenantPolicy
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, bench, collect, error_of, miss_deadline, request, until
from tests.otlp_receiver import OtlpReceiver, ReceivedPoint

HISTOGRAMS = (names.SERVER_DURATION, names.SERVER_TTFT, names.SERVER_TPOT)
PER_WORKER = (names.WORKER_RUNNING, names.WORKER_QUEUED, names.WORKER_OUTSTANDING, names.WORKER_REPORT_AGE)


class Collector:
    """The newest points of a collector."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver
        self.read = 0

    def newest(self) -> dict[tuple[str, tuple[tuple[str, Any], ...]], ReceivedPoint]:
        """By name and labels, of what has come since `forget`."""
        points = self._receiver.points[self.read :]
        return {(point.name, tuple(sorted(point.attributes.items()))): point for point in points}

    def forget(self) -> None:
        """Looks only at what comes from now on."""
        self.read = len(self._receiver.points)

    def value(self, name: str, **labels: str) -> float | None:
        """The newest value whose labels are these among others."""
        wanted = {getattr(names, label): value for label, value in labels.items()}.items()
        found = [point for (which, _), point in self.newest().items() if which == name]
        return next((point.value for point in found if wanted <= point.attributes.items()), None)

    async def until(self, value: float | None, name: str, **labels: str) -> None:
        """Waits until a value is this."""
        await until(lambda: self.value(name, **labels) == value)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        yield Collector(receiver)


async def test_server_metrics_follow_otel_conventions(collector: Collector) -> None:
    async with bench(FakeWorker(FILES, step_s=0.02)) as b:
        for i in range(3):
            await collect(b.stub.Generate(request(request_id=f"g{i}", params={"max_tokens": 6})))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="say")])
        chat.sampling_params.max_tokens = 4
        await collect(b.stub.Chat(chat))
        for name in HISTOGRAMS:
            await collector.until(3, name, OPERATION="text_completion", REQUEST_MODEL="m", PROVIDER="fissile")
            await collector.until(1, name, OPERATION="chat", REQUEST_MODEL="m")
        points = {point.name: point for point in collector.newest().values() if point.kind == "histogram"}
        duration, ttft, tpot = (points[name] for name in HISTOGRAMS)
        assert {point.unit for point in (duration, ttft, tpot)} == {"s"}
        # Six tokens, a step apart.
        generated = [p for (name, _), p in collector.newest().items() if name in HISTOGRAMS]
        sums = {p.name: p.total for p in generated if p.attributes[names.OPERATION] == "text_completion"}
        assert sums[names.SERVER_DURATION] >= sums[names.SERVER_TTFT] + 5 * sums[names.SERVER_TPOT] - 1e-6
        assert sums[names.SERVER_TPOT] >= 3 * 0.02 * 0.5
        stages = [p for (name, _), p in collector.newest().items() if name == names.ROUTER_STAGE_DURATION]
        whole = sum(p.total for (name, _), p in collector.newest().items() if name == names.SERVER_DURATION)
        assert sum(p.total for p in stages) == pytest.approx(whole)
        for histogram in (duration, ttft, tpot):
            bounds = [bound for bound, _ in histogram.buckets]
            assert (bounds[0], bounds[-2]) == (0.0002, 3600.0)
        await collector.until(4, names.ROUTER_RELEASED)
        assert collector.value(names.ROUTER_FAILED) is None


async def test_failures_are_counted_by_their_reasons(collector: Collector) -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, tenants=TenantPolicy(concurrency=1), max_unread_tokens=64) as b:
        running = b.stub.Generate(request(params={"max_tokens": 3000}))
        await until(lambda: worker.running)
        assert (await error_of(b.stub.Generate(request()))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
        await until(lambda: not b.router.service.in_flight)
        await error_of(b.stub.Generate(request(model="no such model")))
        await error_of(b.stub.Generate(request(params={"max_tokens": 0})))
        worker.step_s = 0.05
        await miss_deadline(
            lambda timeout_s: b.stub.Generate(request(params={"max_tokens": 3000}), timeout=timeout_s),
            lambda: worker.running,
        )
        for reason, labels in {
            "TENANT_LIMIT": {"FAULT": "client"},
            "CANCELLED": {"FAULT": "client", "REQUEST_MODEL": "m"},
            "UNKNOWN_MODEL": {"FAULT": "client"},
            "INVALID_FIELD": {"FAULT": "client"},
        }.items():
            await collector.until(1, names.ROUTER_FAILED, ERROR_REASON=reason, **labels)
        late = {"ERROR_REASON": "DEADLINE_EXCEEDED", "FAULT": "server", "REQUEST_MODEL": "m"}
        await until(lambda: collector.value(names.ROUTER_FAILED, **late))
        for status in ("RESOURCE_EXHAUSTED", "CANCELLED", "NOT_FOUND", "INVALID_ARGUMENT"):
            await collector.until(1, names.SERVER_DURATION, ERROR_TYPE=status)
        # A model that is not served is no label.
        models = {point.attributes.get(names.REQUEST_MODEL) for point in collector.newest().values()}
        assert models == {"m", None}


async def test_gauges_follow_load_and_return_to_zero(collector: Collector) -> None:
    # It makes no step until the figures have been seen.
    worker = FakeWorker(FILES, room_seqs=2, busy_ms=1)
    async with bench(worker) as b:
        calls = [b.stub.Generate(request(request_id=str(i), params={"max_tokens": 50})) for i in range(5)]
        await collector.until(5, names.ROUTER_IN_FLIGHT)
        await collector.until(3, names.ROUTER_QUEUED, PRIORITY="normal")
        await collector.until(2, names.WORKER_RUNNING, WORKER_ID="w0", REQUEST_MODEL="m")
        await until(lambda: (collector.value(names.ROUTER_OLDEST_AGE, PRIORITY="normal") or 0) > 0.1)
        await collector.until(1, names.ROUTER_LANES, LANE_STATE="open")
        worker.busy_ms = 0
        await asyncio.gather(*map(collect, calls))
        for name in (names.ROUTER_IN_FLIGHT, names.ROUTER_QUEUED, names.WORKER_RUNNING, names.ROUTER_OLDEST_AGE):
            await collector.until(0, name)
        for table in ("streams", "sequences", "queue", "request_ids", "tenants_in_flight", "tenants_waiting"):
            await collector.until(0, names.ROUTER_TABLES, TABLE=table)
        await collector.until(1, names.ROUTER_LANES, LANE_STATE="idle")
        # The five went one after the other into the room of two.
        assert collector.value(names.ROUTER_RELEASED) == 5


async def test_o2_labels_of_removed_workers_disappear(collector: Collector) -> None:
    """A dead or removed worker is no longer a label; its lost attempts stay counted."""
    dying, leaving, staying = FakeWorker(FILES, "dying"), FakeWorker(FILES, "leaving"), FakeWorker(FILES, "staying")
    async with bench(dying, leaving, staying, placement="round_robin") as b:
        await collector.until(3, names.ROUTER_WORKERS, WORKER_STATE="serving")
        calls = [b.stub.Generate(request(request_id=str(i), params={"max_tokens": 400})) for i in range(3)]
        await until(lambda: dying.running and leaving.running and staying.running)
        await dying.stop()
        b.router.pool.set_workers([f"127.0.0.1:{worker.port}" for worker in (dying, staying)])
        finishes = [(await collect(call))[-1].finish for call in calls]
        assert {finish.usage.completion_tokens for finish in finishes} == {400}
        await collector.until(1, names.ROUTER_LOST, ATTEMPT_LOSS="died", WORKER_ID="dying")
        await collector.until(0, names.WORKER_UP, WORKER_ID="dying", WORKER_ADDRESS=f"127.0.0.1:{dying.port}")
        await collector.until(1, names.WORKER_UP, WORKER_ID="staying")
        await collector.until(1, names.ROUTER_WORKERS, WORKER_STATE="unconnected")
        await collector.until(0, names.ROUTER_WORKERS, WORKER_STATE="leaving")
        await collector.until(2, names.ROUTER_TABLES, TABLE="workers")
        # What was on its way when the last of them had gone may still come.
        for _ in range(10):
            collector.forget()
            for name in PER_WORKER:
                await until(lambda name=name: collector.value(name) is not None)  # type: ignore[misc]
            if workers_named(collector) == {"staying"}:
                break
        assert workers_named(collector) == {"staying"}


def workers_named(collector: Collector) -> set[str]:
    return {point.attributes[names.WORKER_ID] for point in collector.newest().values() if point.name in PER_WORKER}


async def many_clients(collector: Collector, number: int) -> None:
    """So many requests, each of a session, a tenant and a model name of its own; every tenth one for a real model."""
    async with bench(FakeWorker(FILES, answer=short)) as b:
        lanes = asyncio.Semaphore(64)

        async def client(i: int) -> None:
            asked = request(request_id=f"r{i}", session_id=f"session {i}", model="m" if i % 10 == 0 else f"model {i}")
            async with lanes:
                call = b.stub.Generate(asked, metadata=(("x-fissile-tenant", f"tenant {i}"),))
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await collect(call)

        await asyncio.gather(*(client(i) for i in range(number)))
        await collector.until(number / 10, names.ROUTER_TABLES, TABLE="sessions")
        for table in ("streams", "sequences", "queue", "request_ids", "tenants_in_flight", "tenants_waiting"):
            await collector.until(0, names.ROUTER_TABLES, TABLE=table)
        await collector.until(number * 0.9, names.ROUTER_FAILED, ERROR_REASON="UNKNOWN_MODEL")
        newest = collector.newest()
        assert len(newest) < 80
        text = " ".join(str(labels) for _, labels in newest)
        for made_up in ("session 1", "tenant 1", "model 1", "r1"):
            assert made_up not in text


async def test_client_made_up_names_are_no_metric_labels(collector: Collector) -> None:
    """The number of label sets does not depend on the number of sessions, tenants and model names."""
    await many_clients(collector, 600)


@pytest.mark.long
async def test_ten_thousand_made_up_names_add_no_metric_labels(collector: Collector) -> None:
    """As before, with 10,000 of each."""
    await many_clients(collector, 10_000)


async def test_blocked_event_loop_shows_in_lag_metric(collector: Collector) -> None:
    async with bench():
        await until(lambda: (collector.value(names.ROUTER_LOOP_LAG) or 0) > 2)

        def late() -> int:
            point = next(p for (name, _), p in collector.newest().items() if name == names.ROUTER_LOOP_LAG)
            return sum(count for bound, count in point.buckets if bound > 0.5)

        before = late()
        time.sleep(0.8)  # noqa: ASYNC251  # what must not happen, on purpose
        await until(lambda: late() > before)


class BadCollector:
    """A collector's port that takes connections and sends `answer` on each, or never anything.

    Args:
        answer: bytes that each connection gets; empty for none.
    """

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.num_connections = 0
        self._open: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()

    async def _connected(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._open.append(writer)
        writer.write(self._answer)


@pytest.mark.parametrize("answer", [b"", bytes(range(256)) * 64], ids=["none", "noise"])
async def test_bad_collector_costs_no_answer(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with sampled traces end well while all exports hang or fail, and so does the router."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with BadCollector(answer) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        async with bench(FakeWorker(FILES, answer=short), metrics_port=0) as b:
            await until(lambda: collector.num_connections)
            for i in range(50):
                metadata = (("traceparent", f"00-{i + 1:032x}-{i + 1:016x}-01"),)
                finish = (await collect(b.stub.Generate(request(request_id=str(i)), metadata=metadata)))[-1].finish
                assert finish.usage.completion_tokens
