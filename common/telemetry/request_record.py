"""Record of one call for its log line: filled in while the call runs, read once at its end. Pure.

Invariants:
  * The first end counts: the code that knows why a call ends records it first.
  * Phases add up: `queue_s + prefill_s + decode_s == duration_s` for a call with a first token. Before the first token
      only waits that have ended are known.
  * Ids and names from clients are shown printable and bounded. Prompts, answers and keys are never recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import grpc

from common.errors import ApiError
from common.telemetry.ledger import Ledger
from common.telemetry.names import Stage

MAX_SHOWN: Final = 512
_MAX_FIELDS: Final = 4
# A client's own timer ends a call slightly before the server's, because the deadline is rounded up on its way.
_LATE_S: Final = 0.02
_LATE_SHARE: Final = 0.01
# Calls that last until the client ends them. Such an end is not a failure.
_ENDLESS: Final = (
    "Health/Watch",
    "AdminService/WatchLoad",
    "WorkerService/Session",
    "/ServerReflectionInfo",
    "GRPCInferenceService/ModelStreamInfer",
    "/SubscribeKvEvents",
)
_ENOUGH: Final = frozenset(
    {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
)
_OURS: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


def shown(text: str, limit: int = MAX_SHOWN) -> str:
    """A client's text made safe for a log: without control characters, and short."""
    cut = text[:limit]
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)[:limit]


class RequestTimes(NamedTuple):
    """Times of a request's stages; monotonic seconds, None for stages that were not reached.

    Attributes:
        arrived: arrival at this process.
        ended: end of the request, or now.
        given: last submission to a worker before the first token.
        first_token: arrival of the first token here.
        last_token: arrival of the newest token here.
        tokens: number of tokens that have arrived.
        prefill: duration of the prefill by the worker's clock.
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
        """Time from arrival to end."""
        return self.ended - self.arrived

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def on_worker_s(self) -> float | None:
        """Time from the submission to the worker that gave the first token to that token."""
        return None if self.first_token is None or self.given is None else self.first_token - self.given

    @property
    def queue_s(self) -> float:
        """Time before the prefill that gave the first token, including time on workers that gave the request back or
        were lost.

        Before a first token: until the submission to the current worker, or to the end.
        """
        if self.ttft_s is None:
            return (self.ended if self.given is None else self.given) - self.arrived
        return self.ttft_s - (self.prefill_s or 0.0)

    @property
    def prefill_s(self) -> float | None:
        """Time from the first step to the first token. A wrong clock of another machine cannot make it longer than the
        whole wait."""
        return None if self.ttft_s is None else min(max(self.prefill, 0.0), self.ttft_s)

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the end."""
        return None if self.first_token is None else self.ended - self.first_token

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / max(1, self.tokens - 1)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Facts of a call; None and "" for unknown ones.

    Attributes:
        method: full name of the RPC.
        peer: as gRPC names it.
        arrived: monotonic seconds.
        generates: True if the call asks a model for an answer, so that its success gets a line too.
        request_id: the client's, or one made for it.
        trace_id: of its trace.
        model: its name.
        tenant: of the call.
        key: name of its API key, never the key itself.
        prompt_tokens: of the prompt.
        completion_tokens: written to the client.
        cached_tokens: prompt tokens found in the prefix cache.
        times: of its stages.
        worker_id: the last worker.
        attempts: number of workers that had it.
        exact: True if the tokens are those of an undisturbed run.
        adopted: True if it continued a sequence of a router that is gone.
        finish: the finish reason.
        ledger: its time by stage; it starts with the arrival.
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
    ledger: Ledger = field(init=False)
    report: Callable[[RequestRecord], None] | None = None
    _code: grpc.StatusCode | None = None
    _error: ApiError | None = None
    _crash: BaseException | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(Stage.PREPARE, self.arrived)

    @property
    def code(self) -> grpc.StatusCode:
        """The status; OK unless something else was recorded."""
        return grpc.StatusCode.OK if self._code is None else self._code

    @property
    def crash(self) -> BaseException | None:
        """The unexpected exception, if there was one."""
        return self._crash

    @property
    def level(self) -> str:
        """Log level of the end: error for a fault of this process, debug for a success without an answer."""
        if self.code in _OURS:
            return "error"
        if not self.generates and self.code in _ENOUGH and self.method.endswith(_ENDLESS):
            return "debug"
        return "info" if self.generates or self.code is not grpc.StatusCode.OK else "debug"

    @property
    def is_refusal(self) -> bool:
        """True if the call failed before its request was understood: it names no request and no model."""
        return not self.generates and not self.request_id and self.code is not grpc.StatusCode.OK

    def fail(self, error: ApiError | grpc.StatusCode) -> None:
        """Records that the call ends with this error."""
        if self._code is None:
            self._code = error.code if isinstance(error, ApiError) else error
            self._error = error if isinstance(error, ApiError) else None

    def cancel(self, now: float, remaining: float | None) -> grpc.StatusCode:
        """Records that the call was broken off with `remaining` seconds to its deadline. Returns its status."""
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED if self.is_late(now, remaining) else grpc.StatusCode.CANCELLED)
        return self.code

    def is_late(self, now: float, remaining: float | None) -> bool:
        """True if a call broken off now ends because of its deadline."""
        return remaining is not None and remaining <= _LATE_S + _LATE_SHARE * (now - self.arrived)

    def fault(self, error: BaseException) -> None:
        """Records an unexpected exception."""
        self._crash = error

    def succeed(self, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        """Records that the call's handler returned with `code`, whatever was about to end it."""
        self._code, self._error = code, None

    def end(self, error: BaseException, now: float, remaining: float | None) -> None:
        """Records that `error` left the call's handler. A status recorded earlier wins."""
        if isinstance(error, ApiError):
            self.fail(error)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.cancel(now, remaining)
        else:
            self.fault(error)
            self.fail(grpc.StatusCode.UNKNOWN)

    def close(self) -> None:
        """Closes the record and reports it. A failing report does not affect the call; later calls do nothing."""
        report, self.report = self.report, None
        if report is not None:
            with contextlib.suppress(Exception):
                report(self)

    def fields(self, now: float) -> dict[str, Any]:
        """Fields of the call's line, in order, without unknown ones."""
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
            **(self._parts(now) if self.generates else {}),
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

    def _parts(self, now: float) -> dict[str, Any]:
        """Time by stage, and the requests that cost most of it."""
        blamed = {
            str(stage): {"request_id": blame.request_id, "tenant": blame.tenant, "ms": _ms(blame.seconds)}
            for stage, blame in self.ledger.blames.items()
        }
        return {
            "parts_ms": {str(stage): _ms(seconds) for stage, seconds in self.ledger.parts(now).items()},
            "blamed": blamed or None,
        }


# Record of the current task's call.
_current: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


def current_record() -> RequestRecord:
    """The record of the current call; outside of a call, a record that is never reported."""
    return _current.get() or RequestRecord(arrived=time.monotonic())


def begin_record(record: RequestRecord) -> None:
    """Makes this the record of the current task's call."""
    _current.set(record)


def _ms(seconds: float | None) -> float | None:
    # In hundredths: `round` to two digits would take a microsecond.
    return None if seconds is None else round(seconds * 100_000) / 100
