"""The account of one call, filled in on its way and read once, at its end: pure, and without any text of its request.

Invariants:
  * The first end counts: whoever knows why a call ends says it first.
  * Phases add up: `queue_s + prefill_s + decode_s == duration_s` of a call with a first token; before that a wait that
    has ended is all that is known.
  * What a client makes up (ids, names) is shown printable and bounded; prompts, answers and keys are never taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc

from common.errors import ApiError

MAX_SHOWN: Final = 512
_MAX_FIELDS: Final = 4
# A client's own timer ends a call a little before the server's: the deadline has travelled, rounded up.
_LATE_S: Final = 0.02
_LATE_SHARE: Final = 0.01
# Calls that last until somebody has had enough: that is not a failure.
_ENDLESS: Final = ("Health/Watch", "AdminService/WatchLoad", "WorkerService/Session", "/ServerReflectionInfo")
_ENOUGH: Final = frozenset(
    {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
)
_OURS: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


def shown(text: str, limit: int = MAX_SHOWN) -> str:
    """A client's text as it may stand in a log: without control characters, and not too long."""
    cut = text[:limit]
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)[:limit]


class RequestTimes(NamedTuple):
    """Times of a request's stages; monotonic seconds, None for what was not reached.

    Attributes:
        arrived: at this process.
        ended: or now.
        given: to the last worker that it was given to, before its first token.
        first_token: its arrival here.
        last_token: likewise, of the newest one.
        tokens: that have come.
        prefill: how long the worker says that it took.
    """

    arrived: float
    ended: float
    given: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    prefill: float = 0.0

    @property
    def duration_s(self) -> float:
        """From arrival to end."""
        return self.ended - self.arrived

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def queue_s(self) -> float:
        """All before the prefill that brought the first token, on workers too that gave the request back or were lost.

        Before a first token: until it was given to the worker that has it now, or to the end.
        """
        if self.ttft_s is None:
            return (self.ended if self.given is None else self.given) - self.arrived
        return self.ttft_s - (self.prefill_s or 0.0)

    @property
    def prefill_s(self) -> float | None:
        """From the first step to the first token; no clock of another machine makes it longer than there was time."""
        return None if self.ttft_s is None else min(max(self.prefill, 0.0), self.ttft_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        return None if self.first_token is None else self.ended - self.first_token

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token behind the first."""
        if self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / max(1, self.tokens - 1)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Facts of a call; None and "" for what is not known.

    Attributes:
        method: full name of the RPC.
        peer: as gRPC names it.
        arrived: monotonic seconds.
        generates: whether the call asks for an answer of a model, so that its good end is worth a line.
        request_id: the client's, or the one that was made for it.
        trace_id: of its trace.
        model: its name.
        tenant: who it is for.
        key: name of the API key that was shown, never the key.
        prompt_tokens: of the prompt.
        completion_tokens: that were written to the client.
        cached_tokens: of the prompt, found in the prefix cache.
        times: where the time went.
        worker_id: the last worker.
        attempts: how many workers it was given to.
        exact: whether the tokens are those of an undisturbed run.
        adopted: whether it has gone on with a sequence of a router that is gone.
        finish: the finish reason.
        report: reads the record when it is closed.
    """

    method: str = ""
    peer: str = ""
    arrived: float = 0.0
    generates: bool = False
    request_id: str = ""
    trace_id: str = ""
    model: str = ""
    tenant: str = ""
    key: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    times: RequestTimes | None = None
    worker_id: str = ""
    attempts: int | None = None
    exact: bool | None = None
    adopted: bool = False
    finish: str = ""
    report: Callable[[RequestRecord], None] | None = None
    _code: grpc.StatusCode | None = None
    _error: ApiError | None = None
    _crash: BaseException | None = None

    @property
    def code(self) -> grpc.StatusCode:
        """The status; OK of a call that nothing has ended otherwise."""
        return grpc.StatusCode.OK if self._code is None else self._code

    @property
    def crash(self) -> BaseException | None:
        """Exception that nobody had foreseen."""
        return self._crash

    @property
    def level(self) -> str:
        """Log level of the end: error for a fault of this process, debug for good ends that are not answers."""
        if self.code in _OURS:
            return "error"
        if self.code in _ENOUGH and self.method.endswith(_ENDLESS):
            return "debug"
        return "info" if self.generates or self.code is not grpc.StatusCode.OK else "debug"

    @property
    def is_refusal(self) -> bool:
        """True if the call failed before its request was understood: it names no request and no model."""
        return not self.generates and not self.request_id and self.code is not grpc.StatusCode.OK

    def fail(self, error: ApiError | grpc.StatusCode) -> None:
        """The call ends with this error."""
        if self._code is None:
            self._code = error.code if isinstance(error, ApiError) else error
            self._error = error if isinstance(error, ApiError) else None

    def cancel(self, now: float, remaining: float | None) -> grpc.StatusCode:
        """The call was broken off, with so many seconds left to its deadline; returns its status."""
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED if self.is_late(now, remaining) else grpc.StatusCode.CANCELLED)
        return self.code

    def is_late(self, now: float, remaining: float | None) -> bool:
        """True if a call that is broken off now ends by its deadline."""
        return remaining is not None and remaining <= _LATE_S + _LATE_SHARE * (now - self.arrived)

    def fault(self, error: BaseException) -> None:
        """Something was raised that nobody had foreseen."""
        self._crash = error

    def succeed(self, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """The call's handler has returned, whatever was about to end it; `code` is what it has set."""
        self._code, self._error = code, None

    def end(self, error: BaseException, now: float, remaining: float | None) -> None:
        """The call is over; `error` left its handler. The status is what has been said before, if anything."""
        if isinstance(error, ApiError):
            self.fail(error)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.cancel(now, remaining)
        else:
            self.fault(error)
            self.fail(grpc.StatusCode.UNKNOWN)

    def close(self) -> None:
        """The end is certain; whatever becomes of its report, the call does not notice. Later calls do nothing."""
        report, self.report = self.report, None
        if report is not None:
            with contextlib.suppress(Exception):
                report(self)

    def fields(self, now: float) -> dict[str, Any]:
        """Fields of the call's line, in order; without those that are not known."""
        times = RequestTimes(self.arrived, now) if self.times is None else self.times
        fields: dict[str, Any] = {
            "trace_id": self.trace_id,
            "request_id": shown(self.request_id),
            "method": shown(self.method),
            "status": self.code.name,
            "reason": self.finish if self._error is None else self._error.reason,
            "fields": self._refused_fields(),
            "model": shown(self.model),
            "tenant": shown(self.tenant),
            "key": self.key,
            "peer": self.peer,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            **(self._phases(times) if self.generates else {}),
            "duration_ms": _ms(times.duration_s),
            "attempts": self.attempts,
            "exact": self.exact,
            "adopted": self.adopted or None,
            "worker_id": self.worker_id,
        }
        return {name: value for name, value in fields.items() if value or not (value is None or value in ("", []))}

    def _refused_fields(self) -> list[str]:
        violations = () if self._error is None else self._error.violations
        return [shown(violation.path, 128) for violation in violations[:_MAX_FIELDS]]

    def _phases(self, times: RequestTimes) -> dict[str, float | None]:
        return {
            "queue_ms": _ms(times.queue_s),
            "prefill_ms": _ms(times.prefill_s),
            "decode_ms": _ms(times.decode_s),
            "ttft_ms": _ms(times.ttft_s),
            "tpot_ms": _ms(times.tpot_s),
        }


# Record of the call that the current task works on.
_current: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


def current_record() -> RequestRecord:
    """The record of the call in hand; outside of one, a record that nobody reads."""
    return _current.get() or RequestRecord(arrived=time.monotonic())


def begin_record(record: RequestRecord) -> None:
    """The current task works on this call from now on."""
    _current.set(record)


def _ms(seconds: float | None) -> float | None:
    # In hundredths. `round` to two digits takes a microsecond.
    return None if seconds is None else round(seconds * 100_000) / 100
