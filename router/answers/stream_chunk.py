"""Messages of a client's stream, with their begin and end, and the unread part that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, ConstraintFailedError, DeadlineError, EngineError
from common.limits import MAX_MESSAGE_LOGPROBS, MAX_SPECULATIVE_TOKENS
from common.telemetry.ledger import Blame
from common.telemetry.names import Stage
from common.telemetry.request_record import shown
from common.wire.draft_counts import Counts
from common.wire.peer_numbers import counted
from router.answers.answer_logprobs import AnswerLogprobs, ChunkLogprobs
from router.answers.channels.parser import Channel, ChannelPart, merged

_STAGES: Final = {stage.value: stage for stage in Stage}
# Stages of a decode, and the fields of StepSums that have their time.
_SUMS: Final = tuple(
    (stage, f"{stage}_us")
    for stage in (
        Stage.DECODE,
        Stage.NEIGHBOURS,
        Stage.SPECULATION,
        Stage.OTHERS_PREFILL,
        Stage.BETWEEN_STEPS,
        Stage.STALL,
    )
)
_TEXTS: Final = (Channel.CONTENT, Channel.REASONING)


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """The worker's report with the first token.

    Attributes:
        cached_tokens: cached prompt tokens.
        prefill_s: duration of the prefill, seconds.
        time: its arrival at the router, monotonic seconds.
    """

    cached_tokens: int = 0
    prefill_s: float = 0.0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Division of a sequence's time on its worker.

    Attributes:
        time: its end: arrival of the frame that has it at the router, monotonic seconds.
        parts: seconds of the sequence on the worker, by stage; empty if the worker does not report them.
        blames: the request that cost most, by stage.
        stage: stage after `time`, if the worker has not ended the sequence.
    """

    time: float
    parts: dict[Stage, float]
    blames: dict[Stage, Blame]
    stage: Stage | None = None

    @classmethod
    def from_proto(cls, end: wpb.SequenceEnd, now: float) -> WorkerReport:
        """The report of an end that arrives at `now`."""
        return cls(now, *_parts_of(end.parts))


@dataclass(frozen=True, slots=True)
class WorkerPhase:
    """The worker's report of a stage that a sequence has entered.

    Attributes:
        stage: the stage.
        parts: seconds of the sequence on the worker before this stage, by stage.
        blames: the request that cost most, by stage.
        sums: `StepOutput.sums` when the stage began.
    """

    stage: Stage
    parts: dict[Stage, float]
    blames: dict[Stage, Blame]
    sums: wpb.StepSums

    @classmethod
    def from_proto(cls, phase: wpb.SequencePhase) -> WorkerPhase:
        """The report of a phase. A copy: a part of a frame would keep the whole frame in memory."""
        sums = wpb.StepSums()
        sums.CopyFrom(phase.sums)
        return cls(_STAGES.get(phase.stage, Stage.UNEXPLAINED), *_parts_of(phase.parts), sums)

    def report(self, sums: wpb.StepSums, now: float) -> WorkerReport:
        """The report of a sequence that leaves its worker without an end; `sums` are those of its last frame."""
        parts = dict(self.parts)
        if self.stage is Stage.DECODE:
            for stage, name in _SUMS:
                seconds = counted(getattr(sums, name) - getattr(self.sums, name)) / 1e6
                parts[stage] = parts.get(stage, 0.0) + seconds
        return WorkerReport(now, parts, self.blames, self.stage)


@dataclass(slots=True)
class AttemptTimes:
    """Reports of a worker about the time of one attempt.

    Attributes:
        report: the division of its time, None before its end.
        phase: the newest stage, None before the first report of one.
        decode: the first decode, None before it.
    """

    report: WorkerReport | None = None
    phase: WorkerPhase | None = None
    decode: WorkerPhase | None = None

    def enter(self, phase: WorkerPhase) -> None:
        """Notes a stage that the sequence has entered."""
        self.phase = phase
        if phase.stage is Stage.DECODE:
            self.decode = self.decode or phase


