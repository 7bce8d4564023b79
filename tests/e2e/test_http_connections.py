"""Connections of the facade: TLS, certificates of callers, and clients that send or read badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from structlog.testing import capture_logs

from common.rpc.tls import ServerTls
from facade import server
from facade.http.exchange import EVENT
from facade.options import FacadeOptions
from facade.server import Facade
from router.security import RouterSecurity
from tests.certificates import LOOPBACK, Authority, Pair
from tests.e2e.http_bench import HttpBench, facade_of
from tests.e2e.router_bench import bench, until

CHAT = "/v1/chat/completions"
SAY: Any = {"model": "m", "messages": [{"role": "user", "content": "say"}], "max_tokens": 4}
LIMIT_S = 60.0


@pytest.fixture
async def served() -> AsyncIterator[HttpBench]:
    async with bench() as router, facade_of([router.router.server.address]) as http:
        yield http


@contextlib.asynccontextmanager
async def without_routers(router: str = "127.0.0.1:1", **options: Any) -> AsyncIterator[Facade]:
    """A facade that listens, for what needs no router."""
    facade = Facade(FacadeOptions([router], **{"port": 0, **options}))
    await facade.start()
    try:
        yield facade
    finally:
        await facade.stop()


async def connect(facade: Facade) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = facade.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


def context_of(ca: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca.cert)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


async def version(facade: Facade, context: ssl.SSLContext) -> int:
    async with httpx2.AsyncClient(verify=context, timeout=LIMIT_S) as client:
        return (await client.get(f"https://{facade.address}/version")).status_code


async def test_callers_need_a_certificate_of_the_clients_ca(tmp_path: Path) -> None:
    servers, clients = Authority(tmp_path, "servers"), Authority(tmp_path, "clients")
    own, alice, stranger = servers.issue("facade", *LOOPBACK), clients.issue("alice"), servers.issue("stranger")
    async with without_routers(tls=ServerTls(own.cert, own.key, clients.cert)) as facade:
        assert await version(facade, context_of(servers, alice)) == 200
        for pair in (None, stranger):
            with pytest.raises(httpx2.HTTPError):
                await version(facade, context_of(servers, pair))
        # Plain text is no request there.
        reader, writer = await connect(facade)
        writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(LIMIT_S):
                assert b"HTTP" not in await reader.read()
        writer.close()


async def test_new_certificate_and_new_ca_of_callers_count_at_the_next_handshake(tmp_path: Path) -> None:
    servers, clients = Authority(tmp_path, "servers"), Authority(tmp_path, "clients")
    others = Authority(tmp_path, "others")
    own, alice, bob = servers.issue("facade", *LOOPBACK), clients.issue("alice"), others.issue("bob")

    def serial(facade: Facade) -> int:
        host, port = facade.address.rsplit(":", 1)
        pem = ssl.get_server_certificate((host, int(port)), timeout=LIMIT_S)
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    async with (
        without_routers(tls=ServerTls(own.cert, own.key, clients.cert)) as facade,
        httpx2.AsyncClient(verify=context_of(servers, alice), timeout=LIMIT_S) as client,
    ):
        url = f"https://{facade.address}/version"
        assert (await client.get(url)).status_code == 200
        before = await asyncio.to_thread(serial, facade)
        servers.issue("facade", *LOOPBACK)
        clients.cert.write_bytes(others.cert.read_bytes())
        assert await asyncio.to_thread(serial, facade) != before
        assert await version(facade, context_of(servers, bob)) == 200
        with pytest.raises(httpx2.HTTPError):
            await version(facade, context_of(servers, alice))
        # The connection that exists goes on.
        assert (await client.get(url)).status_code == 200


async def test_log_says_why_no_router_can_be_reached(tmp_path: Path) -> None:
    servers, others = Authority(tmp_path, "servers"), Authority(tmp_path, "others")
    own = servers.issue("router", *LOOPBACK)
    connection = {"tls": True, "tls_ca": others.cert}
    async with (
        bench(security=RouterSecurity(tls=ServerTls(own.cert, own.key)), start=False) as b,
        facade_of([b.router.server.address], connection=connection, give_up_s=0.0) as http,
    ):
        with capture_logs() as lines:
            response = await http.http.post(CHAT, json=SAY)
            await until(lambda: [line for line in lines if line["event"] == EVENT])
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no router can be reached")
    (line,) = [line for line in lines if line["event"] == EVENT]
    assert "CERTIFICATE_VERIFY_FAILED" in line["why"]


async def test_plain_text_outside_loopback_is_a_warning(tmp_path: Path) -> None:
    own = Authority(tmp_path).issue("facade", *LOOPBACK)
    tls, far = ServerTls(own.cert, own.key), {"connection": {"tls": True, "tls_ca": own.cert}}
    for options, routers, said in (
        ({}, "127.0.0.1:1", []),
        ({"host": "0.0.0.0"}, "127.0.0.1:1", ["PLAIN TEXT outside loopback"]),
        ({"host": "0.0.0.0", "tls": tls}, "127.0.0.1:1", []),
        ({}, "192.0.2.1:1", ["PLAIN TEXT to routers outside loopback"]),
        (far, "192.0.2.1:1", []),
    ):
        with capture_logs() as lines:
            async with without_routers(routers, **options):
                pass
        assert [line["event"].partition(":")[0] for line in lines if line["log_level"] == "warning"] == said


async def test_handshake_that_does_not_end_closes_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.2)
    own = Authority(tmp_path).issue("facade", *LOOPBACK)
    async with without_routers(tls=ServerTls(own.cert, own.key)) as facade:
        reader, writer = await connect(facade)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"], ids=["keeps", "closes"])
async def test_client_that_reads_no_response_loses_its_connection(
    served: HttpBench, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    monkeypatch.setattr(server, "SLOW_CLIENT_TIMEOUT_S", 0.2)
    assert served.facade._server is not None
    connections: set[Any] = served.facade._server.server_state.connections
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = served.facade.address.rsplit(":", 1)
    lazy.connect((host, int(port)))
    await until(lambda: connections)
    (connection,) = connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # Its answer has two megabytes, more than the kernel takes then.
    body = json.dumps({"model": "m", "prompt": "a b " * 60_000, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n" % (more, len(body))
    await asyncio.to_thread(lazy.sendall, head + body)
    await until(lambda: connection.cycle is not None and connection.cycle.response_complete)
    await until(lambda: not connections)
    lazy.close()


async def test_many_small_chunks_are_refused_and_cost_others_nothing(served: HttpBench) -> None:
    reader, writer = await connect(served.facade)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(20):
            writer.write(b"1\r\n \r\n" * 5000)
            await writer.drain()
        async with asyncio.timeout(LIMIT_S):
            assert (await reader.readline()).split()[1] == b"400"
    writer.close()
    # A body in chunks of a usual size has no such limit, nor has one with few chunks.
    body = json.dumps(SAY | {"user": "u" * 400_000}).encode()

    async def parts(size: int, data: bytes) -> AsyncIterator[bytes]:
        for i in range(0, len(data), size):
            yield data[i : i + size]

    for size, data in ((100, body), (1, json.dumps(SAY).encode())):
        assert (await served.http.post(CHAT, content=parts(size, data))).status_code == 200


async def test_large_head_is_refused_also_in_one_piece(served: HttpBench) -> None:
    for line in (b"a:\r\n" * 60_000, b"a: " + b"b" * 250_000):
        reader, writer = await connect(served.facade)
        writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n" + line + b"\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionError):
                assert (await reader.readline()).split()[1] == b"400"
        writer.close()
    assert (await served.http.get("/version")).status_code == 200


async def test_connection_without_a_request_is_closed_before_one_that_had_some(
    served: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_HTTP_CONNECTIONS", 8)
    used = [await connect(served.facade) for _ in range(4)]
    for reader, writer in used:
        writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"}")
    silent = [await connect(served.facade) for _ in range(30)]
    async with asyncio.timeout(LIMIT_S):
        for reader, _ in silent[:20]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for reader, writer in used:
            writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"}")
    for _, writer in (*used, *silent):
        writer.close()


async def test_fewer_descriptors_mean_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "max_connections", lambda: 2)
    async with without_routers() as facade:
        assert facade._server is not None
        connections = facade._server.server_state.connections
        made = [await connect(facade) for _ in range(5)]
        async with asyncio.timeout(LIMIT_S):
            for reader, _ in made[:3]:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
        assert len(connections) == 2
        for _, writer in made:
            writer.close()
