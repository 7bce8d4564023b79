"""The client library: TLS, keys, traces, names of several routers, routers of other weights, and ends of streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.client import AsyncClient, AsyncStream, Client, Connection, Delta, FissileError, Stream
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb

from common.rpc.api_keys import Role, new_key
from common.rpc.auth import KeyAccess
from common.rpc.key_store import KeyStore
from common.rpc.tls import ServerTls
from router.security import RouterSecurity
from tests.certificates import Authority
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, Bench, bench, until
from tests.e2e.service import free_port
from tests.fake_dns import FakeDns

OTHER_STATE = FissileError(grpc.StatusCode.FAILED_PRECONDITION, "other weights", "OTHER_MODEL_STATE")
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")


async def of_the_thread(client: Client, name: str, **arguments: Any) -> Any:
    """What a blocking client does, on a thread of its own."""
    return await asyncio.to_thread(getattr(client, name), "say", **arguments)


async def test_tls_keys_and_traces(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    server, own = ca.issue("server", "routers.test"), ca.issue("own", "alice")
    key, kept = new_key("alice", "gold", [Role.INFER])
    security = RouterSecurity(
        tls=ServerTls(server.cert, server.key, ca.cert), access=KeyAccess(KeyStore(None, [kept.line()]))
    )
    async with bench(FakeWorker(FILES, answer=short), start=False, security=security) as b:
        await until(lambda: b.ready_workers() == 1)
        address = b.router.server.address
        shown: dict[str, Any] = {
            "tls_ca": ca.cert,
            "tls_name": "routers.test",
            "client_cert": (own.cert, own.key),
            "api_key": key,
        }
        async with AsyncClient(address, **shown) as client:
            stream = client.generate_stream("say", max_tokens=64, metadata=[TRACEPARENT])
            assert (await stream.result()).text == "hello"
            usage = stream.trailing_metadata["fissile-usage-bin"]
            assert isinstance(usage, bytes)
            assert pb.Usage.FromString(usage).prompt_tokens == 3
            assert (await client.model()).name == "m"
        with Client(address, metadata=[TRACEPARENT], **shown) as sync:
            assert (await of_the_thread(sync, "generate", max_tokens=64)).text == "hello"
        traces = [each.traceparent.split("-")[1] for each in b.workers[0].submitted]
        assert traces == [TRACE_ID] * 2
        for without, code in (("api_key", "UNAUTHENTICATED"), ("client_cert", "UNAVAILABLE")):
            left = {name: value for name, value in shown.items() if name != without}
            async with AsyncClient(address, give_up_s=0, **left) as client:
                with pytest.raises(FissileError) as caught:
                    await client.generate("say")
            assert caught.value.code.name == code


def test_option_that_needs_tls_says_so() -> None:
    given: dict[str, Any]
    for given in ({"client_cert": ("c", "k")}, {"tls_name": "routers.test"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} is given without TLS"):
            Connection(["r:1"], **given)
    assert Connection(["r:1"], tls=True, tls_name="routers.test").credentials is not None
    assert Connection(["r:1"]).credentials is None


@contextlib.asynccontextmanager
async def fleet(*digests: str, hosts: bool = False) -> AsyncIterator[list[Bench]]:
    """Routers with a worker each, of these weights; with `hosts` on one port of addresses of their own."""
    port = free_port() if hosts else 0
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for i, digest in enumerate(digests):
            worker = FakeWorker(FILES, worker_id=f"w{i}", answer=letters, step_s=0.01)
            worker.description = {"weights_digest": digest}
            host = f"127.0.0.{i + 1}" if hosts else "127.0.0.1"
            options = {"host": host, "port": port} if hosts else {}
            made.append(await stack.enter_async_context(listening(worker, **options)))
        yield made


@contextlib.asynccontextmanager
async def listening(worker: FakeWorker, **options: Any) -> AsyncIterator[Bench]:
    async with bench(worker, start=False, **options) as b:
        await until(lambda: b.ready_workers() == 1)
        yield b


async def text_while_its_router_ends(client: AsyncClient, routers: Sequence[Bench]) -> str:
    """The text of a stream whose router, one of these, ends behind its first message."""
    text, stream = "", client.generate_stream("say", max_tokens=60)
    ending = asyncio.ensure_future(stop_behind_the_first_message(stream, routers))
    try:
        async for event in stream:
            text += event.text if isinstance(event, Delta) else ""
    finally:
        await ending
    return text


async def stop_behind_the_first_message(stream: AsyncStream, routers: Sequence[Bench]) -> None:
    await until(lambda: stream.progress.prompt_info is not None)
    (serving,) = [b for b in routers if b.workers[0].running]
    await serving.router.stop()


async def test_stream_skips_router_with_other_weights() -> None:
    async with fleet("ww", "other", "ww") as routers, AsyncClient([b.router.server.address for b in routers]) as client:
        text = await text_while_its_router_ends(client, routers[:1])
        assert text == ("hijklmnpqrstuvwxyz" * 4)[: len(text)]
        assert len(text) == 60
        assert not routers[1].workers[0].submitted
        assert routers[2].workers[0].submitted


async def test_stream_ends_if_its_weights_are_gone() -> None:
    """The ended router may return, so the client asks it until the time is up."""
    async with fleet("ww", "other") as routers:
        async with AsyncClient([b.router.server.address for b in routers], give_up_s=1.0) as client:
            with pytest.raises(FissileError):
                await text_while_its_router_ends(client, routers[:1])
        assert not routers[1].workers[0].submitted


async def test_name_of_several_routers_uses_all_of_them() -> None:
    """Calls alternate among the routers, and streams of a lost router continue at another: by DNS and address list."""
    async with fleet("ww", "ww", hosts=True) as routers:
        addresses = [b.router.server.address for b in routers]
        port = routers[0].router.server.port
        with FakeDns([address.partition(":")[0] for address in addresses]) as dns:
            for name in (dns.target(port), f"ipv4:{','.join(addresses)}"):
                async with AsyncClient(name) as client:
                    before = [len(b.workers[0].submitted) for b in routers]
                    # The second address may be connected a moment after the first.
                    while not all(len(b.workers[0].submitted) > n for b, n in zip(routers, before, strict=True)):
                        await client.generate("say", max_tokens=1)
            async with AsyncClient(dns.target(port)) as client:
                text = await text_while_its_router_ends(client, routers)
                assert text == ("hijklmnpqrstuvwxyz" * 4)[:60]


def test_router_with_final_refusal_is_not_retried() -> None:
    gone = FissileError(grpc.StatusCode.UNAVAILABLE, "gone")
    retries = Retries(["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"], 10.0)
    assert retries.failed(OTHER_STATE, 0.0) == 0.0
    assert retries.target == "10.0.0.2:1"
    assert retries.failed(gone, 0.0) is not None
    assert retries.target == "10.0.0.3:1"
    assert retries.failed(gone, 0.1) is not None
    assert retries.target == "10.0.0.2:1"
    assert retries.failed(OTHER_STATE, 0.2) == 0.0
    assert retries.failed(OTHER_STATE, 0.2) is None
    assert Retries(["[::1]:1"], 10.0).failed(OTHER_STATE, 0.0) is None
    # Of a name nobody knows how many routers it has.
    named = Retries(["dns:///routers:1"], 10.0)
    asked = 1
    while named.failed(OTHER_STATE, 0.0) is not None:
        asked += 1
    assert asked == 8
    assert Retries(["dns:///routers:1"], 0.0).failed(OTHER_STATE, 0.0) is None


async def test_dropped_stream_is_cancelled() -> None:
    """The call ends at once, without the garbage collector."""
    gc.disable()
    try:
        async with bench(FakeWorker(FILES, step_s=0.01)) as b:

            def first(client: Client) -> None:
                for _ in client.generate_stream("say", max_tokens=4000):
                    break

            async def first_of(client: AsyncClient) -> None:
                async for _ in client.generate_stream("say", max_tokens=4000):
                    break

            with Client(b.router.server.address) as sync:
                await asyncio.to_thread(first, sync)
                await b.empty()
            async with AsyncClient(b.router.server.address) as client:
                await first_of(client)
                await b.empty()
    finally:
        gc.enable()


def has_called(stream: Any) -> bool:
    """True if a stream's first call has ended."""
    return stream._calls._call is not None and bool(stream._calls._call.done())


