"""Connection bounds as a client sees them on the wire, and gRPC's names for our channel arguments."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import hpack
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import ApiError, RequestTimeoutError, UnauthenticatedError
from common.limits import MAX_METADATA_BYTES, MAX_STREAMS_PER_CONNECTION, MAX_UNFREED_STREAMS_PER_CONNECTION
from common.rpc import request_reader
from common.rpc import server as server_module
from common.rpc.auth import AuthContext, Caller, Metadata
from common.rpc.server import GrpcServer
from common.rpc.tls import ServerTls
from tests.certificates import LOOPBACK, Authority

ROOT = Path(__file__).resolve().parents[4]
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 1, 3, 4, 6, 7, 9
CANCEL, REFUSED_STREAM = bytes([0, 0, 0, 8]), bytes([0, 0, 0, 7])
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MAX_CONCURRENT_STREAMS, MAX_HEADER_LIST_SIZE = 3, 6
# The preface and empty SETTINGS: length, type, flags, stream.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])


def channel_arguments() -> Iterator[str]:
    """The names in every `("grpc.name", value)` of our sources."""
    for package in ("common", "router", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                first = node.elts[0] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else None
                if isinstance(first, ast.Constant) and re.fullmatch(r"grpc\.[a-z0-9_.]+", str(first.value)):
                    yield str(first.value)


@pytest.mark.slow
def test_grpc_knows_the_names_of_our_channel_arguments() -> None:
    """gRPC ignores unknown names, so a misspelled bound would have no effect."""
    names = set(channel_arguments())
    assert {"grpc.max_metadata_size", "grpc.max_connection_age_ms", "grpc.enable_http_proxy"} <= names
    library = Path(cygrpc.__file__).read_bytes()
    assert {name for name in names | {"grpc.no_such_argument"} if name.encode() + b"\0" not in library} == {
        "grpc.no_such_argument"
    }


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, [], **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def frames(address: str, more: bytes = b"") -> AsyncIterator[tuple[int, bytes]]:
    """Type and content of each HTTP/2 frame that a server sends to a client that sends the preface and `more`."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_HELLO + more)
    try:
        while header := await reader.readexactly(9):
            yield header[3], await reader.readexactly(int.from_bytes(header[:3]))
    finally:
        writer.close()


async def first(kind: int, address: str) -> bytes:
    async with asyncio.timeout(60):
        return await anext(content async for got, content in frames(address) if got == kind)


async def test_server_announces_http2_limits() -> None:
    async with serving() as server:
        content = await first(SETTINGS, server.address)
    settings = dict(struct.iter_unpack(">HI", content))
    assert settings[MAX_CONCURRENT_STREAMS] == MAX_STREAMS_PER_CONNECTION
    assert settings[MAX_HEADER_LIST_SIZE] == MAX_METADATA_BYTES


@pytest.mark.parametrize(
    ("size", "code"), [(MAX_METADATA_BYTES - 1024, "OK"), (MAX_METADATA_BYTES, "RESOURCE_EXHAUSTED")]
)
async def test_metadata_has_a_bound(size: int, code: str) -> None:
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(health_pb2.HealthCheckRequest(service="liveness"), metadata=[("x", "v" * size)])
        assert (await call.code()).name == code


async def test_aged_connection_keeps_streams_and_gets_no_new_calls() -> None:
    async with serving(max_connection_age_s=0.2) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await first(GOAWAY, server.address)
        await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_connection_without_handshake_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    pair = Authority(tmp_path).issue("server", *LOOPBACK)
    async with serving(tls=ServerTls(pair.cert, pair.key)) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_health_port_is_plain_text_and_serves_only_health(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", *LOOPBACK)
    async with (
        serving(tls=ServerTls(pair.cert, pair.key), health_port=0) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for serving_now in (True, False):
            await server.set_serving(serving_now)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))
            assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is serving_now
        other: Any = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
async def test_compressed_requests_are_refused_on_every_port(size: int) -> None:
    """Regression: 15 KB decompressed to 15 MB and blocked the event loop."""
    async with serving(health_port=0) as server:
        for port in (server.port, server.health_port):
            target = f"127.0.0.1:{port}"
            async with grpc.aio.insecure_channel(target, compression=grpc.Compression.Gzip) as channel:
                asked = health_pb2.HealthCheckRequest(service="x" * size)
                call = health_pb2_grpc.HealthStub(channel).Check(asked)
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "'gzip' is disabled" in await call.details()


