"""Conversion of engine outputs to protos."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_END_MESSAGE_BYTES
from common.telemetry.ledger import Blame
from common.telemetry.names import Stage
from worker.engine.outputs import End, Start
from worker.engine.sequence import EndReason
from worker.engine.sequence_ledger import PhaseStart, StepSums

PROTO_REASONS: Final = {
    EndReason.EOS: wpb.END_REASON_EOS,
    EndReason.STOP_TOKEN: wpb.END_REASON_STOP_TOKEN,
    EndReason.STOP_SEQUENCE: wpb.END_REASON_STOP_SEQUENCE,
    EndReason.LENGTH: wpb.END_REASON_LENGTH,
    EndReason.DEADLINE: wpb.END_REASON_DEADLINE,
    EndReason.ERROR: wpb.END_REASON_ERROR,
    EndReason.CANCELLED: wpb.END_REASON_CANCELLED,
    EndReason.NOT_A_NUMBER: wpb.END_REASON_NOT_A_NUMBER,
    EndReason.CONSTRAINT: wpb.END_REASON_CONSTRAINT,
    EndReason.CONSTRAINT_FAILED: wpb.END_REASON_CONSTRAINT_FAILED,
    EndReason.INVALID: wpb.END_REASON_INVALID,
}


def start_proto(rid: int, start: Start) -> wpb.SequenceStart:
    """A sequence's start as a proto, for routers and direct callers."""
    return wpb.SequenceStart(
        rid=rid,
        cached_tokens=start.cached_tokens,
        queue_us=max(0, round(start.queue_s * 1e6)),
        prefill_us=max(0, round(start.prefill_s * 1e6)),
    )


def end_proto(rid: int, end: End) -> wpb.SequenceEnd:
    """A sequence's end as a proto, for routers and direct callers."""
    message = end.message.encode("utf-8", "replace")[:MAX_END_MESSAGE_BYTES].decode("utf-8", "ignore")
    made = wpb.SequenceEnd(rid=rid, end_pos=end.end_pos, reason=PROTO_REASONS[end.reason], message=message)
    if end.stop_token_id is not None:
        made.stop_token_id = end.stop_token_id
    if end.stop_token_sequence is not None:
        made.stop_token_sequence.ids.extend(end.stop_token_sequence)
    if end.times is not None and end.times.decode is not None:
        for verified, accepted in end.times.decode.drafts:
            made.drafts.add(verified=verified, accepted=accepted)
    if end.ledger is not None:
        made.parts.extend(_parts(end.ledger.parts(end.ledger.since), end.ledger.blames))
    return made


def phase_proto(rid: int, phase: PhaseStart) -> wpb.SequencePhase:
    """A stage that a sequence has entered, as a proto for routers."""
    parts = _parts(phase.parts, phase.blames)
    return wpb.SequencePhase(rid=rid, stage=phase.stage, parts=parts, sums=sums_proto(phase.sums))


def sums_proto(sums: StepSums) -> wpb.StepSums:
    """The time of the engine's steps as a proto for routers."""
    return wpb.StepSums(
        decode_us=int(sums.alone * 1e6),
        neighbours_us=int(sums.neighbours * 1e6),
        speculation_us=int(sums.drafts * 1e6),
        others_prefill_us=int(sums.prompts * 1e6),
        between_steps_us=int(sums.between * 1e6),
        stall_us=int(sums.stalled * 1e6),
    )


def _parts(parts: Mapping[Stage, float], blames: Mapping[Stage, Blame]) -> Iterator[wpb.TimePart]:
    for stage, seconds in parts.items():
        part = wpb.TimePart(stage=stage, us=round(seconds * 1e6))
        if (blame := blames.get(stage)) is not None:
            part.blamed_request, part.blamed_tenant = blame.request_id, blame.tenant
            part.blamed_us = round(blame.seconds * 1e6)
        yield part
