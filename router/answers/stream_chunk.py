"""Messages of a client's stream, with their begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, ConstraintFailedError, DeadlineError, EngineError
from common.limits import MAX_SPECULATIVE_TOKENS
from common.wire.draft_counts import Counts
from common.wire.peer_numbers import counted
from router.answers.answer_logprobs import ChunkLogprobs
from router.answers.channels.parser import Part


@dataclass(frozen=True, slots=True)
class FirstTokenInfo:
    """The worker's report with the first token: cached prompt tokens, and the time of the prefill in seconds."""

    cached_tokens: int = 0
    prefill_s: float = 0.0


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
    calls: tuple[Part, ...] = ()


class Echo(NamedTuple):
    """Text and token ids of the prompt, to send in front of an answer."""

    text: str
    token_ids: Sequence[int]


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
