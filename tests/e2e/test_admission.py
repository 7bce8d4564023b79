"""Who is let in and who goes first, through a router's real port: classes, tenants, hopeless deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.cli.admin import Admin
from common.cli.workers import as_table
from router.tenants import TenantPolicy
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.test_router import FILES, bench, collect, detail, error_of, leftovers, until


class OneByOne(FakeWorker):
    """Has room for one sequence while it has none; its prefill speed can be set."""

    prefill_rate = 0.0
    waiting_tokens = 0

    def _load(self) -> wpb.Load:
        load = super()._load()
        load.room_seqs = 0 if self.running else 1
        load.prefill_rate, load.waiting_tokens = self.prefill_rate, self.waiting_tokens
        return load


def ask(b: Any, length: int = 4, tenant: str = "", timeout: float | None = None, **fields: Any) -> Any:
    """Prompts of other lengths are told apart at the worker."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * length), **fields)
    request.sampling_params.max_tokens = 2
    return b.stub.Generate(request, metadata=(("x-fissile-tenant", tenant),), timeout=timeout)


async def blocked(b: Any) -> Any:
    """A call that keeps the worker busy until it is cancelled."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7]))
    request.sampling_params.max_tokens = 4000
    running = b.stub.Generate(request)
    await running.read()
    return running


async def order_of_service(b: Any, asked: list[dict[str, Any]]) -> list[int]:
    """Asks for all while the worker is busy; returns the prompt lengths in the order in which the worker got them."""
    running = await blocked(b)
    calls = []
    for fields in asked:
        calls.append(ask(b, **fields))
        await until(lambda: leftovers(b.router)[2] == len(calls))
    running.cancel()
    await asyncio.gather(*(collect(call) for call in calls))
    return [len(sequence.token_ids) for sequence in b.workers[0].submitted[1:]]


async def test_classes_in_their_order() -> None:
    async with bench(OneByOne(FILES)) as b:
        asked = [
            {"length": 10, "priority": pb.PRIORITY_LOW},
            {"length": 20, "priority": pb.PRIORITY_NORMAL},
            {"length": 30, "priority": pb.PRIORITY_HIGH},
            {"length": 40},
        ]
        assert await order_of_service(b, asked) == [30, 20, 40, 10]
        assert [s.priority for s in b.workers[0].submitted[1:]] == [3, 2, 2, 1]
        await b.empty()


async def test_tenants_in_turn_by_weight() -> None:
    flood = [{"length": 10 + i, "tenant": "flood"} for i in range(6)]
    others = [{"length": 20 + i, "tenant": "b"} for i in range(2)]
    async with bench(OneByOne(FILES)) as b:
        order = await order_of_service(b, flood + others)
        assert order.index(21) <= 4
        assert [length for length in order if length < 20] == [10, 11, 12, 13, 14, 15]
    async with bench(OneByOne(FILES), tenants=TenantPolicy(weights={"flood": 100.0})) as b:
        assert (await order_of_service(b, flood + others)).index(20) <= 1
        assert [len(s.token_ids) for s in b.workers[0].submitted].index(21) == 8


async def test_a_tenants_concurrency_is_its_own() -> None:
    async with bench(OneByOne(FILES), tenants=TenantPolicy(concurrency=1, concurrency_of={"": 0})) as b:
        running = await blocked(b)
        first = ask(b, tenant="a")
        await until(lambda: leftovers(b.router)[2] == 1)
        error = await error_of(ask(b, tenant="a"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "TENANT_LIMIT"
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1000
        other = ask(b, tenant="b")
        await until(lambda: leftovers(b.router)[2] == 2)
        running.cancel()
        for call in (first, other):
            assert (await collect(call))[-1].HasField("finish")
        assert (await collect(ask(b, tenant="a")))[-1].HasField("finish")
        await b.empty()
        assert len(b.router.service._tenant_limits) == 0


async def test_a_deadline_that_can_not_be_met_is_refused_at_once() -> None:
    worker = OneByOne(FILES)
    async with bench(worker) as b:
        worker.prefill_rate, worker.waiting_tokens = 100.0, 1000
        running = await blocked(b)
        await until(lambda: next(iter(b.router.fleet._dispatcher._lanes.values())).last_report.waiting_tokens == 1000)
        error = await error_of(ask(b, timeout=5.0))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "DEADLINE_HOPELESS"
        assert 4900 <= detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() <= 5200
        in_time = ask(b, timeout=15.0)
        await until(lambda: leftovers(b.router)[2] == 1)
        running.cancel()
        assert (await collect(in_time))[-1].HasField("finish")
        await b.empty()


@pytest.mark.parametrize(
    ("fields", "problem"), [({"priority": 9}, "priority is 9"), ({"tenant": "x" * 200}, "metadata")]
)
async def test_unknown_priority_and_overlong_tenant(fields: dict[str, Any], problem: str) -> None:
    async with bench() as b:
        error = await error_of(ask(b, **fields))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert problem in (error.details() or "")


async def test_the_workers_and_their_load_as_operators_see_them() -> None:
    worker = OneByOne(FILES)
    async with bench(worker, admin_port=0) as b:
        worker.prefill_rate, worker.waiting_tokens = 100.0, 1000
        running = await blocked(b)
        assert b.router.admin is not None
        waiting = ask(b, length=7)
        await until(lambda: leftovers(b.router)[2] == 1)
        admin = Admin(b.router.admin.address)
        (seen,) = (await admin.use(lambda stub: stub.ListWorkers(apb.ListWorkersRequest()))).workers
        assert (seen.worker_id, seen.model, seen.running, seen.queued) == ("w0", "m", 1, 1)
        assert (seen.decoding_seqs, seen.outstanding_tokens, seen.prefill_rate) == (1, 1007, 100.0)
        assert seen.report_age_ms < 2000
        assert as_table([seen]).splitlines()[1].split()[3] == "serving"
        waiting.cancel()
        running.cancel()
        await b.empty()
