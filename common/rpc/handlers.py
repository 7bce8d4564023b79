"""Handlers with something around them, as interceptors give them: made once per method, not once per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# More methods than a port has; callers make up names.
_MAX_METHODS: Final = 256


class Wrapped:
    """Cache of the handlers that `wrap` has made, by method; of at most 256.

    Args:
        wrap: given a handler and the full name of its method, makes the handler that is served.
    """

    def __init__(self, wrap: Callable[[_Handler, str], _Handler]) -> None:
        self._wrap = wrap
        self._made: dict[str, tuple[_Handler, _Handler]] = {}

    def of(self, handler: _Handler, path: str) -> _Handler:
        """The wrapped handler; another one when the method's handler is another one than last time.

        Args:
            handler: of the method, as the interceptors behind give it.
            path: of the method, with a slash before it.
        """
        known = self._made.get(path)
        if known is None or known[0] is not handler:
            if len(self._made) >= _MAX_METHODS:
                self._made.clear()
            known = self._made[path] = handler, self._wrap(handler, path.removeprefix("/"))
        return known[1]
