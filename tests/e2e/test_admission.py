"""Who is let in and who goes first, through a router's real port: classes, tenants, hopeless deadlines."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.rpc.api_keys import Role, new_key
from common.rpc.auth import KeyAccess
from common.rpc.durations import to_seconds
from common.rpc.key_store import KeyStore
from router.api.tenants import TenantPolicy
from router.cli.connection import Admin
from router.cli.workers import as_table
from router.security import RouterSecurity
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, bench, collect, detail, error_of, leftovers, until


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


async def test_higher_priority_classes_are_served_first() -> None:
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


async def test_full_queue_is_shared_by_tenants() -> None:
    """A tenant that fills the queue loses places to others; its dropped requests end with a status and a retry time."""
    share = "and tenant 'flood' has its share of it"
    async with bench(OneByOne(FILES), queue_size=4) as b:
        running = await blocked(b)
        calls = {}
        for length in range(10, 14):
            calls[length] = ask(b, length, tenant="flood")
            await until(lambda: leftovers(b.router)[2] == len(calls))
        calls[20] = ask(b, 20, tenant="b")
        dropped = await error_of(calls.pop(13))
        for error in (dropped, await error_of(ask(b, 14, tenant="flood"))):
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == f"the queue is full (4 requests of priority normal), {share}"
            assert detail(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
            assert detail(error, error_details_pb2.RetryInfo).HasField("retry_delay")
        running.cancel()
        for call in calls.values():
            assert (await collect(call))[-1].HasField("finish")
        assert sorted(len(s.token_ids) for s in b.workers[0].submitted[1:]) == [10, 11, 12, 20]
        await b.empty()


async def test_long_answers_count_in_a_tenants_share() -> None:
    """After an answer of hundreds of tokens a tenant waits until others have had as much."""
    async with bench(OneByOne(FILES)) as b:
        running = b.stub.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7]), sampling_params=pb.SamplingParams(max_tokens=4000)),
            metadata=(("x-fissile-tenant", "talks"),),
        )
        await running.read()
        calls = []
        for length, tenant in ((10, "talks"), (11, "talks"), (20, "b"), (21, "b"), (22, "b")):
            calls.append(ask(b, length, tenant=tenant))
            await until(lambda: leftovers(b.router)[2] == len(calls))
        for _ in range(20):
            await running.read()
        await until(lambda: b.router.dispatcher.shares.start(2, "talks") > 2 * 20)
        running.cancel()
        await asyncio.gather(*(collect(call) for call in calls))
        served = [len(s.token_ids) for s in b.workers[0].submitted[1:]]
        assert served[:2] == [20, 21]
        await b.empty()


async def test_tenant_concurrency_limits_only_that_tenant() -> None:
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
        assert len(b.router._admission._tenant_limits) == 0


async def test_hopeless_deadline_is_refused_at_once() -> None:
    worker = OneByOne(FILES)
    async with bench(worker) as b:
        worker.prefill_rate, worker.waiting_tokens = 100.0, 1000
        running = await blocked(b)
        await until(lambda: next(iter(b.router.dispatcher.lanes)).load.report.waiting_tokens == 1000)
        begun = time.monotonic()
        error = await error_of(ask(b, timeout=5.0))
        spent_ms = 1000 * (time.monotonic() - begun)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "DEADLINE_HOPELESS"
        # What waits takes ten seconds, of which the call has five left, but for those that have passed.
        assert 4900 <= detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() <= 5200 + spent_ms
        in_time = ask(b, timeout=60.0)
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


async def test_admin_lists_workers_with_load() -> None:
    begun = time.monotonic()
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
        assert 0 <= to_seconds(seen.report_age) <= time.monotonic() - begun
        assert as_table([seen]).splitlines()[1].split()[3] == "serving"
        waiting.cancel()
        running.cancel()
        await b.empty()


class Keys:
    """A router's API keys by name, and calls that show them."""

    def __init__(self, **most: str) -> None:
        made = {name: new_key(name, tenant_of_key(name), [Role.INFER], each) for name, each in most.items()}
        self._keys = {name: key for name, (key, _) in made.items()}
        self.security = RouterSecurity(access=KeyAccess(KeyStore(None, [kept.line() for _, kept in made.values()])))

    def secret(self, name: str) -> str:
        return self._keys[name]

    def ask(self, b: Any, name: str, priority: Any, *, tenant: str = "") -> Any:
        metadata = [("authorization", f"Bearer {self._keys[name]}")]
        if tenant:
            metadata.append(("x-fissile-tenant", tenant))
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5]), sampling_params=pb.SamplingParams(max_tokens=1), priority=priority
        )
        return b.stub.Generate(asked, metadata=metadata)


