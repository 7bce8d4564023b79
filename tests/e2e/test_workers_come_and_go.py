"""Workers that join and leave the router's list while requests run: the router in this process, scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fissile.receipts import VERSION, receipt_sha256
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2

from router.api.served_fields import SERVED
from router.api.tenants import TenantPolicy
from router.app import Router
from router.options import RouterOptions
from router.scheduling.failover import FailoverOptions
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, Bench, bench, collect, detail, error_of, leftovers, request, until
from tests.e2e.test_chat import command


def address(worker: FakeWorker) -> str:
    return f"127.0.0.1:{worker.port}"


def addresses(router: Router) -> list[str]:
    """The workers that the router knows."""
    return [worker.address for worker in router.pool.workers()]


def long(worker: str, tokens: int = 400) -> pb.GenerateRequest:
    return request(request_id=worker, params={"max_tokens": tokens})


async def test_leaving_worker_finishes_running_and_gets_no_more() -> None:
    leaving, staying = FakeWorker(FILES, "leaving"), FakeWorker(FILES, "staying")
    async with bench(leaving, staying, placement="round_robin") as b:
        pool = b.router.pool
        calls = [b.stub.Generate(long(str(i))) for i in range(4)]
        await until(lambda: len(leaving.running) == 2 and len(staying.running) == 2)
        pool.set_workers([address(staying)])
        assert b.ready_workers() == 1
        more = [b.stub.Generate(request(request_id=f"more {i}")) for i in range(5)]
        assert {(await collect(call))[-1].finish.worker_id for call in more} == {"staying"}
        finishes = [(await collect(call))[-1].finish for call in calls]
        assert sorted(finish.worker_id for finish in finishes) == ["leaving"] * 2 + ["staying"] * 2
        assert {finish.attempts for finish in finishes} == {1}
        # With its last stream the connection ends, and nothing of the worker is left.
        await until(lambda: addresses(b.router) == [address(staying)])
        assert (len(leaving.submitted), len(pool.sessions())) == (2, 1)
        await until(lambda: not any(leftovers(b.router)))


async def test_worker_returning_while_leaving_is_kept() -> None:
    one, other = FakeWorker(FILES, "one"), FakeWorker(FILES, "other")
    async with bench(one, other, placement="round_robin") as b:
        pool, both = b.router.pool, [address(one), address(other)]
        calls = [b.stub.Generate(long(str(i))) for i in range(2)]
        await until(lambda: one.running and other.running)
        pool.set_workers([address(other)])
        assert b.ready_workers() == 1
        pool.set_workers(both)
        assert b.ready_workers() == 2
        calls += [b.stub.Generate(request(request_id=f"more {i}")) for i in range(4)]
        finishes = [(await collect(call))[-1].finish.worker_id for call in calls]
        assert sorted(finishes) == ["one"] * 3 + ["other"] * 3
        # The same connection: it was never given up.
        assert (len(one.calls), len(pool.sessions())) == (1, 2)
        # One that is idle is left at once, and dialled again when it comes back.
        pool.set_workers([address(other)])
        pool.set_workers(both)
        await until(lambda: len(one.calls) == 2 and b.ready_workers() == 2)


async def test_last_worker_may_leave_and_return() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=10.0)) as b:
        running = b.stub.Generate(long("running"))
        await until(lambda: worker.running)
        b.router.pool.set_workers([])
        assert not b.router.registry.serving
        waiting = b.stub.Generate(request(request_id="waiting"))
        assert (await collect(running))[-1].finish.usage.completion_tokens == 400
        await until(lambda: not b.router.pool.workers())
        b.router.pool.set_workers([address(worker)])
        assert (await collect(waiting))[-1].finish.usage.completion_tokens == 5


async def test_broken_stream_of_draining_worker_is_moved() -> None:
    leaving, staying = FakeWorker(FILES, "leaving"), FakeWorker(FILES, "staying")
    async with bench(leaving, staying, placement="round_robin") as b:
        calls = [b.stub.Generate(long(str(i), 1000)) for i in range(2)]
        await until(lambda: leaving.running and staying.running)
        b.router.pool.set_workers([address(staying)])
        await leaving.stop()
        finishes = [(await collect(call))[-1].finish for call in calls]
        assert {(f.worker_id, f.usage.completion_tokens) for f in finishes} == {("staying", 1000)}
        assert sorted(f.attempts for f in finishes) == [1, 2]
        await until(lambda: addresses(b.router) == [address(staying)])


@contextlib.asynccontextmanager
async def early(*workers: FakeWorker, worker_wait_s: float = 120.0) -> AsyncIterator[Bench]:
    """A router whose workers have not started yet."""
    for worker in workers:
        await worker.start()
        await worker.stop()
    options = RouterOptions(
        workers=[address(worker) for worker in workers], port=0, failover=FailoverOptions(worker_wait_s=worker_wait_s)
    )
    router = Router(options)
    await router.start()
    async with grpc.aio.insecure_channel(router.server.address) as channel:
        yield Bench(router, list(workers), channel)
    await router.stop()


@pytest.mark.slow
async def test_requests_wait_for_first_worker() -> None:
    """Requests wait like those whose worker is lost."""
    worker = FakeWorker(FILES)
    # The one with an unknown model waits as long.
    async with early(worker, worker_wait_s=30.0) as b:
        calls = [b.stub.Generate(request(request_id=str(i), model=("", "m")[i % 2])) for i in range(4)]
        calls += [b.stub.Generate(request(model="other"))]
        await until(lambda: b.router.pool.tables()["early"] == 5)
        await worker.start()
        assert [(await collect(call))[-1].finish.worker_id for call in calls[:4]] == ["w0"] * 4
        # Every address has said what it serves.
        assert (await error_of(calls[4])).code() is grpc.StatusCode.NOT_FOUND
        assert b.router.pool.tables()["early"] == 0
        await worker.stop()


def calls_that_need_a_model(b: Bench, model: str) -> dict[str, Any]:
    """One call of each method whose request names a model; ListModels does not wait for one."""
    chat = pb.ChatRequest(
        model=model,
        messages=[pb.ChatMessage(role="user", content="hi")],
        sampling_params=pb.SamplingParams(max_tokens=5),
    )
    generate = request(model=model)
    receipt = pb.Receipt(version=VERSION, request_sha256=bytes(32), output_sha256=bytes(32))
    receipt.receipt_sha256 = receipt_sha256(receipt)
    replay = request(model=model, request_id="r")
    texts = [pb.TextOrTokens(text="hi")]
    return {
        "Generate": b.stub.Generate(generate).read(),
        "Chat": b.stub.Chat(chat).read(),
        "GenerateOnce": b.stub.GenerateOnce(generate),
        "ChatOnce": b.stub.ChatOnce(chat),
        "Score": b.stub.Score(pb.ScoreRequest(model=model, continuations=texts)),
        "Embed": b.stub.Embed(pb.EmbedRequest(model=model, inputs=texts)),
        "Rerank": b.stub.Rerank(pb.RerankRequest(model=model, query="q", documents=["d"])),
        "Replay": b.stub.Replay(pb.ReplayRequest(receipt=receipt, generate=replay)),
        "Tokenize": b.stub.Tokenize(pb.TokenizeRequest(model=model, text="hi")),
        "Detokenize": b.stub.Detokenize(pb.DetokenizeRequest(model=model, token_ids=[1])),
        "CountTokens": b.stub.CountTokens(pb.CountTokensRequest(chat=chat)),
        "RenderPrompt": b.stub.RenderPrompt(pb.RenderPromptRequest(chat=chat)),
        "GetModel": b.stub.GetModel(pb.GetModelRequest(model=model)),
    }


async def statuses(calls: dict[str, Any]) -> dict[str, grpc.StatusCode]:
    """The status of each call, by its name, after all have ended."""
    ended = await asyncio.gather(*calls.values(), return_exceptions=True)
    assert all(not isinstance(end, BaseException) or isinstance(end, grpc.aio.AioRpcError) for end in ended)
    codes = [end.code() if isinstance(end, grpc.aio.AioRpcError) else grpc.StatusCode.OK for end in ended]
    return dict(zip(calls, codes, strict=True))


@pytest.mark.parametrize("model", ["", pytest.param("m", marks=pytest.mark.slow)])
async def test_calls_with_model_wait_for_the_first_worker(model: str) -> None:
    """Former fault: GetModel and Tokenize failed at once, while Generate waited."""
    worker = FakeWorker(FILES)
    async with early(worker) as b:
        calls = calls_that_need_a_model(b, model)
        assert {*calls} == {*SERVED} - {"ListModels"}
        waiting = asyncio.ensure_future(statuses(calls))
        await until(lambda: b.router.pool.tables()["early"] == len(calls))
        assert not (await b.stub.ListModels(pb.ListModelsRequest())).models
        await worker.start()
        ended = await waiting
        assert grpc.StatusCode.UNAVAILABLE not in ended.values(), ended
        works = ("Generate", "GenerateOnce", "Tokenize", "Detokenize", "GetModel")
        assert [ended[name] for name in works] == [grpc.StatusCode.OK] * len(works)
        assert b.router.pool.tables()["early"] == 0
        await worker.stop()


async def test_generate_and_chat_commands_wait_for_the_first_worker() -> None:
    """Former fault: `fissile generate` and `fissile chat` call GetModel first, which failed at once."""
    worker = FakeWorker(FILES, answer=short)
    async with early(worker, worker_wait_s=60.0) as b:
        at = ("--address", b.router.server.address)
        running = [asyncio.ensure_future(command(*each, *at, text="hi\n")) for each in (["generate", "hi"], ["chat"])]
        await until(lambda: b.router.pool.tables()["early"] == 2)
        await worker.start()
        assert [(await each)[:2] for each in running] == [(0, "hello\n")] * 2
        await worker.stop()


async def test_calls_waiting_for_a_model_end_with_the_router() -> None:
    """A call that waits for a model ends with the router, and with its client."""
    async with early(FakeWorker(FILES)) as b:
        gone = b.stub.GetModel(pb.GetModelRequest())
        await until(lambda: b.router.pool.tables()["early"] == 1)
        gone.cancel()
        await until(lambda: b.router.pool.tables()["early"] == 0)
        waiting = asyncio.ensure_future(statuses(calls_that_need_a_model(b, "")))
        await until(lambda: b.router.pool.tables()["early"] == len(SERVED) - 1)
        await b.router.stop()
        ended = await waiting
        assert {*ended.values()} == {grpc.StatusCode.UNAVAILABLE}, ended


async def test_waiting_lookup_counts_against_its_tenants_limit() -> None:
    """The tenant's limit refuses a flood of GetModel calls to a starting router."""
    async with early(FakeWorker(FILES)) as b:
        b.router.service.set_tenants(TenantPolicy(concurrency=2))
        waiting = [b.stub.GetModel(pb.GetModelRequest()) for _ in range(2)]
        await until(lambda: b.router.pool.tables()["early"] == 2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await b.stub.GetModel(pb.GetModelRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in waiting:
            call.cancel()


async def test_status_without_first_worker_says_why() -> None:
    """UNAVAILABLE with RetryInfo, after the wait."""
    async with early(FakeWorker(FILES), worker_wait_s=0.5) as b:
        begin = asyncio.get_running_loop().time()
        error = await error_of(b.stub.Generate(request()))
        assert asyncio.get_running_loop().time() - begin >= 0.5
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        b.stub.Generate(request()).cancel()
        await until(lambda: b.router.pool.tables()["early"] == 0)


async def test_model_is_known_before_its_first_worker_is_up() -> None:
    """A router that was just started knows one of its two models."""
    one, other = FakeWorker(FILES), FakeWorker(FILES, "k0", description={"model": "k"})
    async with early(one, other) as b:
        await one.start()
        await b.ready(1)
        call = b.stub.Generate(request(model="k"))
        await until(lambda: b.router.pool.tables()["early"] == 1)
        await other.start()
        assert (await collect(call))[-1].finish.worker_id == "k0"
        assert (await error_of(b.stub.Generate(request(model="x")))).code() is grpc.StatusCode.NOT_FOUND
        for worker in (one, other):
            await worker.stop()


async def test_worker_started_after_router_is_found() -> None:
    """The worker starts two seconds after the router."""
    worker = FakeWorker(FILES)
    await worker.start()
    await worker.stop()
    router = Router(RouterOptions(workers=[address(worker)], port=0, failover=FailoverOptions(worker_wait_s=0.2)))
    await router.start()
    async with grpc.aio.insecure_channel(router.server.address) as channel:
        b = Bench(router, [worker], channel)
        await asyncio.sleep(2.0)
        assert (await error_of(b.stub.Generate(request()))).code() is grpc.StatusCode.UNAVAILABLE
        await worker.start()
        await until(lambda: router.registry.serving)
        await worker.stop()
    await router.stop()
