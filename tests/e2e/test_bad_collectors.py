"""Fleets whose collector hangs, refuses, is slow or away, or sends noise: same answers, and every span is counted."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from tests.e2e.service import free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers
from tests.e2e.span_site import span_counts
from tests.otlp_receiver import OtlpReceiver

COUNT = 60
# A sequence of several tokens: worker.generate, queue, prefill, decode.
SPANS = 4 * COUNT
# Small, so that most spans find no room while an export hangs.
SMALL_QUEUE = {"OTEL_BSP_MAX_QUEUE_SIZE": "20", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10"}
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_METRIC_EXPORT_INTERVAL": "100"}


class SlowReceiver(OtlpReceiver):
    """A collector that takes 0.2 s for each export."""

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        time.sleep(0.2)
        return super().Export(request, context)


class RefusingReceiver(OtlpReceiver):
    """A collector that fails at each export."""

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        raise ValueError("a fault of the collector")


@contextmanager
def raw_collector(answer: bytes) -> Iterator[str]:
    """The address of a port that takes connections and sends `answer` on each, or nothing."""
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            taken.append(connection)
            connection.sendall(answer)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


@contextmanager
def collector(kind: str) -> Iterator[str]:
    """The address of a collector of this kind."""
    if kind == "away":
        yield f"http://127.0.0.1:{free_port()}"
    elif kind in ("slow", "refuses"):
        with (SlowReceiver if kind == "slow" else RefusingReceiver)() as receiver:
            yield receiver.endpoint
    else:
        with raw_collector(bytes(range(256)) * 64 if kind == "noise" else b"") as endpoint:
            yield endpoint


def answers(folder: Path, environment: dict[str, str], port: int) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of all answers of a fleet, and the spans of its worker once all are counted."""
    worker = [*OPTIONS, "--metrics-port", str(port)]
    with running_service(
        folder, simulated_model(folder / "model"), worker_options=worker, environment=environment
    ) as service:
        wait_workers(service, 1)
        with ThreadPoolExecutor(16) as pool:
            found = [*pool.map(lambda number: generate(service.stub, request(number)).token_ids, range(COUNT))]
        end = time.monotonic() + 60
        while environment and sum(span_counts(port).values()) != SPANS:
            assert time.monotonic() < end, span_counts(port)
            time.sleep(0.05)
        return found, dict(span_counts(port))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens of the answers without a collector."""
    found, counts = answers(tmp_path_factory.mktemp("none"), {}, free_port())
    assert not any(counts.values())
    return found


@pytest.mark.parametrize(
    "kind", ["hangs", *(pytest.param(each, marks=pytest.mark.slow) for each in ("away", "noise", "refuses", "slow"))]
)
def test_bad_collector_changes_no_answer(kind: str, expected: list[list[int]], tmp_path: Path) -> None:
    """No more spans wait in memory than the queue has room for: each one was exported, refused or dropped."""
    with collector(kind) as endpoint:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **FAST, **SMALL_QUEUE}
        found, counts = answers(tmp_path, environment, free_port())
    assert found == expected
    assert counts["open"] == 0
    assert bool(counts["exported"]) == (kind == "slow")
    if kind in ("hangs", "slow"):
        assert counts["dropped"] > 0
