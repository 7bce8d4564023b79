"""From the tokens of one sequence to the parts of the client's stream.

Invariants:
  * Tokens are appended iff they continue what is there (rule S2); an end counts iff all its tokens are there (S3).
  * The concatenated text of all parts is the decoded text of the delivered tokens, without the token that ended the
    sequence and without a matched stop string (unless asked for). It does not depend on how the tokens were framed.
    Where special tokens are kept, an end-of-sequence token is text like any other.
  * An answer that is read in channels has that text in them (`router.answers.reading`), each by itself without a gap.
  * An echoed prompt comes with the first token: in front of all text and all token ids, and counted nowhere.
  * `delivered` counts what the client gets, an end-of-sequence or stop token included; tokens behind a stop string are
    dropped and not counted.
  * Exactly one part has a finish, it is the last, and a stream that fails has none.
  * What the client has not read is one merged part, bounded by `max_unread_tokens`.
  * `token_ids` are the delivered tokens: behind the prompt they are what another worker needs to go on (rule S5).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import (
    ApiError,
    EngineError,
    NoWorkerError,
    ResumeMismatchError,
    RouterEndingError,
    SlowClientError,
    WorkerLostError,
)
from common.limits import MAX_MESSAGE_LOGPROBS, MAX_UNREAD_TOKENS
from common.text.answer_text import AnswerText, TextPiece
from router.answers.answer_logprobs import AnswerLogprobs, LogprobGapError
from router.answers.channels.parser import Channel, Part
from router.answers.delivered_text import DeliveredText
from router.answers.delivered_tokens import DeliveredTokens
from router.answers.logit_digests import LogitChain
from router.answers.reading import ChannelReader
from router.answers.stream_chunk import Echo, FinishInfo, FirstTokenInfo, StreamChunk, ending_of, error_of
from router.answers.unread_parts import UnreadParts


class GapError(Exception):
    """The worker's tokens or end do not continue what the router has: the Session is unusable (rule S2)."""


# Ends that a client sees as a finish; the others are failures.
_STOPS = (
    wpb.END_REASON_EOS,
    wpb.END_REASON_STOP_TOKEN,
    wpb.END_REASON_STOP_SEQUENCE,
    wpb.END_REASON_CONSTRAINT,
)


