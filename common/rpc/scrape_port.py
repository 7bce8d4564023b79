"""The port for scrapers: `GET /metrics` and `GET /health` over HTTP/1.1, on a thread and an event loop of its own.

It never holds up the service's event loop, and its callers take bounded memory: MAX_SCRAPE_CONNECTIONS connections,
MAX_SCRAPE_REQUEST_BYTES of a request, one answer at a time on each connection. Metrics are read at most once in
SCRAPE_EVERY_S; scrapes in between get the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import structlog

from common.limits import (
    MAX_SCRAPE_CONNECTIONS,
    MAX_SCRAPE_REQUEST_BYTES,
    SCRAPE_EVERY_S,
    SCRAPE_IDLE_S,
    SCRAPE_TIMEOUT_S,
)
from common.rpc.server import GrpcServer, bound_socket
from common.rpc.tls import ServerTls, is_loopback
from common.telemetry.prometheus import (
    OPENMETRICS_TYPE,
    TEXT_TYPE,
    Family,
    SeriesTable,
    openmetrics_text,
    prometheus_text,
)

log = structlog.get_logger(__name__)

_PLAIN: Final = "text/plain; charset=utf-8"
_END: Final = b"\r\n\r\n"
_REQUEST_LINE: Final = re.compile(rb"([A-Z]+) ([!-~]+) HTTP/(\d)\.(\d)")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
# Pause before the next accept when the process has no descriptor left.
_NO_DESCRIPTOR_S: Final = 0.1


class ScrapeTexts:
    """Texts of a table's metrics, made at most once in SCRAPE_EVERY_S for each format.

    Args:
        table: the metrics.
        clock: monotonic seconds.
    """

    def __init__(self, table: SeriesTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._read_at = float("-inf")
        self._families: list[Family] = []
        self._texts: dict[bool, bytes] = {}

    def text(self, *, is_openmetrics: bool) -> bytes:
        """The newest text in one format."""
        now = self._clock()
        if now - self._read_at >= SCRAPE_EVERY_S:
            self._read_at, self._families, self._texts = now, self._table.collect(), {}
        if is_openmetrics not in self._texts:
            write = openmetrics_text if is_openmetrics else prometheus_text
            self._texts[is_openmetrics] = write(self._families)
        return self._texts[is_openmetrics]


class BadHttpError(Exception):
    """A request that is not answered; after its status the connection is closed."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class HttpRequest:
    """The head of one request.

    Args:
        head: request line and headers, without the empty line at the end.

    Attributes:
        method: GET, HEAD or another.
        path: without the query.
        accept: the header, or "".
        keeps_alive: True if the client may send another request on the connection.

    Raises:
        BadHttpError: it is malformed, of another version, or has a body.
    """

    def __init__(self, head: bytes) -> None:
        first, *rest = head.split(b"\r\n")
        line = _REQUEST_LINE.fullmatch(first)
        if line is None:
            raise BadHttpError(400, "not a request of HTTP/1.1")
        if line[3] != b"1":
            raise BadHttpError(505, "only HTTP/1.1 is served")
        headers: dict[str, str] = {}
        for each in rest:
            header = _HEADER.fullmatch(each)
            if header is None:
                raise BadHttpError(400, "malformed header")
            name, value = header[1].decode().lower(), header[2].decode("latin-1").strip()
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            raise BadHttpError(413, "a request here has no body")
        self.method = line[1].decode()
        self.path = line[2].decode().partition("?")[0]
        self.accept = headers.get("accept", "")
        connection = headers.get("connection", "").lower()
        self.keeps_alive = "close" not in connection if line[4] != b"0" else "keep-alive" in connection


def prefers_openmetrics(accept: str) -> bool:
    """True if a header `Accept` prefers OpenMetrics 1.0 to Prometheus' text format; equal weights do."""
    weights = {"openmetrics": 0.0, "text": 0.0}
    for each in accept.lower().split(","):
        media, *parameters = (part.strip() for part in each.split(";"))
        named = dict(part.split("=", 1) for part in parameters if "=" in part)
        try:
            weight = float(named.get("q", "1"))
        except ValueError:
            continue
        if media == "application/openmetrics-text" and named.get("version", "1.0.0") in ("1.0.0", "0.0.1"):
            weights["openmetrics"] = max(weights["openmetrics"], weight)
        elif media in ("text/plain", "text/*", "*/*"):
            weights["text"] = max(weights["text"], weight)
    return weights["openmetrics"] > 0 and weights["openmetrics"] >= weights["text"]


