"""The bounds of a connection, as the other side sees them on the wire; and that gRPC knows our names for them."""

from __future__ import annotations

import ast
import asyncio
import re
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.limits import MAX_METADATA_BYTES, MAX_STREAMS_PER_CONNECTION
from common.rpc import server as server_module
from common.rpc.server import GrpcServer
from common.rpc.tls import ServerTls
from tests.certificates import LOOPBACK, Authority

ROOT = Path(__file__).resolve().parents[4]
SETTINGS, GOAWAY = 4, 7
MAX_CONCURRENT_STREAMS, MAX_HEADER_LIST_SIZE = 3, 6
# And empty SETTINGS: length, type, flags, stream.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])


def channel_arguments() -> Iterator[str]:
    """The names in every `("grpc.name", value)` of our sources."""
    for package in ("common", "router", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                first = node.elts[0] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else None
                if isinstance(first, ast.Constant) and re.fullmatch(r"grpc\.[a-z0-9_.]+", str(first.value)):
                    yield str(first.value)


def test_grpc_knows_the_names_of_our_channel_arguments() -> None:
    """It ignores what it does not know, so a misspelt bound would be none."""
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


async def frames(address: str) -> AsyncIterator[tuple[int, bytes]]:
    """Type and content of each HTTP/2 frame that a server sends to a client that says nothing but hello."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_HELLO)
    try:
        while header := await reader.readexactly(9):
            yield header[3], await reader.readexactly(int.from_bytes(header[:3]))
    finally:
        writer.close()


async def first(kind: int, address: str) -> bytes:
    async with asyncio.timeout(30):
        return await anext(content async for got, content in frames(address) if got == kind)


async def test_what_the_server_announces() -> None:
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


async def test_a_connection_of_age_gets_no_new_calls_and_its_streams_go_on() -> None:
    async with serving(max_connection_age_s=0.2) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await first(GOAWAY, server.address)
        await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_connection_that_does_not_begin_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    pair = Authority(tmp_path).issue("server", *LOOPBACK)
    async with serving(tls=ServerTls(pair.cert, pair.key)) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_the_health_port_speaks_plain_text_and_serves_nothing_else(tmp_path: Path) -> None:
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
