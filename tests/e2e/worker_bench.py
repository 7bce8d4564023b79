"""A worker in this process on a real socket, for tests, and what routers and direct calls send it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import Config
from tests.e2e.worker_client import EOS_ID, VOCAB_SIZE, RouterEnd, make_model_folder
from worker.server import Worker, WorkerOptions
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import SimulatedRunner

ROOT = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NUM_BLOCKS = 1024
REFERENCE = SimulatedRunner(VOCAB_SIZE, EOS_ID)
# Of a sequence that runs until somebody ends it.
ENDLESS = 3000


def options(folder: Path, **changes: Any) -> WorkerOptions:
    config = Config(model=str(folder), max_num_seqs=64, max_num_batched_tokens=512, enable_prefix_caching=True)
    # 1024 blocks of 16 tokens, 2 layers, 2 heads of 16 numbers, K and V in 4 bytes each.
    config = replace(config, kv_cache_memory=NUM_BLOCKS * 16 * 2 * 2 * 16 * 2 * 4)
    made = WorkerOptions(config, "tiny", port=0, worker_id="w0", simulate=FixedCost(0.001))
    return replace(made, **changes)


class Site:
    """A worker in this process, and a channel to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.stop = asyncio.Event()

    async def start(self, *, ready: bool = True) -> None:
        await self.worker.start()
        self.serving = asyncio.create_task(self.worker.serve(self.stop))
        self.channel = grpc.aio.insecure_channel(self.worker.server.address)
        self.stub = WorkerServiceStub(self.channel)
        if ready:
            await self.until_serving()

    async def until_serving(self) -> None:
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        async with asyncio.timeout(60):
            while (await watch.read()).status != SERVING:
                pass
        watch.cancel()

    async def health(self, name: str = "") -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return bool((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING)

    async def router(self, router_id: str = "r", lease_ms: int = 5000) -> RouterEnd:
        end = RouterEnd(self.channel, router_id, lease_ms)
        await end.open()
        return end

    async def load(self) -> wpb.Load:
        """The load as a new session sees it."""
        end = RouterEnd(self.channel, f"probe-{random.random()}")
        welcome = await end.open()
        end.call.cancel()
        return welcome.load

    async def until_free(self) -> None:
        """Waits until nothing runs and no block is in use."""
        async with asyncio.timeout(60):
            while True:
                load = await self.load()
                if load.free_blocks == NUM_BLOCKS and load.decoding_seqs == load.waiting_seqs == 0:
                    return
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.channel.close()
        self.stop.set()
        await asyncio.wait_for(self.serving, 60)
        assert self.worker.engine.join(60)


@contextlib.asynccontextmanager
async def running(worker: Worker, *, ready: bool = True) -> AsyncIterator[Site]:
    site = Site(worker)
    await site.start(ready=ready)
    try:
        yield site
    finally:
        await site.close()


def request(max_tokens: int = 5, **fields: Any) -> wpb.GenerateRequest:
    params = wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=max_tokens)
    return wpb.GenerateRequest(**{"token_ids": [1, 2, 3], "params": params, "seed": 4, **fields})


async def status_of(call: Any) -> grpc.StatusCode:
    """Reads a direct call to its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[Site]:
    async with running(Worker(options(folder))) as made:
        yield made
