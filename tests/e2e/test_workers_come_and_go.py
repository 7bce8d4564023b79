"""Workers that join and leave the router's list while requests run: the router in this process, scripted workers."""

from __future__ import annotations

import asyncio

import grpc
from fissile.v1 import inference_pb2 as pb

from router.app import Router, RouterOptions
from router.fleet import FailoverOptions
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.test_router import FILES, Bench, bench, collect, error_of, leftovers, request, until


def address(worker: FakeWorker) -> str:
    return f"127.0.0.1:{worker.port}"


def long(worker: str, tokens: int = 400) -> pb.GenerateRequest:
    return request(request_id=worker, params={"max_tokens": tokens})


async def test_a_worker_that_leaves_finishes_what_runs_and_gets_no_more() -> None:
    leaving, staying = FakeWorker(FILES, "leaving"), FakeWorker(FILES, "staying")
    async with bench(leaving, staying, placement="round_robin") as b:
        fleet = b.router.fleet
        calls = [b.stub.Generate(long(str(i))) for i in range(4)]
        await until(lambda: len(leaving.running) == 2 and len(staying.running) == 2)
        fleet.set_workers([address(staying)])
        assert b.ready_workers() == 1
        more = [b.stub.Generate(request(request_id=f"more {i}")) for i in range(5)]
        assert {(await collect(call))[-1].finish.worker_id for call in more} == {"staying"}
        finishes = [(await collect(call))[-1].finish for call in calls]
        assert sorted(finish.worker_id for finish in finishes) == ["leaving"] * 2 + ["staying"] * 2
        assert {finish.attempts for finish in finishes} == {1}
        # With its last stream the connection ends, and nothing of the worker is left.
        await until(lambda: set(fleet._tasks) == {address(staying)})
        assert (len(leaving.submitted), fleet._parting, len(fleet._sessions)) == (2, set(), 1)
        await until(lambda: not any(leftovers(b.router)))


async def test_a_worker_that_comes_back_while_it_leaves_is_kept() -> None:
    one, other = FakeWorker(FILES, "one"), FakeWorker(FILES, "other")
    async with bench(one, other, placement="round_robin") as b:
        fleet, both = b.router.fleet, [address(one), address(other)]
        calls = [b.stub.Generate(long(str(i))) for i in range(2)]
        await until(lambda: one.running and other.running)
        fleet.set_workers([address(other)])
        assert b.ready_workers() == 1
        fleet.set_workers(both)
        assert b.ready_workers() == 2
        calls += [b.stub.Generate(request(request_id=f"more {i}")) for i in range(4)]
        finishes = [(await collect(call))[-1].finish.worker_id for call in calls]
        assert sorted(finishes) == ["one"] * 3 + ["other"] * 3
        # The same connection: it was never given up.
        assert (len(one.calls), len(fleet._sessions)) == (1, 2)
        # One that is idle is left at once, and dialled again when it comes back.
        fleet.set_workers([address(other)])
        fleet.set_workers(both)
        await until(lambda: len(one.calls) == 2 and b.ready_workers() == 2)


async def test_the_last_worker_may_leave_and_come_back() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=10.0)) as b:
        running = b.stub.Generate(long("running"))
        await until(lambda: worker.running)
        b.router.fleet.set_workers([])
        assert not b.router.registry.serving
        waiting = b.stub.Generate(request(request_id="waiting"))
        assert (await collect(running))[-1].finish.usage.completion_tokens == 400
        await until(lambda: not b.router.fleet._tasks)
        b.router.fleet.set_workers([address(worker)])
        assert (await collect(waiting))[-1].finish.usage.completion_tokens == 5


async def test_a_broken_stream_of_a_worker_that_leaves_is_moved() -> None:
    leaving, staying = FakeWorker(FILES, "leaving"), FakeWorker(FILES, "staying")
    async with bench(leaving, staying, placement="round_robin") as b:
        calls = [b.stub.Generate(long(str(i), 1000)) for i in range(2)]
        await until(lambda: leaving.running and staying.running)
        b.router.fleet.set_workers([address(staying)])
        await leaving.stop()
        finishes = [(await collect(call))[-1].finish for call in calls]
        assert {(f.worker_id, f.usage.completion_tokens) for f in finishes} == {("staying", 1000)}
        assert sorted(f.attempts for f in finishes) == [1, 2]
        await until(lambda: set(b.router.fleet._tasks) == {address(staying)}, 5.0)


async def test_a_worker_is_ready_within_a_second_of_serving() -> None:
    """F6: the worker starts two seconds after the router."""
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
        begin = asyncio.get_running_loop().time()
        await until(lambda: router.registry.serving, 10.0)
        assert asyncio.get_running_loop().time() - begin < 1.0
        await worker.stop()
    await router.stop()
