"""The answers of one door request: engine outputs in, DoorEvents out. They merge while the peer is slow.

Invariants:
  * The first event is DoorPrompt, unless no token was computed. The concatenated tokens and text of an index are those
    of the answer, whatever runs they arrived in.
  * Each index has one finish, in its last output, unless the call fails: then `next_events` raises once, behind
    everything before the failure.
  * A stop string ends its sequence in the engine at once, even if the peer does not read.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence

import grpc

from common.errors import ApiError, ConstraintFailedError
from common.limits import MAX_MESSAGE_LOGPROBS
from common.params.sampling_params import SamplingParams
from common.telemetry.request_record import RequestRecord, RequestTimes
from common.text.answer_text import AnswerText
from common.wire.logprob_rows import TokenLogprobs, unpack
from worker.doors.door_request import DoorEvent, DoorFinish, DoorOutput, DoorPrompt, DoorUsage, FinishKind
from worker.engine.outputs import End, RequestOutput, Start
from worker.engine.sequence import EndReason
from worker.engine.sequence import Sequence as EngineSequence
from worker.session.kv_session import KvSession
from worker.session.request_trace import RequestTrace, failure

_FINISHES = {
    EndReason.EOS: FinishKind.STOP,
    EndReason.STOP_TOKEN: FinishKind.STOP,
    EndReason.STOP_SEQUENCE: FinishKind.STOP,
    EndReason.CONSTRAINT: FinishKind.STOP,
    EndReason.LENGTH: FinishKind.LENGTH,
}


class DoorAnswer:
    """One sequence of a call, and its output that the peer has not got yet. Implements OwnedSequence.

    Attributes:
        seq: in the engine.
        end_pos: number of tokens so far, including the prompt.
        owner: the call, which is notified of steps.
        start: facts at the first token; None before.
        given: logprobs of the prompt so far.
        pooled: hidden states (float32) of an embedded prompt.
        finish: the end of the answer; None before, and after a failure.
        error: the failure of the answer; None without one.
    """

    def __init__(
        self, owner: DoorCall, seq: EngineSequence, text: AnswerText, trace: RequestTrace, *, keeps_stop_token: bool
    ) -> None:
        self.seq = seq
        self.end_pos = seq.num_tokens
        self.owner = owner
        self.start: Start | None = None
        self.given: list[TokenLogprobs] = []
        self.pooled = b""
        self.finish: DoorFinish | None = None
        self.error: ApiError | None = None
        self._text = text
        self._trace = trace
        self._is_aborted = False
        # True once the finish has been taken.
        self._is_taken = False
        self._silent = {EndReason.EOS} if keeps_stop_token else {EndReason.EOS, EndReason.STOP_TOKEN}
        self._output = DoorOutput(seq.choice)

    @property
    def is_over(self) -> bool:
        """True if the answer takes no more output."""
        return self.finish is not None or self.error is not None

    def abort(self) -> None:
        """Ends the answer as aborted when the engine says that it has ended."""
        self._is_aborted = True

    def on_output(self, output: RequestOutput) -> None:
        """Takes the output of one step."""
        self._trace.note(output)
        if self.is_over:
            return
        if output.start is not None:
            self.start = output.start
        params = self.seq.sampling_params
        if output.given is not None:
            self.given += unpack(params.prompt_logprob_layout, output.given.rows)
        self.pooled = self.pooled or output.pooled
        self._add(output, params)
        if output.end is not None and not self.is_over:
            self._end(output.end)

    def take(self) -> DoorOutput | None:
        """The output since the last call, with at most MAX_MESSAGE_LOGPROBS logprobs; None if there is none."""
        if self._is_taken:
            return None
        output = self._output
        if len(output.logprobs) > MAX_MESSAGE_LOGPROBS:
            cut = slice(MAX_MESSAGE_LOGPROBS)
            part = DoorOutput(output.index, output.token_ids[cut], logprobs=output.logprobs[cut])
            del output.token_ids[cut], output.logprobs[cut]
            return part
        output.finish = self.finish
        if not (output.token_ids or output.text or output.finish):
            return None
        self._output = DoorOutput(self.seq.choice)
        self._is_taken = output.finish is not None
        return output

    def _add(self, output: RequestOutput, params: SamplingParams) -> None:
        """Adds tokens with their text and logprobs, up to the token that completes a stop string."""
        new, made = output.output_tokens, self._output
        num_read = len(new) - (output.end_reason in self._silent)
        before = len(made.token_ids)
        for piece in self._text.push(new[:num_read]):
            made.token_ids += piece.token_ids
            made.text += piece.text
        if self._text.matched is None:
            made.token_ids += new[num_read:]
        if output.logprobs:
            rows = unpack(params.logprob_layout, output.logprobs)
            made.logprobs += rows[: len(made.token_ids) - before]
        if self._text.matched is not None:
            self._stop_at(self._text.matched)

    def _end(self, end: End) -> None:
        kind = _FINISHES.get(end.reason)
        if kind is not None:
            self._output.text += self._text.flush().text
            if self._text.matched is not None:
                self.finish = DoorFinish(FinishKind.STOP, stop_string=self._text.matched)
                return
            is_eos, is_token = end.reason is EndReason.EOS, end.reason is EndReason.STOP_TOKEN
            self.finish = DoorFinish(
                kind,
                eos_token_id=end.stop_token_id if is_eos else None,
                stop_token_id=end.stop_token_id if is_token else None,
            )
        elif self._is_aborted and end.reason is EndReason.CANCELLED:
            self._output.text += self._text.flush().text
            self.finish = DoorFinish(FinishKind.ABORTED)
        else:
            self.error = _error_of(end)

    def _stop_at(self, stop_string: str) -> None:
        self.finish = DoorFinish(FinishKind.STOP, stop_string=stop_string)
        self.owner.cancel([self.seq.id])


class DoorCall:
    """One request at a door. Made by DoorAdapter.

    Args:
        request_id: the peer's, or one made for it.
        token_ids: of the prompt.
        cancel: ends sequences in the engine.
        session: a KV session that ends with the call, None without one.

    Attributes:
        request_id, token_ids, session: as given.
        answers: by index; set once, before the call is submitted.
    """

    def __init__(
        self,
        request_id: str,
        token_ids: array[int],
        cancel: Callable[[Iterable[int]], None],
        session: KvSession | None = None,
    ) -> None:
        self.request_id = request_id
        self.session = session
        self.token_ids = token_ids
        self.answers: Sequence[DoorAnswer] = ()
        self.cancel = cancel
        self._news = asyncio.Event()
        self._has_begun = False
        # Answers whose finish has not been handed out.
        self._num_open = 0
        self._num_tokens = 0

    @property
    def is_done(self) -> bool:
        """True if every answer's finish has been returned by `next_events`."""
        return self._num_open == 0

    @property
    def is_over(self) -> bool:
        """True if no answer takes more output, whether or not it has been returned."""
        return all(answer.is_over for answer in self.answers)

    @property
    def usage(self) -> DoorUsage:
        """Tokens of the events so far."""
        cached = next((each.start.cached_tokens for each in self.answers if each.start is not None), 0)
        return DoorUsage(len(self.token_ids), self._num_tokens, cached)

    def begin(self, answers: Sequence[DoorAnswer]) -> None:
        """Sets the call's answers."""
        self.answers, self._num_open = answers, len(answers)

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """Wakes the call."""
        self._news.set()

    def abort(self) -> None:
        """Ends the answers that have not ended; each gets a finish of FinishKind.ABORTED."""
        for answer in self.answers:
            answer.abort()
        self.close()

    def close(self) -> None:
        """Ends what the engine still runs of this call."""
        self.cancel([answer.seq.id for answer in self.answers])

    async def next_events(self) -> list[DoorEvent]:
        """Everything since the last call, in the order of the answers' indexes; waits until there is something.

        Raises:
            ApiError: an answer failed, and all events before that have been returned.
        """
        while not (events := self._take()):
            await self._news.wait()
            self._news.clear()
        return events

    async def pooled(self) -> bytes:
        """Hidden states (float32) of an embedded prompt.

        Raises:
            ApiError: it failed.
        """
        while not self.answers[0].is_over:
            await self._news.wait()
            self._news.clear()
        if self.answers[0].error is not None:
            raise self.answers[0].error
        return self.answers[0].pooled

    def account(self, record: RequestRecord, arrived: float, now: float) -> None:
        """Records the call's tokens and times, however it ended."""
        usage = self.usage
        record.completion_tokens, record.cached_tokens = usage.completion_tokens, usage.cached_tokens
        finishes = [answer.finish.kind.name.lower() for answer in self.answers if answer.finish is not None]
        if len(finishes) == len(self.answers):
            record.finish = finishes[0]
        start = next((answer.start for answer in self.answers if answer.start is not None), None)
        record.times = RequestTimes(arrived, now)
        if start is not None:
            record.times = RequestTimes(
                arrived,
                now,
                first_token=arrived + start.queue_s + start.prefill_s,
                last_token=now,
                tokens=usage.completion_tokens,
                prefill=start.prefill_s,
            )

    def _take(self) -> list[DoorEvent]:
        events: list[DoorEvent] = []
        first = self.answers[0]
        # The logprobs of the prompt come with the first answer, and the others wait for them.
        waits = first.seq.sampling_params.prompt_logprobs is not None
        is_ready = not waits or first.start is not None or first.is_over
        start = next((answer.start for answer in self.answers if answer.start is not None), None)
        if not self._has_begun and start is not None and is_ready:
            self._has_begun = True
            from_pos = first.seq.sampling_params.prompt_logprobs_start
            events.append(DoorPrompt(self.token_ids, start.cached_tokens, tuple(first.given), from_pos))
        if is_ready:
            for output in filter(None, (answer.take() for answer in self.answers)):
                self._num_tokens += len(output.token_ids)
                self._num_open -= output.finish is not None
                events.append(output)
        if not events:
            for answer in self.answers:
                if answer.error is not None:
                    raise answer.error
        return events


def _error_of(end: End) -> ApiError:
    """The error of an answer that did not end by itself."""
    if end.reason is EndReason.CONSTRAINT_FAILED:
        return ConstraintFailedError(end.message)
    if end.reason is EndReason.ERROR:
        return ApiError(grpc.StatusCode.ABORTED, end.message or "the engine failed", reason="WORKER_LOST")
    error = failure(end)
    return error if isinstance(error, ApiError) else ApiError(grpc.StatusCode.CANCELLED, "cancelled")
