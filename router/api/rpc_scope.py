"""The scope of every RPC of the router: span, log record, trailing metadata, and errors as statuses."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeAlias
from urllib.parse import quote

import grpc
from fissile.client.messages import REQUEST_START, clock_name

from common.errors import ApiError, RouterFailedError, SlowClientError
from common.rpc.errors import Metadata, abort
from common.telemetry.ledger import Ledger
from common.telemetry.logs import current_request_id
from common.telemetry.names import Stage
from common.telemetry.request_record import RequestRecord, begin_record, current_record, shown
from common.telemetry.trace_context import Metadata as CallMetadata
from common.telemetry.tracing import SpanFactory
from router.telemetry.request_span import RequestSpan, request_span

SERVICE = "fissile.v1.InferenceService"
REQUEST_ID = "x-request-id"
# A longer way is a wrong clock.
_MAX_INBOUND_S = 60.0
_MAX_ID_METADATA = 512
# Metadata values are printable ASCII; the rest of a client's id is percent-encoded.
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class RpcScope:
    """Scope of one RPC: an asynchronous context manager around its work.

    An ApiError becomes the call's status with its details. Any other exception becomes INTERNAL, with its traceback in
    the call's log line. The trailing metadata has the request id and the trace, on errors too.

    Args:
        tracing: makes the span.
        context: the call.
        method: name of the RPC.
        request_id: the request's id; "" makes one for the metadata.
        operation: for an RPC that runs requests on workers, its name in traces, such as `names.CHAT`.
        service: full name of the RPC's service.

    Attributes:
        method: name of the RPC.
        operation: its name in traces; "" for an RPC that runs no requests.
        span: the call's span.
        record: the content of its log line.
    """

    def __init__(
        self,
        tracing: SpanFactory,
        context: Context,
        method: str,
        request_id: str = "",
        operation: str = "",
        service: str = SERVICE,
    ) -> None:
        self._context = context
        self.method, self.operation = method, operation
        self.record = current_record()
        self.record.request_id = request_id or uuid.uuid4().hex
        self.record.generates = bool(operation)
        in_metadata = quote(self.record.request_id, safe=_PRINTABLE)[:_MAX_ID_METADATA]
        metadata = context.invocation_metadata()
        name = f"{service}/{method}"
        self.span = request_span(tracing, name, metadata, operation=operation, peer=context.peer())
        self.record.trace_id = self.span.trace_id
        self._note_start(metadata)
        self._trailing: Metadata = ((REQUEST_ID, in_metadata), *self.span.trailing_metadata())
        self._first_write: asyncio.Future[bool] | None = None

    def _note_start(self, metadata: CallMetadata | None) -> None:
        """Begins the ledger when the client sent the call, if it says when."""
        arrived = self.record.arrived
        started = str(next((value for key, value in metadata or () if key == REQUEST_START), ""))
        inbound_s = _age_s(started, time.time()) - (time.monotonic() - arrived) if started else 0.0
        if inbound_s > 0:
            self.record.ledger = Ledger(Stage.INBOUND, arrived - inbound_s)
            self.record.ledger.enter(Stage.PREPARE, arrived)

    def add_trailing(self, key: str, value: str | bytes) -> None:
        """Sets one key of the trailing metadata, for any status of the call."""
        self._trailing = (*(pair for pair in self._trailing if pair[0] != key), (key, value))
        self._context.set_trailing_metadata(self._trailing)

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has none."""
        return self._context.time_remaining()

    def cancel(self) -> grpc.StatusCode:
        """Records that the call was cancelled, and returns its status: a deadline arrives as a cancellation too."""
        return self.record.cancel(time.monotonic(), self.time_remaining())

    async def __aenter__(self) -> RequestSpan:
        self._context.set_trailing_metadata(self._trailing)
        current_request_id.set(shown(self.record.request_id))
        return self.span.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the span and turns an error into a status."""
        try:
            if isinstance(error, ApiError):
                await self._refuse(error)
            elif isinstance(error, asyncio.CancelledError):
                self.span.fail(self.cancel())
            elif isinstance(error, Exception):
                self.record.fault(error)
                await self._refuse(RouterFailedError())
        finally:
            self.span.__exit__(kind, error, traceback)
            current_request_id.set("")

    async def write_first(self, message: object) -> None:
        """Writes the first message, and with it the initial metadata.

        If the caller is cancelled, the write continues, and the call's status is sent after it: gRPC sends no status
        after a cancelled first write. Sending the initial metadata separately costs four times as much.

        Raises:
            asyncio.CancelledError: the client is gone.
        """
        self._first_write = asyncio.ensure_future(_write(self._context, message))
        if not await asyncio.shield(self._first_write):
            raise asyncio.CancelledError

    async def _refuse(self, error: ApiError) -> None:
        self.span.fail(error)
        await abort(self._context, error, self._trailing, behind=self._first_write)


class StreamItemScope(RpcScope):
    """Scope of one request among those of a call that takes a stream of them.

    It has a span and a log line of its own. An ApiError ends the request and not the call; a client that reads too
    slowly is for the call to end.

    Args:
        tracing: makes the span.
        context: the call.
        method: name of the RPC.
        request_id: the request's id.
        operation: its name in traces.
        service: full name of the RPC's service.
        refuse: tells the client that the request has failed.
    """

    def __init__(
        self,
        tracing: SpanFactory,
        context: Context,
        method: str,
        request_id: str,
        operation: str,
        service: str,
        refuse: Callable[[ApiError], Awaitable[None]],
    ) -> None:
        call = current_record()
        begin_record(RequestRecord(call.method, call.peer, time.monotonic(), key=call.key, report=call.report))
        super().__init__(tracing, context, method, request_id, operation, service)
        self._tell_client = refuse

    def _note_start(self, metadata: CallMetadata | None) -> None:
        """Does nothing: the metadata is the call's."""

    def add_trailing(self, key: str, value: str | bytes) -> None:
        """Does nothing: trailing metadata is the call's."""

    async def __aenter__(self) -> RequestSpan:
        current_request_id.set(shown(self.record.request_id))
        return self.span.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the span and the record, and tells the client of an error."""
        if error is None:
            self.record.succeed()
        try:
            await super().__aexit__(kind, error, traceback)
        finally:
            self.record.close()

    async def _refuse(self, error: ApiError) -> None:
        self.span.fail(error)
        self.record.fail(error)
        self.record.close()
        if not isinstance(error, SlowClientError):
            await self._tell_client(error)


def _age_s(started: str, now: float) -> float:
    """Seconds since a Unix time in seconds, milliseconds or microseconds; 0 unless it is plausible.

    A time with the name of a clock counts only if this machine has that clock.
    """
    time_text, _, clock = started.partition(";clock=")
    try:
        value = float(time_text.removeprefix("t="))
    except ValueError:
        return 0.0
    if clock and clock != clock_name():
        return 0.0
    for unit in (1.0, 1e3, 1e6):
        if 0 < now - value / unit <= _MAX_INBOUND_S:
            return now - value / unit
    return 0.0


async def _write(context: Context, message: object) -> bool:
    """Writes a message. Returns False if the client leaves while the message waits for it."""
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        return False
    return True
