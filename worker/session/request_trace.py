"""Span, log line and final status of one sequence."""

from __future__ import annotations

from typing import Final, Protocol

import grpc
import structlog

from common.errors import ApiError, DeadlineError, EngineError
from common.limits import MAX_TRACED_STEPS
from worker.engine.outputs import End, RequestOutput
from worker.engine.sequence import EndReason
from worker.engine.step_record import StepRing
from worker.session.sequence_span import SequenceSpan

log = structlog.get_logger(__name__)

# Ends that are not failures.
FINISHES: Final = frozenset({EndReason.EOS, EndReason.STOP_TOKEN, EndReason.STOP_SEQUENCE, EndReason.LENGTH})


class StepSource(Protocol):
    """Engine whose newest steps are recorded."""

    @property
    def steps(self) -> StepRing: ...


class RequestTrace:
    """Reports a sequence's progress to its span and its log line.

    Args:
        rid: of the router's attempt; 0 for a direct call.
        prompt_tokens: of the sequence.
        span: ends with the sequence.
        trace_id: of the span; "" without one.
        seq_id: id of the sequence in the engine.
        engine: has its steps.

    Attributes:
        rid: as given; changes when another router adopts the sequence.
    """

    def __init__(
        self, rid: int, prompt_tokens: int, span: SequenceSpan, trace_id: str, seq_id: int, engine: StepSource
    ) -> None:
        self.rid = rid
        self._prompt_tokens = prompt_tokens
        self._span = span
        self._trace_id = trace_id
        self._seq_id = seq_id
        self._engine = engine
        self._cached_tokens = 0

    def note(self, output: RequestOutput) -> None:
        """Notes an output; the last one ends the span and writes the log line."""
        if output.start is not None:
            self._cached_tokens = output.start.cached_tokens
        if output.end is not None:
            self._end(output.end)

    def _end(self, end: End) -> None:
        assert end.times is not None
        output_tokens = max(0, end.end_pos - self._prompt_tokens)
        reason = end.reason.name.lower()
        counts = {
            "input_tokens": self._prompt_tokens,
            "output_tokens": output_tokens,
            "cached_tokens": self._cached_tokens,
        }
        if self._span.has_steps:
            steps = self._engine.steps.newest_of(self._seq_id, end.times.arrived, MAX_TRACED_STEPS)
            self._span.add_steps(steps, self._seq_id)
        if end.ledger is not None:
            self._span.add_waits(end.ledger, end.times.ended)
        if end.reason in FINISHES:
            self._span.finish(end.times, reason=reason, **counts)
        else:
            self._span.fail(failure(end), end.times, **counts)
        if end.reason is EndReason.NOT_A_NUMBER:
            log.error(end.message, rid=f"{self.rid:x}", trace_id=self._trace_id or None, **counts)
        log.debug("sequence ended", rid=f"{self.rid:x}", reason=reason, trace_id=self._trace_id or None, **counts)


def failure(end: End) -> ApiError | grpc.StatusCode:
    """The status of a sequence that did not end by itself."""
    if end.reason is EndReason.CANCELLED:
        lost = ApiError(grpc.StatusCode.ABORTED, end.message, reason="WORKER_LOST")
        return lost if end.message else grpc.StatusCode.CANCELLED
    if end.reason is EndReason.DEADLINE:
        return DeadlineError("in the engine")
    if end.reason is EndReason.INVALID:
        return ApiError(grpc.StatusCode.INVALID_ARGUMENT, end.message)
    return EngineError(end.message)
