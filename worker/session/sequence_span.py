"""The worker's span of one sequence, and the stages below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from opentelemetry.util.types import AttributeValue

from common.errors import ApiError
from common.telemetry import names
from common.telemetry.failures import harmless
from common.telemetry.ledger import Ledger
from common.telemetry.trace_context import extract, operation_in
from common.telemetry.tracing import OpenSpan, SpanFactory, nanoseconds, usage_attributes, wall_offset_ns
from worker.engine.outputs import SequenceTimes
from worker.engine.step_record import StepRecord

# Waits that are events; the others are spans, or the event `preempted`.
_WAITS: Final = frozenset({names.Stage.GRAMMAR_WAIT, names.Stage.OTHERS_PREFILL, names.Stage.STALL})


def sequence_span(
    tracing: SpanFactory,
    traceparent: str,
    tracestate: str = "",
    *,
    arrived: float,
    model: str = "",
    request_id: str = "",
    rid: str = "",
    worker_id: str = "",
) -> SequenceSpan:
    """Starts the worker's span of a sequence, at its arrival.

    Args:
        tracing: of this process.
        traceparent: of the router's span, as it came with the Submit (or in the metadata of a direct Generate).
        tracestate: likewise.
        arrived: monotonic seconds.
        model: the model's name.
        request_id: id of a request that came without a router; empty otherwise.
        rid: id of a router's sequence, as in log lines; empty otherwise.
        worker_id: this worker.
    """
    context = extract([(names.TRACEPARENT, traceparent), (names.TRACESTATE, tracestate)])
    operation, has_steps = operation_in(context)
    attributes: dict[str, AttributeValue] = {
        names.PROVIDER: names.PROVIDER_FISSILE,
        names.OPERATION: names.CHAT if operation == names.CHAT else names.TEXT_COMPLETION,
        names.REQUEST_MODEL: model,
        names.RESPONSE_ID: request_id,
        names.RID: rid,
        names.WORKER_ID: worker_id,
    }
    kept = {key: value for key, value in attributes.items() if value}
    started = tracing.start(names.WORKER_SPAN, context, kept, start_ns=wall_offset_ns() + nanoseconds(arrived))
    return SequenceSpan() if started is None else RecordedSequenceSpan(started, has_steps=has_steps)


class SequenceSpan:
    """The worker's span of one sequence; this class records nothing. The first of `finish` and `fail` ends it.

    Attributes:
        has_steps: True if the span is to have the sequence's engine steps.
    """

    has_steps = False

    def add_steps(self, steps: Sequence[StepRecord], seq_id: int) -> None:
        """Adds the steps of the sequence with this id, oldest first."""

    def add_waits(self, ledger: Ledger, now: float) -> None:
        """Adds an event for each wait of an ended sequence; `now` is its end."""

    def finish(
        self, times: SequenceTimes, *, reason: str, input_tokens: int, output_tokens: int, cached_tokens: int
    ) -> None:
        """Ends the span of a sequence that ended by itself; `reason` is its end reason in lower case."""

    def fail(
        self,
        error: ApiError | grpc.StatusCode,
        times: SequenceTimes | None = None,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Ends the span of a sequence that was cancelled, ran out of time or lost its engine."""


class RecordedSequenceSpan(SequenceSpan):
    """A sequence's span that is recorded."""

    def __init__(self, open_span: OpenSpan, *, has_steps: bool) -> None:
        self._open = open_span
        self.has_steps = has_steps

    @harmless("traces")
    def add_steps(self, steps: Sequence[StepRecord], seq_id: int) -> None:
        """Adds a child for each step."""
        for step in steps:
            attributes = {
                names.STEP_NUMBER: step.number,
                names.STEP_SEQUENCES: len(step.seq_ids),
                names.STEP_PREFILLS: step.num_prefills,
                names.STEP_TOKENS: sum(step.num_tokens),
                names.STEP_OWN_TOKENS: step.num_tokens[step.seq_ids.index(seq_id)],
                names.STEP_FORWARD: round(1e3 * step.duration_s, 3),
                names.STEP_FREE_BLOCKS: step.free_blocks,
                names.STEP_WAITING: step.num_waiting,
            }
            self._open.add_child(names.STEP_SPAN, step.scheduled, step.finished or step.launched, attributes)

    @harmless("traces")
    def add_waits(self, ledger: Ledger, now: float) -> None:
        """Adds the events."""
        if self._open.is_recorded:
            self._open.add_waits(ledger, _WAITS, now)

    @harmless("traces")
    def finish(
        self, times: SequenceTimes, *, reason: str, input_tokens: int, output_tokens: int, cached_tokens: int
    ) -> None:
        """Ends the span with OK."""
        if self._open.ended:
            return
        self._open.set_attributes(usage_attributes([reason], input_tokens, output_tokens, cached_tokens))
        self._open.end(grpc.StatusCode.OK, end_ns=self._add_phases(times))

    @harmless("traces")
    def fail(
        self,
        error: ApiError | grpc.StatusCode,
        times: SequenceTimes | None = None,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Ends the span with an error."""
        if self._open.ended:
            return
        self._open.set_attributes(usage_attributes([], input_tokens, output_tokens, cached_tokens))
        self._open.fail(error, None if times is None else self._add_phases(times))

    def _add_phases(self, times: SequenceTimes) -> int:
        """Records the children and preemptions; returns the sequence's end as Unix nanoseconds."""
        for name, start, end in times.phases():
            work = times.decode if name == names.DECODE_SPAN else None
            self._open.add_child(name, start, end, {} if work is None else work.attributes())
        if (wait := times.tiers) is not None:
            ended = times.ended if wait.ended is None else wait.ended
            self._open.add_child(names.TIERS_SPAN, wait.began, ended, wait.attributes())
        for time in times.preempted:
            self._open.add_event(names.PREEMPTED_EVENT, at_ns=self._open.unix_ns(time))
        return self._open.unix_ns(times.ended)
