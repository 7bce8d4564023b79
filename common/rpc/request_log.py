"""One log line for every call that ends, however it ends: the outermost interceptor of a server.

Calls that are refused before their request is understood get a line each while they are few; floods of them are counted
(RefusalLines). The interceptor also sees calls that end before their method is reached (no permission, no message,
unknown method). It does not see what gRPC's core refuses by itself: metadata or messages beyond the limits, failed
connections. Invariant: a failure here never affects the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Final, TypeAlias

import grpc
import structlog

from common.errors import ApiError
from common.limits import MAX_REFUSAL_LINES, REFUSAL_LINES_PER_S, ROUTER_RETRY_S
from common.rpc.errors import abort
from common.rpc.interceptors import HandlerCache
from common.telemetry.request_record import RequestRecord, begin_record
from common.telemetry.trace_context import trace_id_of, traceparent_of

SUMMARY_S: Final = 1.0


class RefusalLines:
    """Decides which refused calls get a log line, and counts the others by status.

    MAX_REFUSAL_LINES may be written at once, then REFUSAL_LINES_PER_S: a call that costs its client 50
    bytes must not cost 256 bytes of log.
    """

    def __init__(self) -> None:
        self._left = float(MAX_REFUSAL_LINES)
        self._counted_at = 0.0
        self._unwritten: Counter[str] = Counter()

    def take(self, status: str, now: float) -> bool:
        """True if a call that ended with `status` gets a line; otherwise it is counted."""
        earned = max(0.0, now - self._counted_at) * REFUSAL_LINES_PER_S
        self._left = min(float(MAX_REFUSAL_LINES), self._left + earned)
        self._counted_at = now
        if self._left >= 1:
            self._left -= 1
            return True
        self._unwritten[status] += 1
        return False

    def take_unwritten(self) -> dict[str, int]:
        """Number of calls without a line since the last call, by status."""
        counted = dict(self._unwritten)
        self._unwritten.clear()
        return counted


log = structlog.get_logger(__name__)

EVENT: Final = "request ended"
SUMMARY_EVENT: Final = "requests refused without a line each"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_MAKERS: Final[dict[tuple[bool, bool], Callable[..., _Handler]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
# gRPC raises this when the client has disconnected. It would log a traceback, in any servicer.
_GONE: Final = "the client has gone"
_ENDING: Final = ApiError(
    grpc.StatusCode.UNAVAILABLE, "the server ends", retry_after_s=ROUTER_RETRY_S, reason="SERVER_ENDING"
)
_HEALTH: Final = "/grpc.health.v1.Health/"
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "error": logging.ERROR}
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class RequestLog(grpc.aio.ServerInterceptor):
    """Gives each call a record, and writes the log line of the call.

    Attributes:
        arrived: number of calls so far.
        refuses: True while the server ends: calls other than health are refused unread, which is much quicker than
            serving them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.arrived = 0
        self.refuses = False
        self._clock = clock
        self._open: set[RequestRecord] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._handlers = HandlerCache(self._recorded)
        self._refusals = RefusalLines()
        self._summary: asyncio.TimerHandle | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """The call's handler with a record around it; of an unknown method, or while the server ends, a handler that
        says so."""
        self.arrived += 1
        path = handler_call_details.method
        if self.refuses and not path.startswith(_HEALTH):
            return self._recorded(_REFUSED, path.removeprefix("/"))
        handler = await continuation(handler_call_details)
        return self._recorded(_UNKNOWN, path.removeprefix("/")) if handler is None else self._handlers.of(handler, path)

    def _recorded(self, handler: _Handler, method: str) -> _Handler:
        # The type stubs only know the handlers of synchronous servers.
        run: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def awaited(request: Any, context: _Context) -> Any:
            with _CallSpan(self, method, context):
                try:
                    return await run(request, context)
                except grpc.aio.InternalError:
                    raise asyncio.CancelledError(_GONE) from None

        async def generated(request: Any, context: _Context) -> AsyncIterator[Any]:
            with _CallSpan(self, method, context):
                try:
                    async for message in run(request, context):
                        yield message
                except grpc.aio.InternalError:
                    raise asyncio.CancelledError(_GONE) from None

        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        chosen = generated if inspect.isasyncgenfunction(run) else awaited
        return make(chosen, handler.request_deserializer, handler.response_serializer)

    @property
    def num_open(self) -> int:
        """Number of calls that have not ended."""
        return len(self._open)

    async def wait_until_none(self) -> None:
        """Waits until all calls have ended."""
        await self._none_open.wait()

    def end_all(self) -> None:
        """Notes that the server is about to break off all running calls."""
        for record in self._open:
            record.fail(_ENDING)

    def begin(self, method: str, context: _Context) -> RequestRecord:
        """Starts the record of a call that has arrived."""
        record = RequestRecord(method, context.peer(), self._clock())
        record.trace_id = trace_id_of(traceparent_of(context.invocation_metadata()))
        record.report = self._write
        self._open.add(record)
        self._none_open.clear()
        begin_record(record)
        return record

    def end(self, record: RequestRecord, context: _Context, error: BaseException | None) -> None:
        """Ends a call's record. `error` is the exception that left its handler."""
        if error is None:
            record.succeed(_code_of(context))
        elif isinstance(error, grpc.aio.AbortError):
            # The status comes from a foreign servicer; our own servicers have recorded their reason.
            record.fail(_code_of(context))
        else:
            record.end(error, self._clock(), context.time_remaining())

    def _write(self, record: RequestRecord) -> None:
        self._open.discard(record)
        if not self._open:
            self._none_open.set()
        logger, level = log.bind(), record.level
        if not logger.is_enabled_for(_LEVELS[level]):
            return
        now = self._clock()
        if level == "info" and record.is_refusal and not self._refusals.take(record.code.name, now):
            self._summarize_later()
            return
        getattr(logger, level)(EVENT, **record.fields(now), **_traceback(record))

    def _summarize_later(self) -> None:
        if self._summary is None:
            self._summary = asyncio.get_running_loop().call_later(SUMMARY_S, self._summarize)

    def _summarize(self) -> None:
        self._summary = None
        log.info(SUMMARY_EVENT, **self._refusals.take_unwritten())


class _CallSpan:
    """Context manager that spans one call."""

    def __init__(self, requests: RequestLog, method: str, context: _Context) -> None:
        self._requests = requests
        self._context = context
        self._record = requests.begin(method, context)

    def __enter__(self) -> None:
        """Does nothing: the record has begun."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Writes the line, and frees what the call's frames hold."""
        with contextlib.suppress(Exception):
            self._requests.end(self._record, self._context, error)
        self._record.close()
        if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
            _leave_frames(error)


def _leave_frames(error: BaseException | None) -> None:
    """Clears the frames that an error and its causes have left.

    gRPC's state of an aborted call and the error refer to each other. Without this, the objects in those frames, such
    as a request of megabytes, would live until the garbage collector runs, which is after many calls.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__context__


async def _no_such_method(request: object, context: _Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


async def _refuse(_: object, context: _Context) -> None:
    await abort(context, _ENDING)


_REFUSED: Final[_Handler] = grpc.stream_stream_rpc_method_handler(_refuse)
_UNKNOWN: Final[_Handler] = grpc.stream_stream_rpc_method_handler(_no_such_method)


def _code_of(context: _Context) -> grpc.StatusCode:
    """The status that a call was given; OK without one."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0, grpc.StatusCode.UNKNOWN)


def _traceback(record: RequestRecord) -> dict[str, BaseException]:
    return {} if record.crash is None else {"exc_info": record.crash}
