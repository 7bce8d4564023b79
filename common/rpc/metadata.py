"""A bound on the metadata of every call, which also holds for clients that ignore gRPC's own bound.

gRPC's core announces its bound, but enforces it only after the client has acknowledged it. A client that never
acknowledges it could send any size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from common.errors import ApiError
from common.limits import MAX_METADATA_BYTES
from common.rpc.errors import abort

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Bytes that HTTP/2 counts for each entry besides its name and value.
_ENTRY_BYTES: Final = 32


class MetadataBound(grpc.aio.ServerInterceptor):
    """Refuses calls with too much metadata, before any other interceptor sees them."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The call's handler, or one that refuses the call."""
        size = metadata_bytes(handler_call_details.invocation_metadata or ())
        if size <= MAX_METADATA_BYTES:
            return await continuation(handler_call_details)
        return _refusing(size)


def metadata_bytes(metadata: Any) -> int:
    """Size of metadata as HTTP/2 counts it."""
    return sum(len(name) + len(value) + _ENTRY_BYTES for name, value in metadata)


def _refusing(size: int) -> _Handler:
    message = f"the call's metadata has {size} bytes; at most {MAX_METADATA_BYTES} are taken"
    error = ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="METADATA_TOO_LARGE")

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await abort(context, error)

    # Streaming on both sides: clients of any method understand the status, and no request is read.
    handler: _Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
