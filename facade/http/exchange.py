"""One HTTP request and its response on ASGI: headers in, body in, status and bytes out, and the line in the log.

Invariants: every exchange ends with one response or a closed connection, and writes one log line. No text of prompts
or answers is logged.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

import grpc
import msgspec
import structlog
from fissile.client.connections import sendable
from fissile.client.messages import REQUEST_START, started
from starlette.types import Message, Receive, Scope, Send

from common.errors import ApiError, InvalidFieldError
from common.limits import MAX_METADATA_BYTES, SLOW_CLIENT_TIMEOUT_S
from common.rpc.interceptors import metadata_bytes
from common.telemetry import names
from common.telemetry.request_record import shown
from common.telemetry.trace_context import trace_id_of, traceparent_of
from facade.http.errors import HttpError
from facade.http.uploads import ClientGoneError, UploadTable

log = structlog.get_logger(__name__)

T = TypeVar("T")
EVENT: Final = "request ended"
# Milliseconds that the caller waits for the whole answer: our own name, and the one that Envoy sets.
TIMEOUT_HEADERS: Final = ("x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms")
REQUEST_ID_HEADER: Final = "x-request-id"
_SHORTEST_MS: Final = 1
_LONGEST_MS: Final = 24 * 3600 * 1000
# Headers that the router gets as metadata. An API key of Anthropic's clients is a bearer key there.
_PASSED_ON: Final = ("authorization", names.TRACEPARENT, names.TRACESTATE, "x-fissile-tenant")
# When a caller or its proxy sent a request: Unix time in seconds, milliseconds or microseconds.
_START: Final = re.compile(r"(t=)?\d{1,20}(\.\d{1,9})?")
_JSON: Final = (b"content-type", b"application/json")
_encode: Final = msgspec.json.Encoder().encode


class ClientConnection(Protocol):
    """The connection of an exchange, as the server keeps it in the ASGI state."""

    @property
    def is_paused(self) -> bool:
        """True if a send waits until the client has read."""
        ...

    def abort(self) -> None:
        """Closes the connection without sending what is left."""
        ...


class Exchange:
    """A request and its response.

    Args:
        scope: of ASGI, with `receive` and `send`.
        uploads: bodies of all requests while they arrive.
        timeout_s: deadline of requests that name none.

    Attributes:
        headers: of the request, names in lower case; of a repeated one the first.
        status: that was sent; 0 before.
        facts: for the log line.
        is_probe: True if a success is logged at debug: a probe that repeats all day.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, uploads: UploadTable, timeout_s: float) -> None:
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        self.status = 0
        self.facts: dict[str, Any] = {}
        self.is_probe = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._uploads = uploads
        self._default_timeout_s = timeout_s
        self._began, self._began_unix = time.monotonic(), time.time()
        given = self.headers.get(REQUEST_ID_HEADER, "")
        self.http_request_id = given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex

    @property
    def path(self) -> str:
        """The path, as the client wrote it."""
        return str(self._scope["path"])

    @property
    def method(self) -> str:
        """The method, as the client wrote it."""
        return str(self._scope["method"])

    @property
    def timeout_s(self) -> float:
        """Seconds that the caller waits for the whole answer.

        Raises:
            InvalidFieldError: the header is not a number of milliseconds.
        """
        name = next((name for name in TIMEOUT_HEADERS if name in self.headers), None)
        if name is None:
            return self._default_timeout_s
        value = self.headers[name]
        if not re.fullmatch(r"\d{1,8}", value) or not _SHORTEST_MS <= int(value) <= _LONGEST_MS:
            raise InvalidFieldError(name, f"is {shown(value, 32)!r}", f"milliseconds, 1 to {_LONGEST_MS}")
        return int(value) / 1000

    def metadata(self, default_key: str = "") -> tuple[tuple[str, str], ...]:
        """Metadata for the router from the headers: key, trace, tenant, and when the request was sent.

        Without a time of the caller or its proxy, that is when the head of the request arrived.

        Args:
            default_key: API key of callers that send none.

        Raises:
            InvalidFieldError: a header cannot be sent on.
        """
        found = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
        if "authorization" not in found and (key := self.headers.get("x-api-key") or default_key):
            found["authorization"] = f"Bearer {key}"
        if not self.traceparent:
            found.pop(names.TRACEPARENT, None)
            found.pop(names.TRACESTATE, None)
        try:
            sendable(found)
        except ValueError:
            problem = f"{', '.join(found)}: one has a character that is not ASCII"
            raise InvalidFieldError("headers", problem, "printable ASCII") from None
        if not _START.fullmatch(self.headers.get(REQUEST_START, "")):
            return (*found.items(), *started(self._began_unix))
        return (*found.items(), (REQUEST_START, self.headers[REQUEST_START]))

    @property
    def traceparent(self) -> str:
        """The caller's trace parent; "" if there is none or it is malformed."""
        return traceparent_of([(names.TRACEPARENT, self.headers.get(names.TRACEPARENT, ""))])

    async def body(self) -> bytes:
        """Reads the body.

        Raises:
            ApiError: it is too large or does not arrive in time.
            ClientGoneError: the connection is closed before its end.
        """
        # The server bounds the bytes of incomplete headers alone.
        if metadata_bytes(self._scope["headers"]) > MAX_METADATA_BYTES:
            message = f"the headers have more than {MAX_METADATA_BYTES >> 10} KiB"
            raise ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="METADATA_TOO_LARGE")
        return await self._uploads.read(self._receive)

    async def wait_closed(self) -> None:
        """Waits until the client closes the connection; call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def unless_closed(self, work: asyncio.Future[T]) -> T:
        """The result of `work`, which is cancelled when the client closes the connection.

        Raises:
            ClientGoneError: it has.
        """
        closed = asyncio.ensure_future(self.wait_closed())
        try:
            waited: list[asyncio.Future[Any]] = [work, closed]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError
            return work.result()
        finally:
            work.cancel()
            closed.cancel()
            # Else asyncio logs the end of the work as an exception that nobody has read.
            await asyncio.gather(work, closed, return_exceptions=True)

    async def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (_JSON,)) -> None:
        """Sends a whole response."""
        await self.start(status, [(b"content-length", str(len(body)).encode()), *headers])
        await self._put({"type": "http.response.body", "body": body})

    async def respond_json(self, value: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Sends a whole response with JSON."""
        await self.respond(status, _encode(value), [_JSON, *headers])

    async def fail(self, error: HttpError, body: Mapping[str, Any]) -> None:
        """Sends a failure as the whole response."""
        self.note(error)
        await self.respond_json(body, error.status, error.headers)

    def note(self, error: HttpError) -> None:
        """Records why the request fails, for the log."""
        self.facts.update(reason=error.reason, param=shown(error.param, 128), failed_status=error.status)
        self.facts["why"] = shown(error.detail, 512)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Sends status and headers."""
        more = [(REQUEST_ID_HEADER.encode(), self.http_request_id.encode())]
        if self.traceparent:
            more.append((names.TRACEPARENT.encode(), self.traceparent.encode()))
        await self._put({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
        self.status = status

    async def write(self, data: bytes) -> None:
        """Sends a part of the body.

        Raises:
            ClientGoneError: the client has not read for SLOW_CLIENT_TIMEOUT_S.
        """
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends the body."""
        await self._put({"type": "http.response.body", "body": b""})

    async def _put(self, message: Message) -> None:
        connection: ClientConnection | None = self._scope.get("state", {}).get("connection")
        if connection is not None and not connection.is_paused:
            # This send never waits; a timeout would be a twentieth of the CPU of an event.
            await self._send(message)
            return
        try:
            async with asyncio.timeout(SLOW_CLIENT_TIMEOUT_S):
                await self._send(message)
        except TimeoutError:
            self.facts["reason"] = "SLOW_CLIENT"
            if connection is not None:
                connection.abort()
            raise ClientGoneError from None

    def log_end(self, crash: BaseException | None = None) -> None:
        """Writes the line of this request."""
        took_ms = round(1000 * (time.monotonic() - self._began), 2)
        client = self._scope.get("client")
        fields = {
            "trace_id": trace_id_of(self.traceparent),
            "http_request_id": shown(self.http_request_id),
            "method": f"{shown(self.method, 32)} {shown(self.path, 128)}",
            "status": self.facts.pop("failed_status", self.status),
            **self.facts,
            "peer": f"{client[0]}:{client[1]}" if client else "",
            "duration_ms": took_ms,
        }
        known = {name: value for name, value in fields.items() if value not in ("", None)}
        is_quiet = self.is_probe and 200 <= self.status < 300
        write = log.error if crash is not None else log.debug if is_quiet else log.info
        write(EVENT, **known, **({} if crash is None else {"exc_info": crash}))
