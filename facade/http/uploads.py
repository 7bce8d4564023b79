"""Bodies of requests while they arrive, with a bound on the bytes of all of them: slow ones cost others little."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from common.errors import ApiError, RequestTimeoutError
from common.limits import MAX_REQUEST_BYTES, MAX_UPLOAD_BYTES, REQUEST_READ_TIMEOUT_S, ROUTER_RETRY_S


class ClientGoneError(Exception):
    """The client has closed the connection, or does not read."""


class UploadTable:
    """All bodies that arrive now. When they are too large together, the largest one is refused.

    Args:
        most_bytes: of all bodies together.
    """

    def __init__(self, most_bytes: int = MAX_UPLOAD_BYTES) -> None:
        self._most_bytes = most_bytes
        self._sizes: dict[asyncio.Timeout, int] = {}
        self._refused: set[asyncio.Timeout] = set()

    async def read(self, receive: Callable[[], Awaitable[Any]]) -> bytes:
        """Reads one body from the messages of ASGI.

        Raises:
            ApiError: it is too large, does not arrive in time, or was refused for the others.
            ClientGoneError: the connection is closed before its end.
        """
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(REQUEST_READ_TIMEOUT_S) as timer:
                has_more = True
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    has_more = message.get("more_body", False)
                    self._add(timer, len(parts[-1]))
                return b"".join(parts)
        except TimeoutError:
            if timer in self._refused:
                raise _uploads_full() from None
            raise RequestTimeoutError(REQUEST_READ_TIMEOUT_S) from None
        finally:
            self._sizes.pop(timer, None)
            self._refused.discard(timer)

    def _add(self, timer: asyncio.Timeout, size: int) -> None:
        self._sizes[timer] = self._sizes.get(timer, 0) + size
        if self._sizes[timer] > MAX_REQUEST_BYTES:
            message = f"the body has more than {MAX_REQUEST_BYTES >> 20} MiB"
            raise ApiError(grpc.StatusCode.OUT_OF_RANGE, message, reason="BODY_TOO_LARGE")
        if sum(self._sizes.values()) > self._most_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            del self._sizes[largest]
            self._refused.add(largest)
            largest.reschedule(asyncio.get_running_loop().time())


def _uploads_full() -> ApiError:
    message = "too many large bodies arrive at once, and this is the largest one; send it again later"
    return ApiError(grpc.StatusCode.UNAVAILABLE, message, retry_after_s=ROUTER_RETRY_S, reason="UPLOADS_FULL")