async def test_health_watches_beyond_the_limit_end_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a client without a key kept 4,096 watches open on each connection."""
    monkeypatch.setattr(server_module, "MAX_HEALTH_WATCHES", 2)
    async with (
        asyncio.timeout(60),
        serving(health_port=0) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(3):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest()))
            await watches[-1].read()
        assert await watches[0].code() is grpc.StatusCode.UNAVAILABLE
        await server.set_serving(True)
        for watch in watches[1:]:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_health_refuses_unknown_service_names(method: str) -> None:
    """Regression: a watch kept its service name, which could have 16 MiB."""
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        call = getattr(health_pb2_grpc.HealthStub(channel), method)(health_pb2.HealthCheckRequest(service="x" * 300))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "service has 300 characters; at most 256 are valid"


@pytest.mark.slow
async def test_reflection_stream_without_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: such a stream stayed open until its client ended it."""
    monkeypatch.setattr(request_reader, "REQUEST_READ_TIMEOUT_S", 0.2)
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(60):
        call: Any = channel.stream_stream(REFLECTION)()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class Nobody:
    """Refuses every caller and counts them."""

    def __init__(self) -> None:
        self.asked = 0

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        self.asked += 1
        raise UnauthenticatedError("API_KEY_MISSING", "no")


async def without_settings_ack(address: str, headers: list[tuple[str, str]]) -> dict[str, str]:
    """The trailers of a call by a client that never acknowledges the server's SETTINGS."""
    host, _, port = address.rpartition(":")
    fixed = {":method": "POST", ":scheme": "http", ":path": REFLECTION, ":authority": "test"}
    fixed |= {"content-type": "application/grpc", "te": "trailers"}
    block = hpack.Encoder().encode([*fixed.items(), *headers], huffman=False)
    pieces = [block[start : start + 16_384] for start in range(0, len(block), 16_384)]
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_HELLO)
    for i, piece in enumerate(pieces):
        # END_HEADERS flag on the last piece.
        flags = 4 if i == len(pieces) - 1 else 0
        kind = CONTINUATION if i else HEADERS
        writer.write(len(piece).to_bytes(3) + bytes([kind, flags, 0, 0, 0, 1]) + piece)
    decoder = hpack.Decoder()
    try:
        async with asyncio.timeout(60):
            while header := await reader.readexactly(9):
                content = await reader.readexactly(int.from_bytes(header[:3]))
                if header[3] == HEADERS:
                    found = {str(name): str(value) for name, value in decoder.decode(content, raw=False)}
                    if "grpc-status" in found:
                        return found
    finally:
        writer.close()
    raise AssertionError("no status")


@pytest.mark.parametrize(
    "headers",
    [[("x", "v" * 20_000)], [("x", "v" * 2_000_000)], [(f"x{i}", "v") for i in range(10_000)]],
    ids=["20 kB", "2 MB", "10,000 entries"],
)
async def test_metadata_bound_holds_without_settings_ack(headers: list[tuple[str, str]]) -> None:
    """gRPC enforces the bound only for clients that acknowledge its SETTINGS."""
    access = Nobody()
    async with serving(access=access) as server:
        trailers = await without_settings_ack(server.address, headers)
        assert trailers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        # gRPC may refuse first: its text includes the metadata, and is dropped if the trailers cannot hold it.
        assert "metadata" in trailers.get("grpc-message", "metadata")
        assert access.asked == 0
        trailers = await without_settings_ack(server.address, [("x", "v" * 1000)])
        assert trailers["grpc-status"] == str(grpc.StatusCode.UNAUTHENTICATED.value[0])


def reset_calls(address: str, count: int, refused: int) -> None:
    """Begins `count` calls, resets each at once, and acknowledges as HTTP/2 requires, until `refused` calls were
    refused.

    Raises:
        TimeoutError: fewer calls were refused.
    """
    fixed = {":method": "POST", ":scheme": "http", ":path": REFLECTION, ":authority": "test"}
    fixed |= {"content-type": "application/grpc", "te": "trailers"}
    block = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fixed.items()])
    begin, reset = len(block).to_bytes(3) + bytes([HEADERS, 4]), bytes([0, 0, 4, RST_STREAM, 0])
    streams = [(2 * i + 1).to_bytes(4) for i in range(count)]
    calls = b"".join(begin + stream + block + reset + stream + CANCEL for stream in streams)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rb") as answers:
        connection.sendall(_HELLO)
        while refused and (header := answers.read(9)):
            kind, is_ack, content = header[3], header[4] & 1, answers.read(int.from_bytes(header[:3]))
            refused -= kind == RST_STREAM and content == REFUSED_STREAM
            if kind == PING and not is_ack:
                connection.sendall(bytes([0, 0, 8, PING, 1, 0, 0, 0, 0]) + content)
            elif kind == SETTINGS and not is_ack:
                connection.sendall(bytes([0, 0, 0, SETTINGS, 1, 0, 0, 0, 0]) + calls)
                calls = b""