def _parts_of(parts: Sequence[wpb.TimePart]) -> tuple[dict[Stage, float], dict[Stage, Blame]]:
    """Seconds and blamed requests, by stage. Stages that this version does not know are unexplained."""
    seconds, blames = dict[Stage, float](), dict[Stage, Blame]()
    for part in parts[: len(Stage)]:
        stage = _STAGES.get(part.stage, Stage.UNEXPLAINED)
        seconds[stage] = seconds.get(stage, 0.0) + counted(part.us) / 1e6
        if part.blamed_us:
            request_id, tenant = shown(part.blamed_request), shown(part.blamed_tenant)
            blames[stage] = Blame(request_id, tenant, counted(part.blamed_us) / 1e6)
    return seconds, blames


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """End of a finished stream.

    Attributes:
        reason: the finish reason.
        stop: the stop condition, if the reason is STOP.
        drafts: verified and accepted drafts by their position behind a token, if the worker reported the end.
    """

    reason: pb.FinishReason.ValueType
    stop: pb.StopDetail | None = None
    drafts: tuple[Counts, ...] = ()


class StreamChunk(NamedTuple):
    """One message to the client.

    Attributes:
        text: text, or the content of an answer that is read in channels.
        token_ids: token ids, if the client wants them.
        start: report with the first token, in the first message only.
        ending: end of the stream, in the last message only.
        logprobs: logprobs of the message's tokens, and of the prompt in the first messages.
        reasoning: text of reasoning.
        calls: parts of calls; the first part of a call has its name.
    """

    text: str
    token_ids: tuple[int, ...]
    start: FirstTokenInfo | None
    ending: FinishInfo | None
    logprobs: ChunkLogprobs | None = None
    reasoning: str = ""
    calls: tuple[ChannelPart, ...] = ()


class Echo(NamedTuple):
    """Text and token ids of the prompt, to send in front of an answer."""

    text: str
    token_ids: Sequence[int]


class UnreadParts:
    """Text, token ids and logprobs of one answer that its client has not read.

    Args:
        logprobs: collector of the logprobs; None for none.
        keeps_token_ids: True if messages carry token ids.
        has_channels: True if the answer is read in channels; otherwise all text is content.

    Attributes:
        num_tokens: number of unread tokens.
        taken: number of tokens in the messages made so far.
        has_begun: True after the first message.
    """

    def __init__(self, logprobs: AnswerLogprobs | None, *, keeps_token_ids: bool, has_channels: bool) -> None:
        self.num_tokens = 0
        self.taken = 0
        self.has_begun = False
        self._logprobs = logprobs
        self._keeps_token_ids = keeps_token_ids
        self._has_channels = has_channels
        self._parts: list[ChannelPart] = []
        self._ids: list[int] = []
        # Places where messages with logprobs can end: number of tokens and of parts up to each.
        self._marks: list[tuple[int, int]] = []

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if logprobs of the prompt are still to be sent."""
        return self._logprobs is not None and self._logprobs.has_prompt

    @property
    def has_text(self) -> bool:
        """True if an unread part has text."""
        return any(part.text for part in self._parts)

    def add(self, part: ChannelPart) -> None:
        """Adds a part of the text."""
        self._parts.append(part)

    def add_last(self, part: ChannelPart) -> None:
        """Adds text whose tokens the client has already; counts as one unread token, so that it is sent."""
        self._parts.append(part)
        self.num_tokens = max(1, self.num_tokens)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Counts tokens, and keeps their ids if messages carry ids."""
        self.num_tokens += len(token_ids)
        self.add_ids(token_ids)

    def add_ids(self, token_ids: Sequence[int]) -> None:
        """Adds ids without counting them, such as those of an echoed prompt."""
        if self._keeps_token_ids:
            self._ids.extend(token_ids)

    def mark(self, num_tokens: int) -> None:
        """Notes that a message can end behind `num_tokens` unread tokens; keeps only marks that fill messages best."""
        before = self._marks[-2][0] if len(self._marks) > 1 else 0
        if self._marks and num_tokens - before <= MAX_MESSAGE_LOGPROBS:
            self._marks.pop()
        self._marks.append((num_tokens, len(self._parts)))

    def take(self, start: FirstTokenInfo, ending: FinishInfo | None) -> StreamChunk:
        """Returns the next message, the first one with `start`, the last one with `ending`."""
        begin = None if self.has_begun else start
        self.has_begun = True
        if self._logprobs is not None and (early := self._take_early(self._logprobs, begin)) is not None:
            return early
        logprobs = None if self._logprobs is None else ChunkLogprobs(None, self._logprobs.take())
        chunk = self._chunk(self._parts, tuple(self._ids), logprobs, begin, ending)
        self.taken += self.num_tokens
        self.clear()
        return chunk

    def clear(self) -> None:
        """Discards everything unread."""
        self._parts.clear()
        self._ids.clear()
        self.num_tokens = 0
        # Only logprobs need marks.
        if self._logprobs is not None:
            self._marks.clear()
            self._logprobs.clear()

    def _take_early(self, logprobs: AnswerLogprobs, start: FirstTokenInfo | None) -> StreamChunk | None:
        """Returns a message with logprobs of the prompt, or one that logprobs fill; None if there is neither."""
        prompt = logprobs.take_prompt()
        if prompt is not None:
            return self._chunk((), (), ChunkLogprobs(prompt, None), start)
        if logprobs.num_waiting <= MAX_MESSAGE_LOGPROBS:
            return None
        # A client that breaks off behind this message has the text of exactly its ids.
        (count, num_texts), *marks = self._marks
        self._marks = [(tokens - count, texts - num_texts) for tokens, texts in marks]
        # Ids of an echoed prompt have no logprobs.
        num_ids = len(self._ids) - logprobs.num_waiting + count if self._keeps_token_ids else 0
        parts, ids = self._parts[:num_texts], tuple(self._ids[:num_ids])
        del self._parts[:num_texts], self._ids[:num_ids]
        self.taken += count
        self.num_tokens -= count
        return self._chunk(parts, ids, ChunkLogprobs(None, logprobs.take(count)), start)

    def _chunk(
        self,
        parts: Sequence[ChannelPart],
        token_ids: tuple[int, ...],
        logprobs: ChunkLogprobs | None,
        start: FirstTokenInfo | None,
        ending: FinishInfo | None = None,
    ) -> StreamChunk:
        if not self._has_channels:
            text = parts[0].text if len(parts) == 1 else "".join([part.text for part in parts])
            return StreamChunk(text, token_ids, start, ending, logprobs)
        texts = ("".join(part.text for part in parts if part.channel is channel) for channel in _TEXTS)
        calls = merged(part for part in parts if part.channel is Channel.CALL)
        return StreamChunk(next(texts), token_ids, start, ending, logprobs, next(texts), tuple(calls))


