"""Cache of wrapped RPC handlers, so that an interceptor wraps a method once, not once per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# More methods than a port has. Callers can make up names, so the cache needs a bound.
_MAX_METHODS: Final = 256


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
