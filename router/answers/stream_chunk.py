"""Parts of a client's stream, and how it begins and ends."""

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
    """The worker's report with the first token; `prefill_s` in seconds."""

    cached_tokens: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """End of the stream: `pb.FinishReason`, and the stop condition where the reason is STOP.

    `drafts` are the verified and accepted ones by their position behind a token, where the worker has said the end.
    """

    reason: pb.FinishReason.ValueType
    stop: pb.StopDetail | None = None
    drafts: tuple[Counts, ...] = ()


class StreamChunk(NamedTuple):
    """Next piece for the client; `start` in the first part only, `ending` in the last one only.

    `logprobs` are those of `token_ids`, whether those are wanted or not, and in the first parts of the prompt. Of an
    answer that is read in channels `text` is content, and `calls` are parts of calls; each call begins with its name.
    """

    text: str
    token_ids: tuple[int, ...]
    start: FirstTokenInfo | None
    ending: FinishInfo | None
    logprobs: ChunkLogprobs | None = None
    reasoning: str = ""
    calls: tuple[Part, ...] = ()


class Echo(NamedTuple):
    """The prompt that an answer begins with for its client: its text, and its token ids."""

    text: str
    token_ids: Sequence[int]


def error_of(end: wpb.SequenceEnd) -> ApiError:
    """The failure that a worker's end is for the client."""
    if end.reason == wpb.END_REASON_DEADLINE:
        return DeadlineError("at the worker")
    if end.reason == wpb.END_REASON_CONSTRAINT_FAILED:
        return ConstraintFailedError(end.message)
    return EngineError(end.message or "the worker failed")


def ending_of(end: wpb.SequenceEnd) -> FinishInfo:
    """The finish that a worker's end is for the client."""
    drafts = drafts_of(end)
    if end.reason == wpb.END_REASON_LENGTH:
        return FinishInfo(pb.FINISH_REASON_LENGTH, drafts=drafts)
    return FinishInfo(pb.FINISH_REASON_STOP, _stop_of(end), drafts)


def drafts_of(end: wpb.SequenceEnd) -> tuple[Counts, ...]:
    """Drafts of a sequence that has ended, verified and accepted, by their position behind a token."""
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
