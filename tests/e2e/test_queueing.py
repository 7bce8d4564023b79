"""Requests that wait at a router: their order, their ids, what ends them, and a queue that is full."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2

from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import (
    FILES,
    bench,
    collect,
    detail,
    error_of,
    leftovers,
    miss_deadline,
    request,
    until,
)

if TYPE_CHECKING:
    pass


async def test_round_robin_over_three_workers() -> None:
    async with bench(*(FakeWorker(FILES, worker_id=f"w{i}", answer=short) for i in range(3))) as b:
        answers = [await collect(b.stub.Generate(request())) for _ in range(9)]
        assert sorted(parts[-1].finish.worker_id for parts in answers) == ["w0"] * 3 + ["w1"] * 3 + ["w2"] * 3


async def test_cancel_and_deadline_reach_the_worker() -> None:
    async with bench() as b:
        worker = b.workers[0]
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        call.cancel()
        await until(lambda: worker.cancelled == [worker.submitted[0].rid])
        worker.step_s = 0.05
        timeout_s = await miss_deadline(
            lambda timeout_s: b.stub.Generate(request(params={"max_tokens": 4000}), timeout=timeout_s),
            lambda: len(worker.submitted) > 1,
        )
        assert 1 <= worker.submitted[-1].deadline_left_ms <= 1000 * timeout_s + 100
        await until(lambda: worker.cancelled == [s.rid for s in worker.submitted])
        await b.empty()


async def test_duplicate_request_id() -> None:
    async with bench() as b:
        call = b.stub.Generate(request(request_id="same", params={"max_tokens": 4000}))
        await call.read()
        error = await error_of(b.stub.Generate(request(request_id="same")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()
        await b.empty()
        assert await collect(b.stub.Generate(request(request_id="same")))


async def test_request_ids_are_per_tenant() -> None:
    """An id in flight blocks no other tenant; equal ids draw equal random numbers."""
    async with bench() as b:
        calls = [
            b.stub.Generate(
                request(request_id="same", params={"max_tokens": 4000}), metadata=(("x-fissile-tenant", tenant),)
            )
            for tenant in ("gold", "iron")
        ]
        firsts: list[Any] = [await call.read() for call in calls]
        assert {first.prompt_info.seed for first in firsts} == {str(derive_seed("same"))}
        again = b.stub.Generate(request(request_id="same"), metadata=(("x-fissile-tenant", "iron"),))
        assert (await error_of(again)).code() is grpc.StatusCode.ALREADY_EXISTS
        calls[1].cancel()
        await until(lambda: b.router.service.in_flight == 1)
        again = b.stub.Generate(request(request_id="same"), metadata=(("x-fissile-tenant", "iron"),))
        assert (await collect(again))[-1].HasField("finish")
        calls[0].cancel()
        await b.empty()


async def test_full_queue_returns_retry_time() -> None:
    async with bench(FakeWorker(FILES, room_seqs=1), queue_size=2) as b:
        running = b.stub.Generate(request(params={"max_tokens": 4000}))
        await running.read()
        queued = [b.stub.Generate(request()) for _ in range(2)]
        await until(lambda: leftovers(b.router)[2] == 2)
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 50 <= detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() <= 30_000
        assert detail(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
        running.cancel()
        for parts in await asyncio.gather(*(collect(call) for call in queued)):
            assert parts[-1].HasField("finish")
        await b.empty()


async def test_deadline_in_the_queue() -> None:
    async with bench(FakeWorker(FILES, room_seqs=0, decoding=1)) as b:
        error = await error_of(b.stub.Generate(request(), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await b.empty()
        assert b.workers[0].submitted == []


async def test_gate_holds_prompts_and_releases_them_together() -> None:
    worker = FakeWorker(FILES, decoding=1, latency_us=600_000_000)
    async with bench(worker, delay_factor=1.0, max_hold_s=60.0) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 1}))]
        await until(lambda: len(b.router.dispatcher) == 1)
        calls += [b.stub.Generate(request(params={"max_tokens": 1})) for _ in range(3)]
        await until(lambda: len(b.router.dispatcher) == 4)
        assert not worker.groups
        # Now the first one is older than the factor times this latency.
        worker.latency_us = 1
        first, *_ = await asyncio.gather(*(collect(call) for call in calls))
        assert "gate_hold" in {part.stage for part in first[-1].finish.timings.parts}
        assert worker.groups == [4]
        assert any(lane.seqs for lane in worker.lanes)
        assert worker.lanes[-1].seqs == 0


async def test_burst_within_worker_capacity_fills_no_queue() -> None:
    async with bench(FakeWorker(FILES, answer=short), queue_size=1) as b:
        calls = [b.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))) for _ in range(32)]
        answers = await asyncio.gather(*(collect(call) for call in calls))
        assert all(parts[-1].HasField("finish") for parts in answers)
