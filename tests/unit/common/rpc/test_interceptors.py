"""Interceptors: wrapped handlers are made once per method and are bounded, whatever names callers send."""

from __future__ import annotations

from typing import Any

import grpc

from common.rpc import interceptors
from common.rpc.interceptors import HandlerCache


def handler() -> Any:
    return grpc.unary_unary_rpc_method_handler(lambda request, context: None)


def test_handler_is_wrapped_once_per_method() -> None:
    wrapped = HandlerCache(lambda found, method: handler())
    first, other = handler(), handler()
    made = wrapped.of(first, "/a/A")
    assert wrapped.of(first, "/a/A") is made
    assert wrapped.of(first, "/a/B") is not made
    assert wrapped.of(other, "/a/A") is not made


def test_wrapper_receives_method_name() -> None:
    told: list[str] = []

    def wrap(found: grpc.RpcMethodHandler[object, object], method: str) -> grpc.RpcMethodHandler[object, object]:
        told.append(method)
        return found

    HandlerCache(wrap).of(handler(), "/a.b.C/D")
    assert told == ["a.b.C/D"]


def test_made_up_method_names_take_no_memory() -> None:
    """A call with too much metadata gets a refusing handler before its method name is checked."""
    wrapped = HandlerCache(lambda found, method: found)
    refusing = handler()
    for i in range(10 * interceptors._MAX_METHODS):
        assert wrapped.of(refusing, f"/made/up{i}") is refusing
    assert len(wrapped._made) <= interceptors._MAX_METHODS
