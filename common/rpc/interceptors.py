"""Parts of interceptors: the cache of wrapped handlers, and the bound on the metadata of every call.

gRPC's core announces a bound on metadata, but enforces it only after the client has acknowledged it. A client that
never acknowledges it could send any size, so `MetadataBound` looks at every call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias

import grpc

from common.errors import ApiError
from common.limits import MAX_METADATA_BYTES
from common.rpc.errors import abort

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# More methods than a port has. Callers can make up names, so the cache needs a bound.
_MAX_METHODS: Final = 256
# Bytes that HTTP/2 counts for each entry besides its name and value.
_ENTRY_BYTES: Final = 32


class HandlerCache:
    """Cache of the handlers that `wrap` has made, by method; at most 256.

    Args:
        wrap: makes the served handler from a handler and the full name of its method.
    """

    def __init__(self, wrap: Callable[[_Handler, str], _Handler]) -> None:
        self._wrap = wrap
        self._made: dict[str, tuple[_Handler, _Handler]] = {}

    def of(self, handler: _Handler, path: str) -> _Handler:
        """The wrapped handler of a method; made anew if the method's handler has changed.

        Args:
            handler: of the method, as the inner interceptors return it.
            path: of the method, with a leading slash.
        """
        known = self._made.get(path)
        if known is None or known[0] is not handler:
            if len(self._made) >= _MAX_METHODS:
                self._made.clear()
            known = self._made[path] = handler, self._wrap(handler, path.removeprefix("/"))
        return known[1]


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
