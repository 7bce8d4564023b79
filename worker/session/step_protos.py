"""Messages of the engine's steps, for ListSteps and for dumps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_LISTED_STEP_ROWS
from common.wire.peer_numbers import as_uint32, as_uint64
from worker.engine.step_record import RowKind, StepRecord, StepRing

_KINDS: Final = {
    RowKind.DECODE: wpb.STEP_ROW_KIND_DECODE,
    RowKind.VERIFY: wpb.STEP_ROW_KIND_VERIFY,
    RowKind.PREFILL: wpb.STEP_ROW_KIND_PREFILL,
}


def step_proto(record: StepRecord, now: float, unix_offset_s: float) -> wpb.Step:
    """The message of one step.

    Args:
        record: of the step.
        now: monotonic seconds.
        unix_offset_s: of its ring (StepRing).
    """
    waited = now if record.waited is None else record.waited
    finished = now if record.finished is None else record.finished
    return wpb.Step(
        number=record.number,
        start_us=as_uint64(1e6 * (unix_offset_s + record.scheduled)),
        schedule_us=_us(record.launched - record.scheduled),
        launch_us=_us(waited - record.launched),
        wait_us=_us(finished - waited),
        forward_us=_us(record.duration_s),
        in_flight=record.finished is None,
        free_blocks=record.free_blocks,
        total_blocks=record.total_blocks,
        waiting_seqs=record.num_waiting,
        gated_seqs=record.num_gated,
        new_tokens=record.num_new_tokens,
        preempted=map(as_uint64, record.preempted),
        rows=_rows(record),
    )


def newest_steps(
    steps: StepRing, wanted: wpb.ListStepsRequest, max_rows: int = MAX_LISTED_STEP_ROWS
) -> list[StepRecord]:
    """The wanted steps, oldest first: as many of the newest as have at most `max_rows` sequences, at least one."""
    last, request_id, before = wanted.last, wanted.request_id, wanted.before
    found: list[StepRecord] = []
    num_rows = 0
    for record in reversed(steps.newest()):
        if (before and record.number >= before) or (request_id and request_id not in record.request_ids):
            continue
        num_rows += len(record.seq_ids)
        if (last and len(found) >= last) or (found and num_rows > max_rows):
            break
        found.append(record)
    return found[::-1]


def _rows(record: StepRecord) -> Iterator[wpb.StepRow]:
    for row in record.rows():
        yield wpb.StepRow(
            sequence=as_uint64(row.seq_id),
            request_id=row.request_id,
            kind=_KINDS[row.kind],
            tokens=row.num_tokens,
            computed_tokens=as_uint32(row.num_computed),
            cached_tokens=as_uint32(row.num_cached),
        )


def _us(seconds: float) -> int:
    return as_uint32(1e6 * seconds)
