"""Server-sent events over HTTP/1.1 with asyncio alone: a client that leaves the cores to the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

_EVENT: Final = b"data:"
_DONE: Final = b"[DONE]"
# A line of an event is shorter; a last event may repeat the prompt.
_LINE_LIMIT: Final = 1 << 20


class HttpError(Exception):
    """The server answered with something else than 200; the message is its status and the begin of its body."""


async def events(port: int, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of one streamed answer, parsed, as they come; `[DONE]` ends them and is not given.

    Raises:
        HttpError: the status is not 200.
        OSError: nobody listens on the port of loopback.
        asyncio.IncompleteReadError: the connection broke within the answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_LIMIT)
    try:
        writer.write(_request(path, body))
        chunked = await _read_head(reader)
        async for line in _lines(reader, chunked=chunked):
            if not line.startswith(_EVENT):
                continue
            data = line[len(_EVENT) :].strip()
            if data == _DONE:
                return
            yield json.loads(data)
    finally:
        writer.close()


def _request(path: str, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode("ascii") + content


async def _read_head(reader: asyncio.StreamReader) -> bool:
    """Reads status and headers. Returns whether the body comes in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = head.split(None, 2)[1]
    if status != "200":
        raise HttpError(f"status {status}: {(await reader.read(500)).decode(errors='replace')}")
    return "transfer-encoding: chunked" in head


async def _lines(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The lines of the body; a line may lie in several chunks."""
    rest = b""
    async for part in _chunks(reader) if chunked else _until_end(reader):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _until_end(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(1 << 16):
        yield part
