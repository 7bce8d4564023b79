"""Clients that read slowly or not at all: nobody else pays, and memory is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.chaos.conftest import Report
from tests.chaos.scale import SCALE
from tests.chaos.support import SMALL_WINDOW, client_of, log_entries, quantile, reason_of, rss_mib, until
from tests.e2e.service import Answer, Service, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model

NEIGHBOURS = 8
GROWTH_MIB = 5.0
# 100 clients that never read may leave so many tokens each.
UNREAD = 400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = simulated_model(tmp_path_factory.mktemp("model"), max_model_len=8192)
    with running_service(tmp_path_factory.mktemp("slow"), model, worker_options=OPTIONS) as running:
        yield running


def timed(stub: InferenceServiceStub, i: int, tokens: int) -> tuple[Answer, list[float]]:
    """A whole stream, and the seconds between its messages."""
    answer, last = Answer(), None
    gaps: list[float] = []
    for part in stub.Generate(request(i, tokens), timeout=120):
        now = time.monotonic()
        gaps += [] if last is None else [now - last]
        last = now
        answer.add(part)
    return answer, gaps


def neighbours(service: Service) -> tuple[list[Answer], list[float]]:
    """Fast readers beside each other: their answers and all seconds between messages."""
    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        ran = list(pool.map(lambda i: timed(service.stub, 100 + i, SCALE.b1_tokens // 3), range(NEIGHBOURS)))
    return [answer for answer, _ in ran], [gap for _, gaps in ran for gap in gaps]


def read_slowly(stub: InferenceServiceStub, hurry: threading.Event) -> Answer:
    """Pauses before each message until it is told to read the rest."""
    answer = Answer()
    for part in stub.Generate(request(1, SCALE.b1_tokens), timeout=120):
        answer.add(part)
        hurry.wait(SCALE.b1_pause_s)
    return answer


@pytest.mark.slow
def test_slow_reader_gets_merged_messages_without_slowing_others(service: Service, report: Report) -> None:
    """B1: one message a second of a long stream: all tokens come, merged; neighbours and the router's memory do not
    notice."""
    expected = generate(service.stub, request(1, SCALE.b1_tokens))
    undisturbed, gaps_before = neighbours(service)
    before = rss_mib(service.router)
    hurry = threading.Event()
    with client_of(service.router, SMALL_WINDOW) as stub, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(read_slowly, stub, hurry)
        disturbed, gaps = neighbours(service)
        # As long as the neighbours take, and the stream itself with them.
        idle = service.wait_idle()
        grown = rss_mib(service.router) - before
        hurry.set()
        answer = slow.result()
    report(
        "B1",
        itl_p99_alone_ms=quantile(gaps_before, 0.99) * 1000,
        itl_p99_beside_slow_ms=quantile(gaps, 0.99) * 1000,
        router_growth_mib=grown,
        tokens=len(answer.token_ids),
        messages=answer.messages,
    )
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert answer.messages < 0.8 * len(answer.token_ids)
    assert [a.token_ids for a in disturbed] == [a.token_ids for a in undisturbed]
    assert grown < GROWTH_MIB
    assert idle.decoding_seqs == 0


@pytest.mark.slow
def test_b2_clients_that_never_read_are_dropped(tmp_path: Path, report: Report) -> None:
    """B2: clients that open streams and read nothing: bounded memory, no work left on the worker, RESOURCE_EXHAUSTED;
    neighbours complete."""
    model = simulated_model(tmp_path / "model", max_model_len=8192)
    options = ["--max-unread-tokens", str(UNREAD)]
    with running_service(tmp_path, model, worker_options=OPTIONS, router_options=options) as service, ExitStack() as on:
        expected, _ = neighbours(service)
        before = rss_mib(service.router)
        stubs = [on.enter_context(client_of(service.router, SMALL_WINDOW)) for _ in range(SCALE.b2_clients)]
        calls = [stub.Generate(request(1000 + i, 8000)) for i, stub in enumerate(stubs)]
        until(lambda: service.worker_load().decoding_seqs >= len(calls) // 2, what="streams that run")
        got, _ = neighbours(service)
        # Given up by the router, with nobody having read a byte.
        load = service.wait_idle(timeout=60.0)
        grown = rss_mib(service.router) - before
        assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)
        assert [a.token_ids for a in got] == [a.token_ids for a in expected]
        statuses = [ending(call) for call in calls]
    report("B2", clients=len(calls), router_growth_mib=grown)
    assert set(statuses) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CLIENT")}
    assert grown < GROWTH_MIB + len(calls) * 0.1


def ending(call: Any) -> tuple[grpc.StatusCode | None, str]:
    """Reads what came, and how the stream ended."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        code = call.code()
        return code, reason_of(error)
    return call.code(), ""


def test_vanished_unread_clients_leave_no_state(service: Service) -> None:
    """B2: connections that close while the router's write waits for them: freed at once, and no error of the router."""
    with ExitStack() as on:
        stubs = [on.enter_context(client_of(service.router, SMALL_WINDOW)) for _ in range(10)]
        asked = [request(2000 + i, 8000) for i in range(len(stubs))]
        ids = {one.request_id for one in asked}
        calls = [stub.Generate(one) for stub, one in zip(stubs, asked, strict=True)]
        until(lambda: service.worker_load().decoding_seqs == len(calls), what="streams that run")
        # So that every window is full.
        generate(service.stub, request(3000, 400))

    def ended() -> list[str]:
        """How they ended at the router."""
        lines = [entry for entry in log_entries(service.router) if entry["event"] == "request ended"]
        return [entry["status"] for entry in lines if entry.get("request_id") in ids]

    # Not dropped for being slow, which takes half a minute.
    until(lambda: len(ended()) == len(ids), what="the end of the calls")
    assert set(ended()) == {"CANCELLED"}
    load = service.wait_idle()
    assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)
    log = service.router.log.read_text()
    assert "Traceback" not in log
    assert "ROUTER_ERROR" not in log
