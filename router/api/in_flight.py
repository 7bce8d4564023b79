"""The calls in flight of a router by tenant and request id: operators list and cancel them, a resumed call ends one.

Invariant: a request id of a tenant belongs to one call at a time. Pure but for `interruptible`, which a task uses.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import (
    ApiError,
    CancelledByOperatorError,
    DuplicateRequestError,
    SupersededError,
    UnknownRequestError,
)
from common.rpc.interruption import InterruptedWorkError, Interruptible
from common.telemetry.request_record import RequestRecord
from router.api.rpc_scope import RpcScope
from router.api.shutdown import OpenCalls
from router.requests.stream import RequestStream
from router.telemetry.request_span import RequestSpan


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightCall:
    """One call that runs requests on workers, from its admission to its end.

    Attributes:
        request_id: the client's, or the one that was made for it.
        tenant: the tenant of the call.
        method: name of the RPC.
        model: name of its model; before the router chooses it, the name that the client gave, perhaps "".
        priority: its class.
        cache_salt: the salt of the prefix cache in force.
        arrived: monotonic seconds.
        scope: the RPC that it is: its span, its log record, its trailing metadata.
        open_calls: interrupts the call when the router ends.
        prompt_tokens: length of its prompt, 0 until it is known.
        opened: monotonic seconds at which its first stream was opened, 0 before.
        streams: the streams of its answers, none while its prompt is made.
        number: counts calls, in order of their arrival.
        took_over: whether it ended an earlier call of its id on this router.
    """

    request_id: str
    tenant: str
    method: str
    model: str
    priority: int
    cache_salt: bytes
    arrived: float
    scope: RpcScope
    open_calls: OpenCalls
    prompt_tokens: int = 0
    opened: float = 0.0
    streams: Sequence[RequestStream] = ()
    number: int = field(default_factory=itertools.count(1).__next__)
    took_over: bool = False
    _works: list[Interruptible] = field(default_factory=list)
    _error: ApiError | None = None

    @property
    def span(self) -> RequestSpan:
        return self.scope.span

    @property
    def record(self) -> RequestRecord:
        return self.scope.record

    def end(self, error: ApiError) -> None:
        """Ends the call with a status, whatever it waits for: its client may be gone, or read nothing."""
        self._error = error
        for stream in self.streams:
            stream.drop(error)
        for work in self._works:
            work.interrupt()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets `end`, and the end of the router, interrupt the block.

        Raises:
            ApiError: the error given to `end`, also where it came before; RouterEndingError if the router ends.
        """
        with self.open_calls.interruptible(), self._interruptible():
            yield

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        if self._error is not None:
            raise self._error
        work = Interruptible()
        try:
            with work:
                self._works.append(work)
                yield
        except InterruptedWorkError:
            assert self._error is not None
            raise self._error from None
        finally:
            self._works.remove(work)


class InFlightCalls:
    """All calls in flight, oldest first."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], InFlightCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[InFlightCall]:
        return iter(tuple(self._calls.values()))

    @contextlib.contextmanager
    def held(self, call: InFlightCall, *, takes_over: bool = False) -> Iterator[bool]:
        """Holds the call's id for the block, which gets True if the call took the id over.

        Tenants do not learn of each other's ids.

        Args:
            call: the call.
            takes_over: True ends a call of this id that is in flight: the client resumes its broken stream.

        Raises:
            DuplicateRequestError: the id is taken.
        """
        key = (call.tenant, call.request_id)
        other = self._calls.pop(key, None) if takes_over else self._calls.get(key)
        if other is not None and not takes_over:
            raise DuplicateRequestError(call.request_id)
        if other is not None:
            other.end(SupersededError())
            call.took_over = True
        self._calls[key] = call
        try:
            yield call.took_over
        finally:
            if self._calls.get(key) is call:
                del self._calls[key]

    def cancel(self, tenant: str, request_id: str) -> None:
        """Ends the call with this id for an operator.

        Raises:
            UnknownRequestError: there is none.
        """
        call = self._calls.get((tenant, request_id))
        if call is None:
            raise UnknownRequestError(request_id, tenant)
        call.end(CancelledByOperatorError())
