"""Clients of a router that read slowly, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2

from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import (
    FILES,
    SMALL_WINDOW,
    TOKENIZER,
    bench,
    collect,
    detail,
    error_of,
    request,
    until,
)

if TYPE_CHECKING:
    pass


async def test_dropped_slow_client_does_not_slow_others() -> None:
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, max_unread_tokens=20_000) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": 700_000}))
        await slow.read()
        neighbour = await collect(b.stub.Generate(request(params={"max_tokens": 10_000})))
        assert neighbour[-1].finish.usage.completion_tokens == 10_000
        await until(lambda: worker.cancelled)
        # Nothing of it is held until the client reads again, which it may never do.
        await b.empty()
        error = await error_of(slow)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "SLOW_CLIENT"
        await b.empty()


# Only time drops these clients.
UNREAD: dict[str, Any] = {"max_unread_tokens": 1 << 30, "slow_client_timeout_s": 0.5}


@pytest.mark.parametrize("tokens", [60_000, 700_000])
async def test_client_that_never_reads_is_dropped(tokens: int) -> None:
    """Also after the answer's end, when only the last messages are unread."""
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, **UNREAD) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": tokens}, request_id="same"))
        parts: list[Any] = [await slow.read()]
        await until(lambda: not b.router.service.in_flight)
        await b.empty()
        again = b.stub.Generate(request(params={"max_tokens": 1}, request_id="same"))
        assert (await collect(again))[-1].HasField("finish")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await slow.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert not any(part.HasField("finish") for part in parts)
        error = await error_of(slow)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "SLOW_CLIENT"


@pytest.mark.slow
async def test_slow_worker_drops_no_client() -> None:
    worker = FakeWorker(FILES, step_s=1.2)
    async with bench(worker, **UNREAD) as b:
        assert (await collect(b.stub.Generate(request(params={"max_tokens": 3}))))[-1].HasField("finish")


async def test_drain_does_not_wait_for_unread_client() -> None:
    """The drain waits neither for the unread message, longer than a slow client may, nor for the status."""
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, drain_timeout_s=60.0, **UNREAD) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": 60_000}))
        await slow.read()
        begin = asyncio.get_running_loop().time()
        await b.router.drain()
        # Else as long as the drain may last.
        assert asyncio.get_running_loop().time() - begin < 60.0


async def test_slow_client_gets_merged_deltas_without_loss() -> None:
    worker = FakeWorker(FILES, tokens_per_step=512, max_model_len=2_000_000)
    async with bench(worker, max_unread_tokens=700_000) as b, b.another_client(SMALL_WINDOW) as client:
        call = client.Generate(request(params={"max_tokens": 300_000}))
        parts: list[Any] = [await call.read()]
        await until(lambda: not worker.running)
        parts += await collect(call)
        ids = [i for part in parts for i in part.token_ids]
        assert ids == worker.answer(worker.submitted[0])[:300_000]
        assert "".join(part.text for part in parts) == TOKENIZER.decode(ids)
        assert len(parts) < 0.8 * 300_000 / 512
