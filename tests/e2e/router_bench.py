"""A real router on real sockets with scripted workers, for tests: requests to it, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from router.app import Router
from router.options import RouterOptions
from router.requests.stream import RequestStream
from router.workers.session import Session
from tests.e2e.fake_worker import FakeWorker
from tests.unit.router.support import small_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from fissile.v1.inference_pb2_grpc import InferenceServiceAsyncStub

TOKENIZER = small_tokenizer()
FILES = tokenizer_files()


class Bench:
    """A router, its workers, and a client."""

    def __init__(self, router: Router, workers: list[FakeWorker], channel: grpc.aio.Channel) -> None:
        self.router = router
        self.workers = workers
        self.channel = channel
        self.stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)

    async def ready(self, count: int | None = None) -> None:
        await until(lambda: self.ready_workers() == (len(self.workers) if count is None else count))

    def ready_workers(self) -> int:
        return sum(self.router.registry.ready_workers(m.name) for m in self.router.registry.models)

    def sessions(self) -> list[Session]:
        return list(self.router.pool.sessions())

    async def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)

    async def wait_health(self, status: int) -> None:
        stub = health_pb2_grpc.HealthStub(self.channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            if answer.status == status:
                return

    @contextlib.asynccontextmanager
    async def another_client(self, options: list[tuple[str, int]]) -> AsyncIterator[InferenceServiceAsyncStub]:
        async with grpc.aio.insecure_channel(self.router.server.address, options=options) as channel:
            yield InferenceServiceStub(channel)

    async def empty(self) -> None:
        """Waits until nothing is left of any request, and asserts it."""
        with contextlib.suppress(AssertionError):
            await until(lambda: not any(leftovers(self.router)))
        assert leftovers(self.router) == [0] * 8
        assert self.router.requests.in_flight == 0
        await until(lambda: not any(worker.running for worker in self.workers))


def leftovers(router: Router) -> list[int]:
    """Sizes of every table that a request could leave something in."""
    tables, dispatcher, sessions = router.requests.tables(), router.dispatcher, router.pool.sessions()
    return [
        tables["streams"],
        tables["sequences"],
        len(dispatcher),
        sum(len(lane) + lane.bound_tokens for lane in dispatcher.lanes),
        sum(len(session.state.live) for session in sessions),
        sum(len(session.state._groups) + len(session.state._cancels) for session in sessions),
        router.service.in_flight,
        len(router._encoder),
    ]


def running(router: Router) -> list[RequestStream]:
    """The requests that workers have."""
    return [cast("RequestStream", each) for session in router.pool.sessions() for each in session.state.live.values()]


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not condition():
        assert loop.time() < end, "condition not reached"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def bench(*workers: FakeWorker, start: bool = True, **options: Any) -> AsyncIterator[Bench]:
    fleet = list(workers or [FakeWorker(FILES)])
    addresses = [await worker.start() for worker in fleet]
    router = Router(RouterOptions(workers=addresses, **{"port": 0, **options}))
    await router.start()
    channel = grpc.aio.insecure_channel(router.server.address, options=[("grpc.enable_retries", 0)])
    made = Bench(router, fleet, channel)
    try:
        if start:
            await made.ready()
        yield made
    finally:
        await channel.close()
        await router.stop()
        for worker in fleet:
            await worker.stop()


def request(text: str = "say", **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**{"max_tokens": 5, **fields.pop("params", {})})
    made = pb.GenerateRequest(text=text, sampling_params=params, **fields)
    made.output_options.return_token_ids = True
    return made


async def collect(call: Any) -> list[Any]:
    """All messages; `read` because a call cannot mix it with `async for`."""
    parts = []
    while (part := await call.read()) is not grpc.aio.EOF:
        parts.append(part)
    return parts


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    try:
        async with asyncio.timeout(60):
            result = await (collect(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"the call succeeded: {result}")


async def miss_deadline(start: Callable[[float], Any], has_arrived: Callable[[], object]) -> float:
    """Starts calls until the deadline of one passes after `has_arrived`. Returns its timeout in seconds.

    On a busy machine a short deadline passes before the router has accepted the call: then it gets a longer one.
    """
    for timeout_s in (1.0, 5.0, 25.0):
        missed, arrived = asyncio.ensure_future(error_of(start(timeout_s))), False
        while not missed.done():
            arrived = arrived or bool(has_arrived())
            await asyncio.sleep(0.005)
        assert (await missed).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if arrived:
            return timeout_s
    raise AssertionError("no call arrived before its deadline")


def detail(error: grpc.aio.AioRpcError, kind: type[Message]) -> Any:
    status = rpc_status.from_call(error)
    found = kind()
    assert any(packed.Unpack(found) for packed in status.details), status
    return found


# A reader with a small window: otherwise gRPC itself takes megabytes before the router's write blocks.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]


def details_of(error: grpc.aio.AioRpcError) -> set[str]:
    status = rpc_status.from_call(error)
    return set() if status is None else {packed.TypeName().rpartition(".")[2] for packed in status.details}


def router_process(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "router", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FISSILE_LOG_FORMAT": "json", **(environment or {})},
    )


@contextlib.asynccontextmanager
async def draining_process() -> AsyncIterator[tuple[subprocess.Popen[str], grpc.aio.Channel]]:
    """A router that serves, as a process, and a channel to it; behind it the process must end with 0."""
    worker = FakeWorker(FILES)
    process = router_process("--worker", await worker.start(), "--port", "0", "--drain-timeout", "60s")
    try:
        address = await asyncio.to_thread(listening_address, process)
        async with grpc.aio.insecure_channel(address) as channel:
            await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
            yield process, channel
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        await worker.stop()


async def until_health(channel: grpc.aio.Channel, status: int) -> None:
    """Waits until a process says this of its health."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    while (await watch.read()).status != status:
        pass
    watch.cancel()


async def heeds(process: subprocess.Popen[str], channel: grpc.aio.Channel, number: signal.Signals) -> None:
    """Sends a signal, and waits until the process drains: two that it has not heeded yet would be one."""
    process.send_signal(number)
    await until_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING)


def log_of(process: subprocess.Popen[str]) -> str:
    """What a process that has ended has written since it listened."""
    assert process.stderr is not None
    with process.stderr as log:
        return log.read()


def listening_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "router listening":
            return str(event["address"])
    raise AssertionError("the router does not listen")
