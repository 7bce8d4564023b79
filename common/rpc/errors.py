"""Errors as gRPC statuses with `google.rpc` details.

A status travels in HTTP/2 trailers. Peers refuse trailers above 8 KiB, and the call would then end with another status.
So every text in a status is bounded here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, Final, NoReturn

import grpc
from grpc_status import rpc_status

from common.errors import ApiError, FieldViolation
from common.telemetry.request_record import current_record

MAX_TEXT: Final = 256
MAX_VIOLATIONS: Final = 4
Metadata = tuple[tuple[str, str | bytes], ...]


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: ApiError,
    trailing_metadata: Metadata = (),
    *,
    certain: bool = True,
    behind: Awaitable[bool] | None = None,
) -> NoReturn:
    """Ends the RPC with the error's status and details.

    Args:
        context: of the RPC.
        error: what the client gets.
        trailing_metadata: sent beside the status.
        certain: False if gRPC may have ended the call already, with a status of its own.
        behind: a write that may be in progress and must end first; it returns False when the client has disconnected.

    Raises:
        grpc.aio.AbortError: nearly always; callers must not catch it.
        asyncio.CancelledError: the client disconnected before the status was sent.
    """
    record = current_record()
    if certain:
        record.fail(error)
        # Closed before the status is sent, because a client that does not read can hold up the sending.
        record.close()
    status = rpc_status.to_status(bounded(error).to_status())
    metadata: Metadata = (*(status.trailing_metadata or ()), *trailing_metadata)
    if behind is not None and not await behind:
        raise asyncio.CancelledError
    if error.code is grpc.StatusCode.CANCELLED:
        await _commit(context)
    try:
        await context.abort(status.code, status.details, metadata)
    except grpc.aio.AbortError:
        record.fail(error)
        raise
    except grpc.aio.InternalError:
        # The client has disconnected. gRPC would log a traceback for that.
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


async def _commit(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Sends the response headers, so that retry policies of gRPC and Envoy do not repeat the call.

    These policies repeat a CANCELLED without headers, because gRPC uses it for calls that the server never saw. Without
    headers, a call that an operator cancelled would run again.
    """
    # The headers were sent before, or the client has disconnected.
    with contextlib.suppress(grpc.aio.UsageError, grpc.aio.InternalError):
        await context.send_initial_metadata(())


def bounded(error: ApiError) -> ApiError:
    """The error with texts short enough for trailers: text of the client is quoted in part."""
    violations = tuple(
        FieldViolation(_clipped(v.path), _clipped(v.problem), _clipped(v.valid))
        for v in error.violations[:MAX_VIOLATIONS]
    )
    return ApiError(
        error.code,
        _clipped(error.message, 2 * MAX_TEXT),
        violations,
        error.retry_after_s,
        error.reason,
        {key: _clipped(value) for key, value in error.metadata.items()},
    )


def _clipped(text: str, limit: int = MAX_TEXT) -> str:
    """The first `limit` bytes of UTF-8 of a text."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."
