"""The requests that a router has in hand, by tenant and id: for those who look, and for those who end one.

Invariant: an id of a tenant stands for one call at a time. Pure but for `interruptible`, which is a task's.
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
from router.requests.stream import RequestStream


@dataclass(slots=True, eq=False)
class InFlightCall:
    """One call of Generate or Chat.

    Attributes:
        request_id: its id.
        tenant: who it is for.
        method: name of the RPC.
        model: name of its model; before the router chooses it, the name that the client gave, perhaps "".
        priority: its class.
        arrived: monotonic seconds.
        trace_id: of its span, "" without one.
        prompt_tokens: length of its prompt, 0 until it is known.
        opened: monotonic seconds at which its streams were first sent on their way, 0 before.
        streams: its answers, none while its prompt is made.
        number: counts calls, in order of their arrival.
        took_over: whether this router still had an earlier call of its id, which it has ended.
    """

    request_id: str
    tenant: str
    method: str
    model: str
    priority: int
    arrived: float
    trace_id: str = ""
    prompt_tokens: int = 0
    opened: float = 0.0
    streams: Sequence[RequestStream] = ()
    number: int = field(default_factory=itertools.count(1).__next__)
    took_over: bool = False
    _works: list[Interruptible] = field(default_factory=list)
    _error: ApiError | None = None

    def end(self, error: ApiError) -> None:
        """Ends the call with a status, wherever it is: its client may be gone, or read nothing."""
        self._error = error
        for stream in self.streams:
            stream.drop(error)
        for work in self._works:
            work.interrupt()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets `end` interrupt what is done here.

        Raises:
            ApiError: what `end` was given, also before.
        """
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
        """Holds the id while the call is in flight; gives True if it took over. A tenant learns nothing of others' ids.

        Args:
            call: the call.
            takes_over: True ends a call of this id that is in flight: the client goes on with its broken stream.

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
        """Ends a request because an operator wants it.

        Raises:
            UnknownRequestError: there is none.
        """
        call = self._calls.get((tenant, request_id))
        if call is None:
            raise UnknownRequestError(request_id, tenant)
        call.end(CancelledByOperatorError())