def is_cancelled(error: object) -> bool:
    return isinstance(error, FissileError) and error.code is grpc.StatusCode.CANCELLED


async def test_closing_client_wakes_streams_waiting_to_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Retries, "failed", lambda *_: 3600.0)
    nowhere = f"127.0.0.1:{free_port()}"
    sync = Client(nowhere)
    listing = asyncio.ensure_future(asyncio.to_thread(sync.models, timeout_s=7200.0))
    stream: Stream | AsyncStream = sync.generate_stream("say", timeout_s=None)
    reading = asyncio.ensure_future(asyncio.to_thread(stream.result))
    await until(lambda: has_called(stream))
    sync.close()
    errors = await asyncio.gather(reading, listing, return_exceptions=True)
    assert all(map(is_cancelled, errors)), errors
    async with AsyncClient(nowhere) as client:
        stream = client.generate_stream("say", timeout_s=None)
        reading = asyncio.ensure_future(stream.result())
        await until(lambda: has_called(stream))
        await client.close()
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        assert is_cancelled(error)


async def test_closing_client_cancels_calls_of_other_threads() -> None:
    """Each call ends as cancelled, at whatever step the client is closed."""
    async with bench(FakeWorker(FILES, step_s=0.005)) as b:
        for step in ("before", "between stub and call", "while it reads"):
            client = Client(b.router.server.address)
            stub = client.stub

            def closing(target: str, stub: Any = stub, client: Client = client, step: str = step) -> Any:
                if step == "before":
                    client.close()
                found = stub(target)
                if step == "between stub and call":
                    client.close()
                return found

            client.stub = closing  # type: ignore[method-assign]
            started = threading.Event()

            def read(client: Client = client, started: threading.Event = started) -> None:
                for _ in client.generate_stream("say", max_tokens=4000):
                    started.set()

            reading = asyncio.ensure_future(asyncio.to_thread(read))
            if step == "while it reads":
                await asyncio.to_thread(started.wait)
                await asyncio.to_thread(client.close)
            (error,) = await asyncio.gather(reading, return_exceptions=True)
            assert is_cancelled(error), (step, error)
            with pytest.raises(FissileError, match="CANCELLED"):
                await asyncio.to_thread(client.models)
        await b.empty()


async def test_many_threads_and_a_close() -> None:
    async with bench(FakeWorker(FILES, step_s=0.001)) as b:
        client = Client(b.router.server.address)
        errors: list[BaseException] = []
        begun = threading.Barrier(9)

        def run() -> None:
            begun.wait()
            try:
                while True:
                    client.generate("say", max_tokens=3)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(begun.wait)
        await until(lambda: len(b.workers[0].submitted) > 16)
        await asyncio.to_thread(client.close)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert len(errors) == 8
        assert all(map(is_cancelled, errors)), errors
        await b.empty()
