"""Outputs that the engine thread hands to the event loop: copies, so that nothing of a live sequence is read on two
threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_END_MESSAGE_BYTES
from common.telemetry.tracing import SequenceTimes
from worker.engine.sequence import EndReason

PROTO_REASONS: Final = {
    EndReason.EOS: wpb.END_REASON_EOS,
    EndReason.STOP_TOKEN: wpb.END_REASON_STOP_TOKEN,
    EndReason.STOP_SEQUENCE: wpb.END_REASON_STOP_SEQUENCE,
    EndReason.LENGTH: wpb.END_REASON_LENGTH,
    EndReason.DEADLINE: wpb.END_REASON_DEADLINE,
    EndReason.ERROR: wpb.END_REASON_ERROR,
    EndReason.CANCELLED: wpb.END_REASON_CANCELLED,
    EndReason.NOT_A_NUMBER: wpb.END_REASON_NOT_A_NUMBER,
}


@dataclass(frozen=True, slots=True)
class Start:
    """Facts known about a sequence at its first token; durations in seconds."""

    prompt_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float

    def to_proto(self, rid: int) -> wpb.SequenceStart:
        """As a router gets it."""
        return wpb.SequenceStart(
            rid=rid,
            cached_tokens=self.cached_tokens,
            queue_us=max(0, round(self.queue_s * 1e6)),
            prefill_us=max(0, round(self.prefill_s * 1e6)),
        )


@dataclass(frozen=True, slots=True)
class End:
    """Why a sequence ended, and how many tokens it has, prompt included."""

    end_pos: int
    reason: wpb.EndReason.ValueType
    stop_token_id: int | None = None
    stop_token_sequence: tuple[int, ...] | None = None
    message: str = ""

    def to_proto(self, rid: int) -> wpb.SequenceEnd:
        """As a router gets it."""
        message = self.message.encode("utf-8", "replace")[:MAX_END_MESSAGE_BYTES].decode("utf-8", "ignore")
        end = wpb.SequenceEnd(rid=rid, end_pos=self.end_pos, reason=self.reason, message=message)
        if self.stop_token_id is not None:
            end.stop_token_id = self.stop_token_id
        if self.stop_token_sequence is not None:
            end.stop_token_sequence.ids.extend(self.stop_token_sequence)
        return end


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence, from absolute position `first_pos` on; `start` with the first ones of this attempt.

    `times` comes with `end`.
    """

    seq_id: int
    first_pos: int
    token_ids: list[int]
    start: Start | None = None
    end: End | None = None
    times: SequenceTimes | None = None
