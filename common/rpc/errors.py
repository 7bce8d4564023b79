"""Errors as gRPC statuses with `google.rpc` details.

A status travels in HTTP/2 trailers, which a peer refuses above 8 KiB: the call would then end with another status than
the one that was sent. So every text in it is bounded here.
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
        error: what goes to the client.
        trailing_metadata: sent beside the status.
        certain: False if gRPC may have ended the call before, with a status of its own.
        behind: a write that may be under way, and has to end first; it gives False when the client has gone.

    Raises:
        grpc.aio.AbortError: nearly always; it must not be caught.
        asyncio.CancelledError: the client went while the status waited to be sent.
    """
    record = current_record()
    if certain:
        record.fail(error)
        # Not behind the sending, which a client that reads nothing holds up.
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
        # gRPC would log a traceback for what is a client that has gone.
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


async def _commit(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Sends the response headers, so that retry policies of gRPC and Envoy do not repeat the call.

    These policies repeat a CANCELLED without headers, which gRPC itself uses for calls that the server never saw.
    Without headers, a call that an operator cancelled would run again.
    """
    # The headers were sent before, or the client has disconnected.
    with contextlib.suppress(grpc.aio.UsageError, grpc.aio.InternalError):
        await context.send_initial_metadata(())


def bounded(error: ApiError) -> ApiError:
    """The error with texts that fit into trailers: what a client sent in is quoted in part."""
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
    """`text` in at most `limit` bytes of UTF-8."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."