def tenant_of_key(name: str) -> str:
    return name.partition("_")[2]


async def refused(call: Any, reason: str) -> str:
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert detail(error, error_details_pb2.ErrorInfo).reason == reason
    if reason == "PRIORITY_NOT_ALLOWED":
        (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
        assert violation.field == "priority"
    return str(error.details())


async def test_high_priority_needs_permission() -> None:
    """With API keys, a high priority needs a key or a tenant that the operator allows it."""
    keys = Keys(plain="", high="high", batch="low", a_gold="", b_gold="low")
    policy = TenantPolicy(max_priority_of={"gold": "high"})
    async with bench(FakeWorker(FILES), security=keys.security, tenants=policy) as b:
        why = await refused(keys.ask(b, "plain", pb.PRIORITY_HIGH), "PRIORITY_NOT_ALLOWED")
        assert why == "priority is PRIORITY_HIGH; valid: at most PRIORITY_NORMAL, the highest for this caller"
        await refused(keys.ask(b, "batch", pb.PRIORITY_NORMAL), "PRIORITY_NOT_ALLOWED")
        await refused(keys.ask(b, "b_gold", pb.PRIORITY_HIGH), "PRIORITY_NOT_ALLOWED")
        allowed = [("plain", 0), ("high", pb.PRIORITY_HIGH), ("batch", 0), ("a_gold", pb.PRIORITY_HIGH)]
        for name, priority in allowed:
            assert (await collect(keys.ask(b, name, priority)))[-1].HasField("finish")
        assert [s.priority for s in b.workers[0].submitted] == [2, 3, 1, 3]
        # From a change of the routing on, with the next call.
        changed = replace(b.router.configuration.settings.routing, tenant_max_priority={"": "high"})
        b.router.configuration.set_routing(changed)
        assert (await collect(keys.ask(b, "plain", pb.PRIORITY_HIGH)))[-1].HasField("finish")
        await b.empty()


async def test_isolated_tenants_have_tenant_of_key_in_cache_salt() -> None:
    """The request record and the hash chain of the prompt agree, for both kinds of requests."""
    keys, policy = Keys(gateway="", a_gold="", b_gold=""), TenantPolicy(isolate=True)
    async with bench(FakeWorker(FILES), security=keys.security, tenants=policy) as b:
        for name, tenant in (("a_gold", ""), ("b_gold", "gold"), ("gateway", "gold"), ("gateway", "")):
            assert (await collect(keys.ask(b, name, 0, tenant=tenant)))[-1].HasField("finish")
        gold, other = policy.cache_salt("", "gold"), policy.cache_salt("", "")
        assert [record.cache_salt for record in b.workers[0].submitted] == [gold, gold, gold, other]
        await b.empty()


async def test_require_bound_tenant_refuses_named_tenant() -> None:
    """With --require-bound-tenant no caller evades shares and limits with another name in each call."""
    keys = Keys(gateway="", a_gold="")
    async with bench(FakeWorker(FILES), security=keys.security, tenants=TenantPolicy(require_bound=True)) as b:
        await refused(keys.ask(b, "gateway", 0, tenant="gold"), "TENANT_NOT_BOUND")
        await refused(keys.ask(b, "a_gold", 0, tenant="silver"), "TENANT_MISMATCH")
        for name, tenant in (("gateway", ""), ("a_gold", ""), ("a_gold", "gold")):
            assert (await collect(keys.ask(b, name, 0, tenant=tenant)))[-1].HasField("finish")
        await b.empty()
