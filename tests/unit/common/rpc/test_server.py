"""A real server and real clients on loopback."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from fissile.worker.v1 import worker_pb2, worker_pb2_grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from common.errors import ApiError, NoWorkerError, UnknownModelError
from common.rpc.errors import abort
from common.rpc.server import GrpcServer, PortTakenError

SERVICE = "fissile.worker.v1.WorkerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """Fails with `error`; Generate goes on until it is released."""

    def __init__(self, error: ApiError) -> None:
        self.error = error
        self.release = asyncio.Event()
        self.running = asyncio.Event()
        self.before_end: Callable[[], None] = lambda: None

    async def GetWorker(self, request: Any, context: Any) -> Any:
        await abort(context, self.error, (("traceresponse", "00-1-2-01"),))

    async def Generate(self, request: Any, context: Any) -> Any:
        self.running.set()
        await self.release.wait()
        yield worker_pb2.GenerateResponse(token_ids=[7])

    async def Session(self, requests: Any, context: Any) -> Any:
        async for _ in requests:
            yield worker_pb2.SessionResponse()
        self.before_end()


class Site:
    """A server with a channel to it."""

    def __init__(self, error: ApiError) -> None:
        # Of the other methods the base class says that they are not implemented.
        self.servicer = Servicer(error)  # type: ignore[abstract]
        self.rpc = GrpcServer("127.0.0.1", 0, [SERVICE])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.rpc.server)

    async def start(self) -> None:
        await self.rpc.start()
        self.channel = grpc.aio.insecure_channel(self.rpc.address)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def status(self, name: str) -> int:
        return int((await self.health.Check(health_pb2.HealthCheckRequest(service=name))).status)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site(NoWorkerError("no worker serves", retry_after_s=0.5))
    await made.start()
    yield made
    await made.channel.close()
    await made.rpc.stop(0)


async def test_health_names(site: Site) -> None:
    names = ("", "readiness", SERVICE)
    assert [await site.status(name) for name in names] == [NOT_SERVING] * 3
    assert await site.status("liveness") == SERVING
    await site.rpc.set_serving(True)
    assert [await site.status(name) for name in (*names, "liveness")] == [SERVING] * 4
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await site.status("nobody")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(site: Site) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(site.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    found = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= found


async def test_abort_sends_details_and_trailing_metadata(site: Site) -> None:
    call = site.worker.GetWorker(worker_pb2.GetWorkerRequest())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "no worker serves"
    assert ("traceresponse", "00-1-2-01") in tuple(await call.trailing_metadata())
    status = await rpc_status.aio.from_call(call)
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert json_format.MessageToDict(retry)["retryDelay"] == "0.500s"


@pytest.mark.parametrize("name", ["m" * 100_000, "é\n" * 50_000, "\ud800" * 9])
async def test_a_huge_text_in_an_error_keeps_the_status(site: Site, name: str) -> None:
    site.servicer.error = UnknownModelError(name, [name, name])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await site.worker.GetWorker(worker_pb2.GetWorkerRequest())
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_taken_port_is_one_line(site: Site) -> None:
    other = GrpcServer("127.0.0.1", site.rpc.port, [])
    with pytest.raises(PortTakenError, match=rf"^port {site.rpc.port} on 127.0.0.1 is in use: .*--port.*$"):
        await other.start()


@pytest.mark.parametrize(
    ("host", "problem"), [("no-such-host.invalid", "is unknown"), ("192.0.2.1", "no address of this machine")]
)
async def test_a_bad_host_is_one_line(host: str, problem: str) -> None:
    with pytest.raises(PortTakenError, match=f"^.*{problem}: change --host$"):
        await GrpcServer(host, 0, []).start()


async def test_pings_on_a_quiet_stream_are_allowed(site: Site) -> None:
    # The default server closes this connection with "Too many pings" after two strikes.
    options = [("grpc.keepalive_time_ms", 100), ("grpc.http2.max_pings_without_data", 0)]
    async with grpc.aio.insecure_channel(site.rpc.address, options=options) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Generate(worker_pb2.GenerateRequest())
        await asyncio.wait_for(site.servicer.running.wait(), 5)
        await asyncio.sleep(1.0)
        site.servicer.release.set()
        assert [list(answer.token_ids) async for answer in call] == [[7]]


async def test_drain_lets_running_calls_finish_and_does_not_wait_for_watchers(site: Site) -> None:
    await site.rpc.set_serving(True)
    watch = site.health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    call = site.worker.Generate(worker_pb2.GenerateRequest())
    await asyncio.wait_for(site.servicer.running.wait(), 5)
    started = time.monotonic()
    draining = asyncio.create_task(site.rpc.drain(0.2, 20.0))
    assert (await watch.read()).status == NOT_SERVING
    # Until the news has spread, new calls are still taken.
    assert await site.status("") == NOT_SERVING
    await asyncio.sleep(0.3)
    site.servicer.release.set()
    assert [list(answer.token_ids) async for answer in call] == [[7]]
    await draining
    assert time.monotonic() - started < 10


async def test_a_call_that_ended_before_its_answer_leaves_no_traceback(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC ends a call with bad compression itself. When its handler ends at that moment, the status can not be sent,
    and gRPC logs that; the moment can not be had at will (8 of 1,000 under load), so the same is logged here.
    """
    try:
        raise grpc.aio.InternalError("Failed execute_batch")
    except grpc.aio.InternalError:
        logging.getLogger("grpc._cython.cygrpc").exception("ExecuteBatchError raised in core by servicer method [x]")
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_handler_that_fails_leaves_a_traceback(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """What is our mistake is still logged."""

    def fail() -> None:
        raise RuntimeError("a mistake")

    site.servicer.before_end = fail
    with pytest.raises(grpc.aio.AioRpcError):
        await site.worker.Session(iter([])).read()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]
