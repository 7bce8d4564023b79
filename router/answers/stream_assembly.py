"""Turns the tokens of one sequence into the messages of the client's stream.

Invariants:
  * Tokens are appended iff they continue the answer (rule S2). An end counts iff all its tokens have arrived (S3).
  * The concatenated text of all messages is the decoded text of the delivered tokens. It lacks the token that ended the
    sequence, and a matched stop string unless the request includes it. It does not depend on how workers cut runs.
    If special tokens are kept, an end-of-sequence token is text like any other.
  * An answer that is read in channels (`router.answers.channel_reader`) has that text in its channels, without gaps.
  * An echoed prompt comes with the first token, in front of all text and token ids. It is not counted.
  * `delivered` counts the tokens for the client, an end-of-sequence or stop token included. Tokens behind a stop string
    are dropped and not counted.
  * Exactly one message has a finish, and it is the last one. A stream that fails has none.
  * Unread text is merged into one message, bounded by `max_unread_tokens`.
  * `token_ids` are the delivered tokens. Behind the prompt, another worker continues the answer from them (rule S5).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
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
from router.answers.channel_reader import ChannelReader
from router.answers.channels.parser import Channel, ChannelPart
from router.answers.delivered import DeliveredText, DeliveredTokens
from router.answers.logit_digests import LogitChain
from router.answers.stream_chunk import (
    AttemptTimes,
    Echo,
    FinishInfo,
    FirstTokenInfo,
    StreamChunk,
    UnreadParts,
    ending_of,
    error_of,
)


class GapError(Exception):
    """The worker's tokens or end do not continue the router's tokens: the Session is unusable (rule S2)."""


# Ends that a client sees as a finish; the others are failures.
_STOPS = (
    wpb.END_REASON_EOS,
    wpb.END_REASON_STOP_TOKEN,
    wpb.END_REASON_STOP_SEQUENCE,
    wpb.END_REASON_CONSTRAINT,
)


class StreamAssembly:
    """Assembles one answer for its client.

    Args:
        prompt_tokens: length of the prompt, the position of the first token.
        text: decoder of the answer; gives a piece for each token if there is a `reader`.
        return_token_ids: True if messages carry token ids.
        max_unread_tokens: bound of unread tokens; a client that exceeds it is dropped.
        delivered_text: text that an earlier call delivered; None for none.
        delivered_tokens: tokens that an earlier call delivered and that the worker sends again; None for none.
        echo: the prompt in front of the answer; None for no echo.
        keeps_special_tokens: True if the decoder keeps special tokens in the text.
        logprobs: collector of the requested logprobs; None for none.
        logit_chain: digests of logits for a receipt; None for none.
        reader: reader of the answer's channels; None if all text is content.

    Attributes:
        num_tokens: tokens of prompt and answer: the position of the next token.
        most_tokens: upper bound of `num_tokens`; 0 if unknown.
        token_ids: the delivered tokens.
        num_left_out: tokens that arrived although an earlier call had delivered them.
        pooled: hidden states (float32) of an embedded prompt.
        worker_id: worker of the current attempt.
        start: report of the worker with the first token.
        times: reports of the worker about the time of the current attempt.
        first_token_time, last_token_time: times of the first and the newest token, None before the first one.
        unread: the part of the answer that the client has not read.
        error: failure of the stream; None without one.
        is_dropped: True once the client gets nothing more but a status.
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
        self.logprobs = logprobs
        self.logit_chain = logit_chain
        self.pooled = b""
        self.worker_id = ""
        self.start = FirstTokenInfo()
        self.times = AttemptTimes()
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.num_left_out = 0
        self.unread = UnreadParts(logprobs, keeps_token_ids=return_token_ids, has_channels=reader is not None)
        self.error: ApiError | None = None
        self.is_dropped = False
        self._text = text
        self._reader = reader
        self._max_unread_tokens = max_unread_tokens
        self._delivered_text = delivered_text
        self._delivered_tokens = delivered_tokens
        # True while tokens of an earlier call arrive again.
        self._is_repeating = False
        self._echo = echo
        self._silent_ends = {wpb.END_REASON_STOP_TOKEN, wpb.END_REASON_EOS}
        if keeps_special_tokens:
            self._silent_ends.remove(wpb.END_REASON_EOS)
        # Tokens that workers get with the sequence: the prompt, and tokens that an earlier call delivered.
        self._num_given = prompt_tokens
        self._ending: FinishInfo | None = None

    @property
    def delivered(self) -> int:
        """Number of tokens for the client, read or unread."""
        return len(self.token_ids)

    @property
    def has_generated(self) -> bool:
        """True if a worker generated a token behind the given ones."""
        return self.num_tokens > self._num_given

    @property
    def is_closed(self) -> bool:
        """True if the stream takes no more tokens: it has an ending or has failed."""
        return self._ending is not None or self.error is not None

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of reasoning among the delivered ones."""
        return 0 if self._reader is None else self._reader.reasoning_tokens(0, self.delivered)

    def written_tokens(self) -> tuple[int, int]:
        """Number of tokens in the messages made so far, and number of tokens of reasoning among them."""
        written, end = self.unread.taken, self.delivered - self.unread.num_tokens
        return written, 0 if self._reader is None else self._reader.reasoning_tokens(end - written, end)

    def begin_attempt(self) -> None:
        """Prepares for another worker, which sends logprobs of given tokens again if no token was generated."""
        self.times = AttemptTimes()
        if self.logprobs is not None and not self.has_generated:
            self.logprobs.restart()

    def begin(self, start: FirstTokenInfo) -> None:
        """Notes the worker's report with the first token; of a later attempt its time alone."""
        self.start = start if self.first_token_time is None else replace(self.start, time=start.time)

    def resume_behind(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that an earlier call delivered; they are not sent again."""
        self._deliver(token_ids)
        self._num_given = self.num_tokens
        self.unread.clear()

    def append_given_logprobs(self, first_pos: int, rows: bytes) -> None:
        """Adds logprobs of given tokens, which arrive before the first generated token."""
        if self.logprobs is None or self.is_closed or self.has_generated:
            return
        try:
            self.logprobs.add_given(first_pos, rows)
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
        """Appends a run of tokens with their logprobs, and the end that came with the last token.

        Repeated runs are dropped. Once a stop string matches, `is_closed` turns true and the rest is dropped.

        Raises:
            GapError: the run leaves a gap, or the end names another number of tokens.
        """
        if self.is_closed or first_pos < self.num_tokens:
            return
        if first_pos > self.num_tokens:
            raise GapError(f"tokens at position {first_pos} where {self.num_tokens} were expected")
        if self._delivered_tokens is not None:
            self._append_repeated(self._delivered_tokens, first_pos, token_ids, now, end, logprobs)
            return
        if self.logprobs is not None:
            if len(token_ids) > MAX_MESSAGE_LOGPROBS:
                for start, ids, rows in _runs(token_ids, logprobs):
                    is_last = start + len(ids) == len(token_ids)
                    self.append(first_pos + start, ids, now, end if is_last else None, rows)
                return
            try:
                self.logprobs.check(len(token_ids), logprobs)
            except LogprobGapError as error:
                self.fail(_no_logprobs(self.worker_id, error))
                return
        if token_ids:
            self.first_token_time = now if self.first_token_time is None else self.first_token_time
            self.last_token_time = now
            before = self.delivered
            # The token that stops the sequence is not part of its text.
            has_stopper = end is not None and end.reason in self._silent_ends
            self._deliver(token_ids[:-1] if has_stopper else token_ids)
            if has_stopper and not self.is_closed:
                self._count(token_ids[-1:])
            if self.logprobs is not None:
                self.logprobs.add(tuple(token_ids[: self.delivered - before]), logprobs)
                self.unread.mark(self.logprobs.num_waiting)
            if self.unread.num_tokens > self._max_unread_tokens:
                self.drop(SlowClientError(self.unread.num_tokens, None))
        if end is not None and not self.is_closed:
            self.finish(end)

    def _append_repeated(
        self,
        delivered: DeliveredTokens,
        first_pos: int,
        token_ids: Sequence[int],
        now: float,
        end: wpb.SequenceEnd | None,
        logprobs: bytes,
    ) -> None:
        """Appends a run that begins with tokens of an earlier call; they are checked and left out."""
        count = min(delivered.left, len(token_ids))
        size = count * len(logprobs) // max(1, len(token_ids))
        is_all = count == len(token_ids)
        self._delivered_tokens, self._is_repeating = None, True
        self.append(first_pos, token_ids[:count], now, end if is_all else None, logprobs[:size])
        self._is_repeating = False
        self._check_repeated(delivered, token_ids[:count])
        self.unread.clear()
        if delivered.left:
            self._delivered_tokens = delivered
        elif not is_all:
            self.append(first_pos + count, token_ids[count:], now, end, logprobs[size:])

    def _check_repeated(self, delivered: DeliveredTokens, token_ids: Sequence[int]) -> None:
        """Fails the stream if the repeated tokens or their text differ from those of the earlier call."""
        try:
            delivered.push(token_ids)
        except ResumeMismatchError as error:
            self._ending, self.error = None, error
            return
        is_short = self._ending is not None and self.delivered < delivered.count
        # The repeated tokens must have exactly the text that the earlier call delivered.
        is_other = not delivered.are_named and (
            self.unread.has_text or (not delivered.left and self._delivered_text is not None)
        )
        if self.error is None and (is_short or is_other):
            self._ending, self.error = None, delivered.mismatch()

    def finish(self, end: wpb.SequenceEnd) -> None:
        """Ends the stream as the worker reports: a finish, or a failure.

        Must not be called with the losses of `router.workers.session_state.LOSSES`, except for a refusal.

        Raises:
            GapError: the end names another number of tokens.
        """
        if self.is_closed:
            return
        if end.reason not in _STOPS and end.reason != wpb.END_REASON_LENGTH:
            self.fail(error_of(end))
            return
        if end.end_pos != self.num_tokens:
            raise GapError(f"an end at {end.end_pos} tokens where {self.num_tokens} arrived")
        self._emit(self._text.flush())
        self._end(ending_of(end) if self._text.matched is None else _stop_string_ending(self._text.matched))

    def lose_worker(self, error: NoWorkerError) -> None:
        """Ends the stream because it has no worker; safe to retry if the client has no message yet."""
        if self.is_closed:
            return
        if self.unread.has_begun:
            self.fail(WorkerLostError(self.worker_id, self.delivered))
        else:
            self.unread.clear()
            self.fail(error)

    def end_with_router(self) -> None:
        """Ends the stream because this router ends; safe to retry if the client has no message yet."""
        if self.is_closed:
            return
        if not self.unread.has_begun:
            self.unread.clear()
        self.fail(RouterEndingError(self.delivered if self.unread.has_begun else 0))

    def drop(self, error: ApiError) -> None:
        """Ends the stream with a status at once, even a finished one, and discards the unread part."""
        self._ending = None
        self.unread.clear()
        self.error = error
        self.is_dropped = True

    def fail(self, error: ApiError) -> None:
        """Ends the stream with a status after the unread part. No-op once the stream is closed."""
        if not self.is_closed:
            self.error = error

    def next_chunk(self) -> StreamChunk | None:
        """Returns the unread part as one message; None if there is none.

        Raises:
            ApiError: the stream has failed and everything before that was returned.
        """
        if self.error is not None and not self.unread.num_tokens:
            raise self.error
        if not self.unread.num_tokens and self._ending is None:
            return None
        return self.unread.take(self.start, self._ending)

    def _deliver(self, token_ids: Sequence[int]) -> None:
        """Counts tokens and adds their text, up to the token that ends the answer."""
        if self._echo is not None:
            echo, self._echo = self._echo, None
            self._add(ChannelPart(Channel.CONTENT, echo.text))
            self.unread.add_ids(echo.token_ids)
        # Nearly all streams: a piece object for each run would make them a fifth slower.
        if self._text.is_plain:
            self._count(token_ids)
            self._add(ChannelPart(Channel.CONTENT, self._text.decode(token_ids)))
            return
        for piece in self._text.push(token_ids):
            self._count(piece.token_ids)
            self._emit(piece)
            if self._text.matched is not None:
                self._end(_stop_string_ending(self._text.matched))
            if self._reader is None:
                continue
            self._reader.end_token()
            if self._reader.is_done and not self.is_closed:
                self._end(FinishInfo(pb.FINISH_REASON_TOOL_CALLS))
            if self.is_closed:
                return

    def _emit(self, piece: TextPiece) -> None:
        """Adds a piece of text to its channels."""
        if self._reader is None:
            self._add(ChannelPart(Channel.CONTENT, piece.text))
            return
        try:
            parts = self._reader.read(piece)
        except TimeoutError:
            self.fail(EngineError("the response template of the model takes too long to read its answer"))
            return
        for part in parts:
            self._add(part)

    def _add(self, part: ChannelPart) -> None:
        """Adds a part to the unread ones, without the text that an earlier call delivered."""
        if self._delivered_text is None:
            self.unread.add(part)
            return
        try:
            rest = self._delivered_text.push(part)
        except ResumeMismatchError as error:
            self.fail(error)
            return
        if not self._delivered_text.left:
            self._delivered_text = None
        if rest is not None:
            self.unread.add_last(rest)

    def _end(self, ending: FinishInfo) -> None:
        """Ends the stream. It fails if it is shorter than the text that an earlier call delivered."""
        reader = self._reader
        if reader is not None and self.error is None and not reader.is_done:
            eos = ending.stop.eos_token_id if ending.stop is not None and ending.stop.HasField("eos_token_id") else None
            # A kept end-of-sequence token was read as text.
            token_id = eos if wpb.END_REASON_EOS in self._silent_ends else None
            for part in reader.finish(is_cut=ending.reason == pb.FINISH_REASON_LENGTH, token_id=token_id):
                self._add(part)
            if reader.ends_with_call and ending.reason == pb.FINISH_REASON_STOP:
                ending = replace(ending, reason=pb.FINISH_REASON_TOOL_CALLS)
        if self._delivered_text is not None:
            self.fail(self._delivered_text.mismatch())
        elif self.error is None:
            self._ending = ending

    def _count(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if self._delivered_text is not None or self._is_repeating:
            self.num_left_out += len(token_ids)
            return
        self.unread.add_tokens(token_ids)


def _runs(token_ids: Sequence[int], rows: bytes) -> Iterator[tuple[int, Sequence[int], bytes]]:
    """Cuts a run into runs of at most MAX_MESSAGE_LOGPROBS tokens: start, tokens and rows of logprobs of each."""
    width = len(rows) // len(token_ids)
    for start in range(0, len(token_ids), MAX_MESSAGE_LOGPROBS):
        part = token_ids[start : start + MAX_MESSAGE_LOGPROBS]
        yield start, part, rows[start * width : (start + len(part)) * width]


def _stop_string_ending(matched: str) -> FinishInfo:
    return FinishInfo(pb.FINISH_REASON_STOP, pb.StopDetail(stop_string=matched))


def _no_logprobs(worker_id: str, error: LogprobGapError) -> ApiError:
    return EngineError(f"worker {worker_id} sends no logprobs as they are wanted: {error}")
