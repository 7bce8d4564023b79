"""Corrects batches that were scheduled before it was known which drafts of the previous step were right."""

from __future__ import annotations

from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput


def settled(batch: ScheduledBatch, last_output: ScheduledBatchOutput) -> ScheduledBatch:
    """The batch after the runner's last step has ended: rows after drafts in flight are moved to their places, and late
    drafts have their tokens. The same batch if it has neither."""
    ids, drafts = batch.req_ids, dict(batch.scheduled_spec_decode_tokens)
    late = [i for i in batch.late_rows if ids[i] in drafts or ids[i] in batch.drafts_in_flight]
    if not late:
        return batch
    tokens, starts, is_late = batch.input_tokens(last_output), [*batch.num_computed_tokens], [*batch.from_last_output]
    for i in late:
        is_late[i] = False
        starts[i] -= _num_rejected(batch, ids[i], last_output)
        if ids[i] in drafts:
            drafts[ids[i]] = tokens[i][1:]
    changed = {
        "num_computed_tokens": starts,
        "from_last_output": is_late,
        "scheduled_spec_decode_tokens": drafts,
        "drafts_in_flight": {},
        "scheduled_tokens": [[] if late else own for own, late in zip(tokens, is_late, strict=True)],
    }
    return ScheduledBatch.restored(batch.columns, batch.tables, batch.histories, batch.fields() | changed)


def _num_rejected(batch: ScheduledBatch, seq_id: int, last_output: ScheduledBatchOutput) -> int:
    """Number of a sequence's drafts in flight that were wrong."""
    count = batch.drafts_in_flight.get(seq_id, 0)
    return count + 1 - len(last_output.token_ids[seq_id]) if count else 0
