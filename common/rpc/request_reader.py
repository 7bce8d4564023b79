"""Reads the one request message of a call, in place of grpc.aio.

grpc.aio never ends a call whose client closes its side without a whole message: the call stays open until the
connection closes. And it turns bytes of the wrong type into UNKNOWN, with a traceback in the log. So a method that
takes one message is served as one that takes a stream, whose first message is read. On the wire that is the same.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from common.errors import ApiError, MalformedRequestError, RequestTimeoutError
from common.limits import MAX_UNREAD_CALLS, REQUEST_READ_TIMEOUT_S
from common.rpc.errors import abort
from common.rpc.interruption import InterruptedWorkError, Interruptible

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
NOT_A_MESSAGE = (
    "the request is not a message of the method's type:"
    " these are other bytes, text in it is not UTF-8, or it is nested too deeply"
)


class MessageReads:
    """Reads the messages of calls, with one timer for all of them: nearly all messages arrive long before the timeout.

    Args:
        limit: most unfinished reads; one more ends the oldest, which bounds the memory of calls without a message.
        timeout_s: longest time of a read; None is REQUEST_READ_TIMEOUT_S.
    """

    def __init__(self, limit: int = MAX_UNREAD_CALLS, timeout_s: float | None = None) -> None:
        self._limit = limit
        self._timeout_s = REQUEST_READ_TIMEOUT_S if timeout_s is None else timeout_s
        # Read to its deadline, the earliest first.
        self._ends: dict[Interruptible, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, message: Awaitable[Any]) -> Any:
        """Waits for the next message of a call.

        Raises:
            RequestTimeoutError: it has not arrived within `timeout_s`.
            ApiError: RESOURCE_EXHAUSTED: `limit` later calls wait for their message too.
        """
        work, loop = Interruptible(), asyncio.get_running_loop()
        try:
            with work:
                if len(self._ends) >= self._limit:
                    self._end_oldest()
                self._ends[work] = loop.time() + self._timeout_s
                self._look_later(loop)
                return await message
        except InterruptedWorkError:
            raise self._why_ended(work) from None
        finally:
            self._ends.pop(work, None)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._ends))
        del self._ends[oldest]
        oldest.interrupt()

    def _why_ended(self, work: Interruptible) -> ApiError:
        if work in self._ends:
            return RequestTimeoutError(self._timeout_s)
        message = f"{self._limit} later calls wait for their message; this one's has not arrived"
        return ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after_s=1.0, reason="REQUEST_TIMEOUT")

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_at(next(iter(self._ends.values())), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for work, end in self._ends.items():
            if end > loop.time():
                self._look_later(loop)
                return
            work.interrupt()


class RequestReader(grpc.aio.ServerInterceptor):
    """Reads the request of every method that takes one.

    For a method that takes a stream, it reads the messages if the method is a generator; a coroutine reads them itself.

    Args:
        limit: most calls at a time whose message has not arrived.
    """

    def __init__(self, limit: int = MAX_UNREAD_CALLS) -> None:
        # By method. Only existing methods are stored, so there are few.
        self._handlers: dict[str, _Handler] = {}
        self._reads = MessageReads(limit)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler that reads; None for an unknown method."""
        found = await continuation(handler_call_details)
        if found is None:
            return None
        method = handler_call_details.method
        if method not in self._handlers:
            self._handlers[method] = _reading(found, self._reads)
        return self._handlers[method]


def _reading(handler: _Handler, reads: MessageReads) -> _Handler:
    make, behavior = _behavior(handler, reads)
    parse = handler.request_deserializer if handler.request_streaming else None
    made: _Handler = make(behavior, parse, handler.response_serializer)
    return made


def _behavior(handler: _Handler, reads: MessageReads) -> tuple[Any, Any]:
    """The handler's kind in gRPC, and its function."""
    to_stream, parse = grpc.stream_stream_rpc_method_handler, handler.request_deserializer
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.stream_stream is not None:
        generates = inspect.isasyncgenfunction(handler.stream_stream)
        return to_stream, _generator(handler.stream_stream, None, reads) if generates else handler.stream_stream
    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler, _coroutine(handler.unary_unary, parse, reads)
    generates = inspect.isasyncgenfunction(handler.unary_stream)
    return to_stream, (_generator if generates else _coroutine)(handler.unary_stream, parse, reads)


def _coroutine(serve: Any, parse: Any, reads: MessageReads) -> Any:
    async def behavior(_: object, context: _Context) -> Any:
        return await serve(await _request(context, parse, reads), context)

    return behavior


def _generator(serve: Any, parse: Any, reads: MessageReads) -> Any:
    """Makes a generator that reads the request and then serves it; `parse` is None if the method takes the stream
    itself."""

    async def behavior(_: object, context: _Context) -> AsyncIterator[Any]:
        asked = _messages(context, reads) if parse is None else await _request(context, parse, reads)
        try:
            async for answer in serve(asked, context):
                yield answer
        except DecodeError:
            await abort(context, MalformedRequestError(NOT_A_MESSAGE))

    return behavior


async def _messages(context: _Context, reads: MessageReads) -> AsyncIterator[Any]:
    """The messages of a call's stream; a stream that pauses for too long ends."""
    while True:
        try:
            message = await reads.wait(context.read())
        except ApiError as error:
            await abort(context, error)
        if message is grpc.aio.EOF:
            return
        yield message


async def _request(context: _Context, parse: Any, reads: MessageReads) -> Any:
    """The call's message; ends the call without one."""
    try:
        data = await reads.wait(context.read())
    except ApiError as error:
        await abort(context, error)
    if data is grpc.aio.EOF:
        # gRPC reports the same for a call that is broken off, or whose message is too long.
        await abort(context, MalformedRequestError("the request ended before its message did"), certain=False)
    try:
        return parse(data)
    except DecodeError:
        await abort(context, MalformedRequestError(NOT_A_MESSAGE))