def error_of(end: wpb.SequenceEnd) -> ApiError:
    """Returns the client's error for a failed end of a worker's sequence."""
    if end.reason == wpb.END_REASON_DEADLINE:
        return DeadlineError("at the worker")
    if end.reason == wpb.END_REASON_CONSTRAINT_FAILED:
        return ConstraintFailedError(end.message)
    return EngineError(end.message or "the worker failed")


def ending_of(end: wpb.SequenceEnd) -> FinishInfo:
    """Returns the client's finish for the end of a worker's sequence."""
    drafts = drafts_of(end)
    if end.reason == wpb.END_REASON_LENGTH:
        return FinishInfo(pb.FINISH_REASON_LENGTH, drafts=drafts)
    return FinishInfo(pb.FINISH_REASON_STOP, _stop_of(end), drafts)


def drafts_of(end: wpb.SequenceEnd) -> tuple[Counts, ...]:
    """Returns verified and accepted drafts of an ended sequence, by their position behind a token."""
    counts = end.drafts[:MAX_SPECULATIVE_TOKENS]
    return tuple((counted(one.verified), counted(one.accepted)) for one in counts)


def _stop_of(end: wpb.SequenceEnd) -> pb.StopDetail:
    if end.reason == wpb.END_REASON_EOS:
        return pb.StopDetail(eos_token_id=end.stop_token_id)
    if end.reason == wpb.END_REASON_STOP_TOKEN:
        return pb.StopDetail(stop_token_id=end.stop_token_id)
    if end.reason == wpb.END_REASON_CONSTRAINT:
        return pb.StopDetail(constraint=True)
    return pb.StopDetail(stop_token_sequence=pb.TokenIds(ids=end.stop_token_sequence.ids))
