"""A lean client for benchmarks: streams over HTTP/2 (gRPC) or HTTP/1.1 (SSE), read as bytes, on plain asyncio.

gRPC's Python client costs as much CPU per message as the router under test, and on a small machine it would be the
bottleneck. Here a message is a slice of bytes: it is counted, its time is noted, and a token counter looks into it.
Both protocols share everything above the framing. Only what our servers and `smg` send is understood: no padding, no
push, no compression of messages, and headers are not decoded (a gRPC stream is good if its last message has a finish).
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME: Final = 16_384
MAX_WINDOW: Final = 2**31 - 1
_DEFAULT_WINDOW: Final = 65_535
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_ACK = _END_STREAM = 0x1
_END_HEADERS: Final = 0x4
_STATUS: Final = b"HTTP/1.1 "

CountTokens = Callable[[memoryview], int]


@dataclass(slots=True)
class Reply:
    """One stream as the client saw it. Times in seconds of `time.perf_counter`.

    Attributes:
        began: when the request was written.
        times: when each message came.
        tokens: tokens in each message, as far as its bytes tell.
        last: the last message.
    """

    began: float
    ended: asyncio.Future[None]
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    last: bytes = b""


class Connection(asyncio.Protocol, abc.ABC):
    """A connection that streams run on."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count = count_tokens
        self._transport: asyncio.Transport | None = None
        self._received = b""

    @classmethod
    async def open(cls, address: str, count_tokens: CountTokens) -> Connection:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: cls(count_tokens), host, int(port))
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not of asyncio's class.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails what still runs."""
        self._fail(ConnectionError(f"the server closed the connection: {exc}"))

    def close(self) -> None:
        self._to.close()

    def data_received(self, data: bytes) -> None:
        data = self._received + data if self._received else data
        self._received = data[self._take(data, time.perf_counter()) :]

    @abc.abstractmethod
    def start(self, path: str, body: bytes) -> Reply:
        """Sends a request."""

    @abc.abstractmethod
    def cancel(self, reply: Reply) -> None:
        """Gives a stream up."""

    @property
    def _to(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @abc.abstractmethod
    def _take(self, data: bytes, now: float) -> int:
        """Handles the complete frames in `data` and returns their size."""

    @abc.abstractmethod
    def _fail(self, error: Exception) -> None:
        """Ends what still runs."""

    def _message(self, reply: Reply, message: memoryview, now: float) -> None:
        reply.times.append(now)
        reply.tokens.append(self._count(message))
        reply.last = bytes(message)


class GrpcConnection(Connection):
    """HTTP/2: any number of streams."""

    def __init__(self, count_tokens: CountTokens) -> None:
        super().__init__(count_tokens)
        self._next_id = 1
        self._replies: dict[int, Reply] = {}
        self._parts: dict[int, bytes] = {}
        self._window = _DEFAULT_WINDOW
        self._stream_window = _DEFAULT_WINDOW
        # What may still be written of each stream whose body is not out, and those bodies in order.
        self._windows: dict[int, int] = {}
        self._bodies: deque[tuple[int, memoryview]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Says hello: no header compression by reference, and windows that never close."""
        super().connection_made(transport)
        settings = b"".join(key.to_bytes(2) + value.to_bytes(4) for key, value in ((1, 0), (2, 0), (4, MAX_WINDOW)))
        opening = PREFACE + _frame(_SETTINGS, 0, 0, settings)
        self._to.write(opening + _frame(_WINDOW, 0, 0, (MAX_WINDOW - _DEFAULT_WINDOW).to_bytes(4)))

    def start(self, path: str, body: bytes) -> Reply:
        """Sends a unary request."""
        stream, self._next_id = self._next_id, self._next_id + 2
        headers = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "bench"))
        more = (("te", "trailers"), ("content-type", "application/grpc"))
        block = b"".join(_literal(name, value) for name, value in (*headers, *more))
        self._to.write(_frame(_HEADERS, _END_HEADERS, stream, block))
        reply = self._replies[stream] = Reply(time.perf_counter(), asyncio.get_running_loop().create_future())
        self._windows[stream] = self._stream_window
        self._bodies.append((stream, memoryview(b"\0" + len(body).to_bytes(4) + body)))
        self._flush()
        return reply

    def cancel(self, reply: Reply) -> None:
        stream = next(id for id, each in self._replies.items() if each is reply)
        self._to.write(_frame(_RESET, 0, stream, (8).to_bytes(4)))
        self._end(stream)

    def _flush(self) -> None:
        """Writes bodies as far as the windows let it."""
        for _ in range(len(self._bodies)):
            stream, rest = self._bodies.popleft()
            while rest and (size := min(len(rest), MAX_FRAME, self._window, self._windows.get(stream, 0))) > 0:
                piece, rest = rest[:size], rest[size:]
                self._window -= size
                self._windows[stream] -= size
                self._to.write(_frame(_DATA, 0 if rest else _END_STREAM, stream, bytes(piece)))
            if rest and stream in self._windows:
                self._bodies.append((stream, rest))
            else:
                self._windows.pop(stream, None)

    def _take(self, data: bytes, now: float) -> int:
        at, end = 0, len(data)
        while end - at >= 9:
            size = int.from_bytes(data[at : at + 3])
            if end - at - 9 < size:
                break
            kind, flags, stream = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9])
            at += 9
            if kind == _DATA:
                self._data(stream, data[at : at + size], now)
            else:
                self._control(kind, flags, stream, data[at : at + size])
            at += size
            if flags & _END_STREAM and kind in (_DATA, _HEADERS):
                self._end(stream)
        return at

    def _data(self, stream: int, data: bytes, now: float) -> None:
        if stream not in self._replies:
            return
        data = self._parts.pop(stream, b"") + data
        at = 0
        while len(data) - at >= 5:
            size = int.from_bytes(data[at + 1 : at + 5])
            if len(data) - at - 5 < size:
                break
            self._message(self._replies[stream], memoryview(data)[at + 5 : at + 5 + size], now)
            at += 5 + size
        if at < len(data):
            self._parts[stream] = data[at:]

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for i in range(0, len(payload), 6):
                if int.from_bytes(payload[i : i + 2]) == 4:
                    self._stream_window = int.from_bytes(payload[i + 2 : i + 6])
            self._to.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._to.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW:
            increment = int.from_bytes(payload)
            if not stream:
                self._window += increment
            elif stream in self._windows:
                self._windows[stream] += increment
            self._flush()
        elif kind == _RESET:
            self._end(stream)
        elif kind == _GOAWAY:
            self._fail(ConnectionError("the server goes away"))

    def _end(self, stream: int) -> None:
        self._windows.pop(stream, None)
        self._parts.pop(stream, None)
        reply = self._replies.pop(stream, None)
        if reply is not None and not reply.ended.done():
            reply.ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        for reply in self._replies.values():
            if not reply.ended.done():
                reply.ended.set_exception(error)
        self._replies.clear()


class SseConnection(Connection):
    """HTTP/1.1 with server-sent events: one stream at a time."""

    def __init__(self, count_tokens: CountTokens) -> None:
        super().__init__(count_tokens)
        self._reply: Reply | None = None
        self._is_ok = False

    def start(self, path: str, body: bytes) -> Reply:
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._to.write(f"{head}\r\n\r\n".encode() + body)
        self._is_ok = False
        self._reply = Reply(time.perf_counter(), asyncio.get_running_loop().create_future())
        return self._reply

    def cancel(self, reply: Reply) -> None:
        """Closes the connection: HTTP/1.1 has no other way."""
        if not reply.ended.done():
            reply.ended.set_result(None)
        self._reply = None
        self.close()

    def _take(self, data: bytes, now: float) -> int:
        """Events are lines that begin with `data: `; the chunks that they travel in do not matter."""
        reply, at = self._reply, 0
        if reply is None:
            return len(data)
        if not self._is_ok:
            at = data.find(_STATUS)
            if at < 0 or len(data) < at + len(_STATUS) + 3:
                return max(at, 0)
            self._is_ok = data.startswith(b"200", at + len(_STATUS))
            if not self._is_ok:
                self._fail(ConnectionError(data[at : at + 400].decode(errors="replace")))
                return len(data)
        while (found := data.find(b"data: ", at)) >= 0:
            end = data.find(b"\n\n", found)
            if end < 0:
                return found
            if data.startswith(b"[DONE]", found + 6):
                self._reply = None
                reply.ended.set_result(None)
                return len(data)
            self._message(reply, memoryview(data)[found + 6 : end], now)
            at = end + 2
        return max(at, len(data) - 5)

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.ended.done():
            self._reply.ended.set_exception(error)
        self._reply = None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman coding (RFC 7541 section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