class StreamAssembly:
    """One answer on its way to the client.

    Args:
        prompt_tokens: length of the prompt, the position of the first token.
        text: turns the tokens into text and finds stop strings; gives a piece for each token if there is a `reader`.
        return_token_ids: whether parts carry token ids.
        max_unread_tokens: a client that leaves more unread is dropped.
        delivered_text: part of the text that the client has already, None where there is none.
        delivered_tokens: tokens that it has already and that come again; None where there are none.
        echo: the prompt, where the client wants it in front of the answer.
        keeps_special_tokens: True if the detokenizer leaves special tokens in the text.
        logprobs: takes the logprobs that are wanted; None where there are none.
        logit_chain: takes the digests of logits that a receipt wants; None where it wants none.
        reader: reads the text in channels; None where all is content.

    `worker_id` is set when the request is submitted to a worker, anew for each attempt; `have` is the number of tokens,
    prompt included: the position of the next one. `most_tokens` is what `have` is at most, when that is known. `pooled`
    has the hidden states (float32) of a prompt that is embedded. `num_left_out` counts tokens that came although the
    client has them. `is_dropped` is true once nothing more goes to the client but a status.
    """

    def __init__(
        self,
        prompt_tokens: int,
        *,
        text: AnswerText,
        return_token_ids: bool = False,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        delivered_text: DeliveredText | None = None,
        delivered_tokens: DeliveredTokens | None = None,
        echo: Echo | None = None,
        keeps_special_tokens: bool = False,
        logprobs: AnswerLogprobs | None = None,
        logit_chain: LogitChain | None = None,
        reader: ChannelReader | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.num_tokens = prompt_tokens
        self.most_tokens = 0
        self.token_ids = array("I")
        self.logit_chain = logit_chain
        self.pooled = b""
        self.worker_id = ""
        self.start = FirstTokenInfo()
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self._text = text
        self._max_unread_tokens = max_unread_tokens
        self._delivered_text = delivered_text
        self._delivered_tokens = delivered_tokens
        # True while what comes is left out.
        self._is_delivered = False
        self.num_left_out = 0
        self._echo = echo
        self._silent_ends = {wpb.END_REASON_STOP_TOKEN, wpb.END_REASON_EOS}
        if keeps_special_tokens:
            self._silent_ends.remove(wpb.END_REASON_EOS)
        self._logprobs = logprobs
        self._reader = reader
        # Tokens that the sequence is given: the prompt, and what the client has already.
        self._num_given = prompt_tokens
        self._unread = UnreadParts(logprobs, keeps_token_ids=return_token_ids, has_channels=reader is not None)
        self._sent_any = False
        self._ending: FinishInfo | None = None
        self._error: ApiError | None = None
        self.is_dropped = False

    @property
    def delivered(self) -> int:
        """Number of tokens that the client gets, or has got."""
        return len(self.token_ids)

    @property
    def taken(self) -> int:
        """Number of tokens that have been handed out to be written."""
        return self._unread.taken

    @property
    def has_generated(self) -> bool:
        """True if a worker has added to what the answer began with."""
        return self.num_tokens > self._num_given

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of reasoning among those that the client gets, or has got."""
        return 0 if self._reader is None else self._reader.reasoning_tokens(0, self.delivered)

    @property
    def taken_reasoning_tokens(self) -> int:
        """Number of tokens of reasoning among those that have been handed out."""
        end = self.delivered - self._unread.num_tokens
        return 0 if self._reader is None else self._reader.reasoning_tokens(end - self.taken, end)

    @property
    def logprob(self) -> float | None:
        """Sum of the raw logprobs of the answer's tokens; None where they are not wanted."""
        return None if self._logprobs is None else self._logprobs.total

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if logprobs of the prompt have not been handed out."""
        return self._logprobs is not None and self._logprobs.has_prompt

    @property
    def is_closed(self) -> bool:
        """True if the stream takes no more tokens: it has an ending or has failed."""
        return self._ending is not None or self._error is not None

    @property
    def error(self) -> ApiError | None:
        """The failure of the stream, None without one."""
        return self._error

    def begin_attempt(self) -> None:
        """Another worker has the request: it sends logprobs of given tokens anew if nothing has been generated."""
        if self._logprobs is not None and not self.has_generated:
            self._logprobs.restart()

    def begin(self, start: FirstTokenInfo) -> None:
        """Notes what the worker said with the first token. A later attempt's first token is not the stream's."""
        if self.first_token_time is None:
            self.start = start

    def resume_behind(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that the client has already: they are output for all that follows, and are not sent again."""
        self._deliver(token_ids)
        self._num_given = self.num_tokens
        self._unread.clear()

    def append_given_logprobs(self, first_pos: int, rows: bytes) -> None:
        """Takes logprobs of given tokens, which come before the first generated one."""
        if self._logprobs is None or self.is_closed or self.has_generated:
            return
        try:
            self._logprobs.add_given(first_pos, rows)
        except LogprobGapError as error:
            self.fail(_no_logprobs(self.worker_id, error))

    def append(
        self,
        first_pos: int,
        token_ids: Sequence[int],
        now: float,
        end: wpb.SequenceEnd | None = None,
        logprobs: bytes = b"",
    ) -> None:
        """Appends a run of tokens with their logprobs, and the end that came with the last of them.

        Repeated runs are dropped. Once a stop string matches, `is_closed` turns true and the rest is dropped.

        Raises:
            GapError: the run leaves a gap, or the end names another number of tokens.
        """
        if self.is_closed or first_pos < self.num_tokens:
            return
        if first_pos > self.num_tokens:
            raise GapError(f"tokens at position {first_pos} where {self.num_tokens} were expected")
        if self._delivered_tokens is not None:
            self._append_delivered(self._delivered_tokens, first_pos, token_ids, now, end, logprobs)
            return
        if self._logprobs is not None:
            if len(token_ids) > MAX_MESSAGE_LOGPROBS:
                self._append_in_parts(first_pos, token_ids, now, end, logprobs)
                return
            if not self._has_logprobs(len(token_ids), logprobs):
                return
        if token_ids:
            if self.first_token_time is None:
                self.first_token_time = now
            self.last_token_time = now
            before = self.delivered
            # The token that stops the sequence is not part of its text.
            stopper = end is not None and end.reason in self._silent_ends
            self._deliver(token_ids[:-1] if stopper else token_ids)
            if stopper and not self.is_closed:
                self._count(token_ids[-1:])
            if self._logprobs is not None:
                self._logprobs.add(tuple(token_ids[: self.delivered - before]), logprobs)
                self._unread.mark(self._logprobs.num_waiting)
            if self._unread.num_tokens > self._max_unread_tokens:
                self.drop_slow_client()
        if end is not None and not self.is_closed:
            self.finish(end)

    def _append_delivered(
        self,
        delivered: DeliveredTokens,
        first_pos: int,
        token_ids: Sequence[int],
        now: float,
        end: wpb.SequenceEnd | None,
        logprobs: bytes,
    ) -> None:
        """Appends a run that begins with tokens which the client has: these are left out, if they are the same."""
        count = min(delivered.left, len(token_ids))
        size = count * len(logprobs) // max(1, len(token_ids))
        is_all = count == len(token_ids)
        self._delivered_tokens, self._is_delivered = None, True
        self.append(first_pos, token_ids[:count], now, end if is_all else None, logprobs[:size])
        self._is_delivered = False
        self._check_delivered(delivered, token_ids[:count])
        self._unread.clear()
        if delivered.left:
            self._delivered_tokens = delivered
        elif not is_all:
            self.append(first_pos + count, token_ids[count:], now, end, logprobs[size:])

    def _check_delivered(self, delivered: DeliveredTokens, token_ids: Sequence[int]) -> None:
        """Fails the stream if what has come is not the beginning of what has been delivered."""
        try:
            delivered.push(token_ids)
        except ResumeMismatchError as error:
            self._ending, self._error = None, error
            return
        is_short = self._ending is not None and self.delivered < delivered.count
        # Tokens have the text that came with them, neither more nor less.
        is_other = not delivered.are_named and (
            self._unread.has_text or (not delivered.left and self._delivered_text is not None)
        )
        if self._error is None and (is_short or is_other):
            self._ending, self._error = None, delivered.mismatch()

    def _append_in_parts(
        self, first_pos: int, token_ids: Sequence[int], now: float, end: wpb.SequenceEnd | None, logprobs: bytes
    ) -> None:
        """Appends a run that has more tokens than a message has logprobs."""
        width = len(logprobs) // len(token_ids)
        for start in range(0, len(token_ids), MAX_MESSAGE_LOGPROBS):
            part = token_ids[start : start + MAX_MESSAGE_LOGPROBS]
            rows = logprobs[start * width : (start + len(part)) * width]
            is_last = start + len(part) == len(token_ids)
            self.append(first_pos + start, part, now, end if is_last else None, rows)

    def finish(self, end: wpb.SequenceEnd) -> None:
        """Ends the stream as the worker says; a refusal too, but no other end of `router.workers.session_state.LOSSES`.

        Raises:
            GapError: the end names another number of tokens.
        """
        if self.is_closed:
            return
        if end.reason in _STOPS or end.reason == wpb.END_REASON_LENGTH:
            if end.end_pos != self.num_tokens:
                raise GapError(f"an end at {end.end_pos} tokens where {self.num_tokens} arrived")
            self._emit(self._text.flush())
            matched = self._text.matched
            stop_string = None if matched is None else pb.StopDetail(stop_string=matched)
            self._end(ending_of(end) if matched is None else FinishInfo(pb.FINISH_REASON_STOP, stop_string))
        else:
            self.fail(error_of(end))

    def lose_worker(self, why: str) -> None:
        """Ends the stream because its worker is gone: retry-safe as long as the client has got nothing."""
        if self.is_closed:
            return
        if self._sent_any:
            self.fail(WorkerLostError(self.worker_id, self.delivered))
        else:
            self._unread.clear()
            self.fail(NoWorkerError(why))

    def end_with_router(self) -> None:
        """Ends the stream because this router ends: retry-safe as long as the client has got nothing."""
        if self.is_closed:
            return
        if not self._sent_any:
            self._unread.clear()
        self.fail(RouterEndingError(self.delivered if self._sent_any else 0))

    def drop_slow_client(self, waited_s: float | None = None) -> None:
        """Ends the stream of a client that does not read, a finished one too: its finish has not been read either.

        Args:
            waited_s: how long a message has waited for the client, seconds; None when its unread tokens are too many.
        """
        self.drop(SlowClientError(self._unread.num_tokens, waited_s))

    def drop(self, error: ApiError) -> None:
        """Ends the stream with a status at once, a finished one too: what the client has not read is gone."""
        self._ending = None
        self._unread.clear()
        self._error = error
        self.is_dropped = True

    def fail(self, error: ApiError) -> None:
        """Ends the stream with a status; what had arrived before is still delivered. A no-op once it is closed."""
        if not self.is_closed:
            self._error = error

    def next_chunk(self) -> StreamChunk | None:
        """Everything that waits, as one part; None when nothing does.

        Raises:
            ApiError: the stream has failed and everything before that has been taken.
        """
        if self._error is not None and not self._unread.num_tokens:
            raise self._error
        if not self._unread.num_tokens and self._ending is None:
            return None
        start = None if self._sent_any else self.start
        self._sent_any = True
        return self._unread.take(start, self._ending)

    def _has_logprobs(self, num_tokens: int, rows: bytes) -> bool:
        """True if tokens have the logprobs that are wanted; the stream fails if they have not."""
        assert self._logprobs is not None
        try:
            self._logprobs.check(num_tokens, rows)
        except LogprobGapError as error:
            self.fail(_no_logprobs(self.worker_id, error))
        return not self.is_closed

    def _deliver(self, token_ids: Sequence[int]) -> None:
        """Counts tokens and adds their text, up to the token that ends the answer."""
        if self._echo is not None:
            echo, self._echo = self._echo, None
            self._add(Part(Channel.CONTENT, echo.text))
            self._unread.add_ids(echo.token_ids)
        for piece in self._text.push(token_ids):
            self._count(piece.token_ids)
            self._emit(piece)
            if self._text.matched is not None:
                self._end(FinishInfo(pb.FINISH_REASON_STOP, pb.StopDetail(stop_string=self._text.matched)))
            if self._reader is not None and self._end_token(self._reader):
                return

    def _end_token(self, reader: ChannelReader) -> bool:
        """Counts a token of an answer that is read in channels; True if it is the last one."""
        reader.end_token()
        if reader.is_done and not self.is_closed:
            self._end(FinishInfo(pb.FINISH_REASON_TOOL_CALLS))
        return self.is_closed

    def _emit(self, piece: TextPiece) -> None:
        """Adds a piece of text to what the client gets next, in its channels."""
        if self._reader is None:
            self._add(Part(Channel.CONTENT, piece.text))
            return
        try:
            parts = self._reader.read(piece)
        except TimeoutError:
            self.fail(EngineError("the response template of the model takes too long to read its answer"))
            return
        for part in parts:
            self._add(part)

    def _add(self, part: Part) -> None:
        """Adds to what the client gets next, but for what it has already."""
        if self._delivered_text is None:
            self._unread.add(part)
            return
        try:
            rest = self._delivered_text.push(part)
        except ResumeMismatchError as error:
            self.fail(error)
            return
        if not self._delivered_text.left:
            self._delivered_text = None
        if rest is not None:
            self._unread.add_last(rest)

    def _end(self, ending: FinishInfo) -> None:
        """Ends the stream; one that has not reached what was delivered has failed."""
        if self._reader is not None and self._error is None:
            ending = self._finish_reading(self._reader, ending)
        if self._delivered_text is not None:
            self.fail(self._delivered_text.mismatch())
        elif self._error is None:
            self._ending = ending

    def _finish_reading(self, reader: ChannelReader, ending: FinishInfo) -> FinishInfo:
        """Takes what channels hold back until the end; the ending, now that all has been read."""
        if reader.is_done:
            return ending
        eos = None if ending.stop is None or not ending.stop.HasField("eos_token_id") else ending.stop.eos_token_id
        # One that is kept has been read.
        token_id = eos if wpb.END_REASON_EOS in self._silent_ends else None
        for part in reader.finish(is_cut=ending.reason == pb.FINISH_REASON_LENGTH, token_id=token_id):
            self._add(part)
        is_call = reader.ends_with_call and ending.reason == pb.FINISH_REASON_STOP
        return replace(ending, reason=pb.FINISH_REASON_TOOL_CALLS) if is_call else ending

    def _count(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if self._delivered_text is not None or self._is_delivered:
            self.num_left_out += len(token_ids)
            return
        self._unread.add_tokens(token_ids)


def _no_logprobs(worker_id: str, error: LogprobGapError) -> ApiError:
    return EngineError(f"worker {worker_id} sends no logprobs as they are wanted: {error}")