@pytest.mark.slow
async def test_reset_calls_do_not_accumulate() -> None:
    """gRPC keeps a reset call until the event loop accepts it. Without a bound, 100,000 calls of one connection took
    1.1 GiB."""
    taken = MAX_STREAMS_PER_CONNECTION + MAX_UNFREED_STREAMS_PER_CONNECTION + 1
    async with serving() as server:
        # The event loop is blocked meanwhile, so it accepts none.
        reset_calls(server.address, taken + 3000, 3000)


async def test_call_without_message_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it stayed open for ever."""
    monkeypatch.setattr(request_reader, "REQUEST_READ_TIMEOUT_S", 0.2)
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        call: Any = channel.stream_stream("/grpc.health.v1.Health/Check")()
        async with asyncio.timeout(60):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.2 s" in await call.details()


class SilentContext:
    """A call whose message arrives when the test provides it."""

    def __init__(self) -> None:
        self.given: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        return await self.given


async def test_one_timer_ends_all_overdue_reads() -> None:
    """Regression: the read bound cost a timer per call."""
    reads, answered = request_reader.MessageReads(timeout_s=0.1), SilentContext()
    task = asyncio.create_task(reads.wait(answered.read()))
    await asyncio.sleep(0)
    answered.given.set_result(b"message")
    assert await task == b"message"
    for _ in range(2):
        late = [asyncio.create_task(reads.wait(SilentContext().read())) for _ in range(3)]
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*late, return_exceptions=True)
        assert [type(end) for end in ends] == [RequestTimeoutError] * 3
    assert not reads._ends


async def test_calls_without_message_beyond_limit_end_oldest() -> None:
    """Regression: each connection could keep 4,096 calls waiting for their message."""
    reads, contexts = request_reader.MessageReads(2), [SilentContext() for _ in range(4)]
    tasks = []
    for context in contexts:
        tasks.append(asyncio.create_task(reads.wait(context.read())))
        await asyncio.sleep(0)
    for context in contexts[2:]:
        context.given.set_result(b"message")
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert ends[2:] == [b"message"] * 2
    assert [end.code for end in ends[:2] if isinstance(end, ApiError)] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
    assert not reads._ends


@pytest.mark.parametrize("more", [b"", bytes([0, 0, 9, HEADERS, 0, 0, 0, 0, 1]), bytes([0, 0])])
async def test_connection_without_calls_is_closed(more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: idle connections, and those with half a HEADERS frame, kept all descriptors of a process for ever."""
    monkeypatch.setattr(server_module, "CONNECTION_IDLE_S", 0.2)
    async with serving() as server, asyncio.timeout(60):
        with pytest.raises(asyncio.IncompleteReadError):
            async for _ in frames(server.address, more):
                pass


def test_descriptor_soft_limit_is_raised_and_few_are_warned() -> None:
    """A usual soft limit is 1,024 and the hard limit a million."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1000))\n"
        "from common.telemetry.logs import setup_logging; setup_logging()\n"
        "from common.rpc.descriptors import *\n"
        "print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0], max_connections())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "1000", "872"]
    assert "few file descriptors: at most 872 connections" in done.stderr


@pytest.mark.long
async def test_calls_waiting_for_blocked_loop_are_answered() -> None:
    """Regression: gRPC ended calls that the loop did not accept within 30 s with a bare CANCELLED."""
    async with serving() as server:
        address = server.address

        def codes() -> set[str]:
            with grpc.insecure_channel(address) as channel:
                check: Any = health_pb2_grpc.HealthStub(channel).Check
                request = health_pb2.HealthCheckRequest(service="liveness")
                return {call.code().name for call in [check.future(request, timeout=120) for _ in range(100)]}

        called = asyncio.create_task(asyncio.to_thread(codes))
        await asyncio.sleep(0)
        time.sleep(33)  # noqa: ASYNC251  # what a stall of the loop is
        assert await called == {"OK"}
