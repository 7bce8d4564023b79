"""Routers that end: each call gets a status, and the process its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from common.rpc.durations import to_duration
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import (
    FILES,
    bench,
    collect,
    detail,
    details_of,
    draining_process,
    error_of,
    heeds,
    leftovers,
    log_of,
    request,
    router_process,
    until,
)

if TYPE_CHECKING:
    pass


async def code_at_end(call: Any) -> str:
    """Name of a call's status; its messages are read first, because gRPC holds the status back until they are."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async with asyncio.timeout(60):
            await collect(call)
    return str((await call.code()).name)


async def test_calls_arriving_while_router_ends_get_status() -> None:
    """A stopping router accepts and refuses calls, because the core of gRPC would end them with a bare CANCELLED."""
    async with bench(FakeWorker(FILES, answer=short)) as b, b.another_client([]) as client:
        calls = [client.Generate(request(request_id=f"{i}", params={"max_tokens": 2})) for i in range(400)]
        await until(lambda: b.router.service.in_flight > 0)
        await b.router.stop()
        codes = Counter(await asyncio.gather(*map(code_at_end, calls)))
        assert set(codes) <= {"OK", "UNAVAILABLE", "ABORTED"}, codes


async def test_router_ending_with_busy_loop_gives_calls_a_status() -> None:
    """The loop accepts one call per turn, so with long turns a quiet period does not mean that no call waits."""
    async with bench(FakeWorker(FILES, answer=short)) as b, b.another_client([]) as client:
        calls = [client.Generate(request(request_id=f"{i}", params={"max_tokens": 2})) for i in range(100)]
        await until(lambda: b.router.service.in_flight > 0)
        loop = asyncio.get_running_loop()
        for turn in range(20):
            loop.call_later(0.045 * turn, time.sleep, 0.04)
        await b.router.stop()
        codes = Counter(await asyncio.gather(*map(code_at_end, calls)))
        assert set(codes) <= {"OK", "UNAVAILABLE", "ABORTED"}, codes


async def test_drain_finishes_streams_and_refuses_new_ones() -> None:
    async with bench(drain_timeout_s=60.0) as b:
        call = b.stub.Generate(request(params={"max_tokens": 300}))
        await call.read()
        draining = asyncio.ensure_future(b.router.drain())
        await asyncio.sleep(0.05)
        assert await b.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        parts = await collect(call)
        assert parts[-1].finish.usage.completion_tokens == 300
        await draining
        assert leftovers(b.router) == [0] * 8


def assert_ended_with_router(error: grpc.aio.AioRpcError, tokens: int) -> None:
    """The statuses of a router that ends, by what the client has got."""
    assert detail(error, error_details_pb2.ErrorInfo).reason == "ROUTER_ENDING"
    assert "Cancelling all calls" not in (error.details() or "")
    if tokens:
        assert (error.code(), details_of(error)) == (grpc.StatusCode.ABORTED, {"ErrorInfo"})
        assert detail(error, error_details_pb2.ErrorInfo).metadata["tokens_sent"] == str(tokens)
    else:
        assert (error.code(), details_of(error)) == (grpc.StatusCode.UNAVAILABLE, {"ErrorInfo", "RetryInfo"})


@pytest.mark.parametrize("drains", [True, False])
async def test_ending_router_gives_streams_status_and_usage(drains: bool) -> None:
    """The streams end after the drain timeout, or at once when the router stops at once."""
    worker = FakeWorker(FILES, room_seqs=1, step_s=0.01)
    async with bench(worker, drain_timeout_s=0.2) as b:
        begun = b.stub.Generate(request(params={"max_tokens": 4000}))
        parts: list[Any] = [await begun.read()]
        waiting = [b.stub.Generate(request(params={"max_tokens": 4000})) for _ in range(3)]
        await until(lambda: len(b.router.dispatcher) == 3)
        ending = asyncio.ensure_future(b.router.drain() if drains else b.router.stop())
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await begun.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert_ended_with_router(await error_of(begun), sum(len(part.token_ids) for part in parts))
        for call in waiting:
            assert_ended_with_router(await error_of(call), 0)
        await ending
        assert leftovers(b.router) == [0] * 8


async def test_admin_watch_ends_with_router() -> None:
    """No call ends with a bare status of gRPC."""
    async with bench(admin_port=0) as b:
        assert b.router.admin is not None
        async with grpc.aio.insecure_channel(b.router.admin.address) as channel:
            watch = AdminServiceStub(channel).WatchLoad(apb.WatchLoadRequest(interval=to_duration(60)))
            await watch.read()
            ending = asyncio.ensure_future(b.router.stop())
            assert_ended_with_router(await error_of(watch), 0)
            await ending


async def test_process_drains_on_sigterm_and_exits_with_zero() -> None:
    async with draining_process() as (process, channel):
        call = InferenceServiceStub(channel).Generate(request("secret words", params={"max_tokens": 200}))
        await call.read()
        process.send_signal(signal.SIGTERM)
        assert (await collect(call))[-1].finish.usage.completion_tokens == 200
    log = log_of(process)
    assert log.count("request ended") == 1
    assert "secret" not in log
    assert "hijkl" not in log
    assert "Traceback" not in log


@pytest.mark.slow
async def test_second_signal_ends_draining_router_with_same_statuses() -> None:
    """No client gets "Cancelling all calls"; the process ends with code 0."""
    async with draining_process() as (process, channel):
        call = InferenceServiceStub(channel).Generate(request(params={"max_tokens": 4000}))
        parts: list[Any] = [await call.read()]
        await heeds(process, channel, signal.SIGTERM)
        parts += [await call.read() for _ in range(20)]
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await call.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert_ended_with_router(await error_of(call), sum(len(part.token_ids) for part in parts))
    log_of(process)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no worker is named"),
        pytest.param(["--worker", "nowhere"], "use host:port", marks=pytest.mark.slow),
        (["--worker", "a:1", "--port", "TAKEN"], "is in use"),
        pytest.param(
            ["--worker", "a:1", "--port", "0", "--tokenizer", "/nonexistent"], "tokenizer.json", marks=pytest.mark.slow
        ),
        pytest.param(["--worker", "a:1", "--max-hold", "soon"], "use for example 250ms", marks=pytest.mark.slow),
        pytest.param(["--worker", "a:1", "--placement", "magic"], "round_robin", marks=pytest.mark.slow),
        pytest.param(
            ["--worker", "a:1", "--host", "no.such.host.invalid", "--port", "0"],
            "change --host",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_process_refuses_in_one_line(arguments: list[str], message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = router_process(*(port if a == "TAKEN" else a for a in arguments))
        _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in log


def test_router_needs_neither_torch_nor_the_worker() -> None:
    code = "import sys, router.app; print(sorted({'torch', 'worker', 'kernels', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