class ScrapePort:
    """Serves a table of metrics over HTTP.

    Args:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        table: the metrics.
        is_serving: returns whether `/health` says so; called on the port's thread.
        tls: certificate; None serves plain text.

    Attributes:
        port: the bound port; 0 before `start`.
    """

    def __init__(
        self, host: str, port: int, table: SeriesTable, is_serving: Callable[[], bool], tls: ServerTls | None = None
    ) -> None:
        self.port = 0
        self._host, self._wanted_port = host, port
        self._texts = ScrapeTexts(table)
        self._is_serving = is_serving
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        # The connection that has been quiet for longest is first.
        self._connections: dict[asyncio.Task[None], None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listens, and starts the thread.

        Raises:
            PortTakenError: the address is in use or is not one of this machine.
            TlsError: the certificate cannot be used.
        """
        self._context = None if self._tls is None else self._tls.ssl_context()
        listener = bound_socket(self._host, self._wanted_port, "--metrics-port")
        self.port = listener.getsockname()[1]
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready.set)), name="metrics-port", daemon=True
        )
        self._thread.start()
        ready.wait()
        log.info("metrics listening", address=f"{self._host}:{self.port}", tls=self._tls is not None)
        if self._tls is None and not is_loopback(self._host):
            log.info("metrics are readable for all who reach this port", address=f"{self._host}:{self.port}")

    def stop(self) -> None:
        """Closes the port and its connections. May be called twice, and without a start."""
        loop, accepting, thread = self._loop, self._accepting, self._thread
        if loop is None or accepting is None or thread is None:
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(accepting.cancel)
        thread.join(SCRAPE_TIMEOUT_S)

    async def _serve(self, listener: socket.socket, ready: Callable[[], object]) -> None:
        self._loop, self._accepting = asyncio.get_running_loop(), asyncio.current_task()
        ready()
        with listener, contextlib.suppress(asyncio.CancelledError):
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(listener)
                except OSError:
                    await asyncio.sleep(_NO_DESCRIPTOR_S)
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        if len(self._connections) >= MAX_SCRAPE_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._converse(connection))
        self._connections[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection of the metrics port failed", why=repr(error))

    async def _converse(self, connection: socket.socket) -> None:
        """Answers the requests of one connection, one after the other."""
        reader = asyncio.StreamReader(MAX_SCRAPE_REQUEST_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        try:
            transport = await self._connect(connection, protocol)
            writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
            # An answer is complete when the kernel has all of it. A limit of 0 pauses TLS for ever.
            transport.set_write_buffer_limits(high=1, low=0)
            while await self._answer_next(reader, writer):
                pass
            # With TLS the last answer may still be in a buffer, and the client waits for TLS to end.
            writer.close()
            await writer.wait_closed()
        except (OSError, TimeoutError, EOFError):
            # The client ended, broke TLS, or does not read.
            pass
        finally:
            # A connection whose TLS does not begin closes by itself.
            if transport is not None:
                transport.abort()

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        timeout_s = None if self._context is None else SCRAPE_TIMEOUT_S
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._context,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=timeout_s,
        )
        return transport

    async def _answer_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers the next request. Returns True if another may follow."""
        request = None
        try:
            request = HttpRequest(await _next_head(reader))
            status, kind, body = self._answer(request)
        except BadHttpError as error:
            status, kind, body = error.status, _PLAIN, f"{error}\n".encode()
        task = asyncio.current_task()
        if task in self._connections:
            # The latest one is last.
            self._connections[task] = self._connections.pop(task)
        keeps = request is not None and request.keeps_alive
        allow = "Allow: GET, HEAD\r\n" if status == 405 else ""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"{allow}Connection: {'keep-alive' if keeps else 'close'}\r\n\r\n"
        ).encode()
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            writer.write(head if request is not None and request.method == "HEAD" else head + body)
            await writer.drain()
            if not keeps:
                await _end(reader, writer)
        return keeps

    def _answer(self, request: HttpRequest) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        if request.path not in ("/metrics", "/health"):
            return 404, _PLAIN, b"there are /metrics and /health\n"
        if request.method not in ("GET", "HEAD"):
            return 405, _PLAIN, b"use GET\n"
        if request.path == "/health":
            serves = self._is_serving()
            return (200, _PLAIN, b"SERVING\n") if serves else (503, _PLAIN, b"NOT_SERVING\n")
        is_openmetrics = prefers_openmetrics(request.accept)
        kind = OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE
        return 200, kind, self._texts.text(is_openmetrics=is_openmetrics)


def scrape_port(
    host: str, port: int | None, table: SeriesTable | None, server: GrpcServer, tls: ServerTls | None
) -> ScrapePort | None:
    """Makes the port for the metrics of a process with a gRPC server; None if the port or the table is None."""
    if port is None or table is None:
        return None
    return ScrapePort(host, port, table, lambda: server.is_serving, tls)


async def _next_head(reader: asyncio.StreamReader) -> bytes:
    """Reads the head of the next request.

    Raises:
        BadHttpError: it is too long, or its end does not arrive in time.
        TimeoutError: no request began.
        EOFError: the client ended.
    """
    async with asyncio.timeout(SCRAPE_IDLE_S):
        first = await reader.readexactly(1)
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S):
            return first + (await reader.readuntil(_END)).removesuffix(_END)
    except asyncio.LimitOverrunError:
        raise BadHttpError(431, f"a request has at most {MAX_SCRAPE_REQUEST_BYTES} bytes") from None
    except TimeoutError:
        raise BadHttpError(408, f"a request arrives within {SCRAPE_TIMEOUT_S:g} s") from None


async def _end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Ends the answers, and waits until the client ends too: a reset would destroy what it has not read."""
    if writer.can_write_eof():
        writer.write_eof()
        while await reader.read(MAX_SCRAPE_REQUEST_BYTES):
            pass
