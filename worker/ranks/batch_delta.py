"""Encodes batches for an engine's ranks as changes since the batch before. Pure.

A decode step of 256 sequences with 8000 tokens each has half a megabyte of block tables, of which 16 numbers are new.
Both ends keep the tables that have been sent. A table only grows at its end, or is replaced by another list
(ScheduledBatch), so that the same list needs only what it has more than before.
"""

from __future__ import annotations

from typing import Any, Final

from worker.engine.batch import ScheduledBatch, SequenceColumns
from worker.ranks.history_delta import HistoryDecoder, HistoryEncoder

# Tables are dropped of sequences that no batch has had while so many came.
_BATCHES_KEPT: Final = 64


class BatchEncoder:
    """The engine's end of the encoding. Every encoded batch must be decoded, in the same order."""

    def __init__(self, batches_kept: int = _BATCHES_KEPT) -> None:
        self._batches_kept = batches_kept
        self._num_batches = 0
        # Sequences of the batches since tables were last dropped.
        self._seen: set[int] = set()
        self._columns: SequenceColumns | None = None
        # By sequence: its list, kept so that no other one can be taken for it, and how much of it has been sent.
        self._sent: dict[int, tuple[list[int], int]] = {}
        self._histories = HistoryEncoder()

    def encode(self, batch: ScheduledBatch) -> tuple[Any, ...]:
        """Encodes a batch: columns or None, sequences whose tables to drop, grown tables, histories, other fields."""
        columns = None if batch.columns is self._columns else batch.columns.values()
        self._columns = batch.columns
        dropped = self._drop(batch)
        return columns, dropped, self._grown(batch), self._histories.encode(batch), batch.fields()

    def _drop(self, batch: ScheduledBatch) -> list[int]:
        """Forgets sequences that have not occurred for long, because most of them have ended. Does so only now and
        then."""
        self._seen.update(batch.req_ids)
        self._num_batches += 1
        if self._num_batches % self._batches_kept:
            return []
        dropped = [seq_id for seq_id in self._sent if seq_id not in self._seen]
        for seq_id in dropped:
            del self._sent[seq_id]
        self._seen = set(batch.req_ids)
        return dropped

    def _grown(self, batch: ScheduledBatch) -> dict[int, tuple[int, list[int]]]:
        """Growth of each block table: the number of kept blocks, and the blocks after them."""
        grown = {}
        size = batch.block_size
        rows = zip(batch.req_ids, batch.tables, batch.context_lens, strict=True)
        for seq_id, table, context_len in rows:
            # Drafts that the runner proposes have their KV behind the step's.
            num_slots = context_len + batch.drafts_wanted.get(seq_id, 0)
            needed = min(len(table), -(-num_slots // size))
            known, count = self._sent.get(seq_id, (None, 0))
            if known is not table:
                count = 0
            if known is not table or needed > count:
                grown[seq_id] = (count, table[count:needed])
                self._sent[seq_id] = (table, needed)
        return grown


class BatchDecoder:
    """A rank's end of the encoding."""

    def __init__(self) -> None:
        self._columns = SequenceColumns([])
        self._tables: dict[int, list[int]] = {}
        self._histories = HistoryDecoder()

    def decode(self, columns: Any, dropped: Any, grown: Any, histories: Any, fields: Any) -> ScheduledBatch:
        """Restores the batch that `BatchEncoder.encode` encoded."""
        if columns is not None:
            self._columns = SequenceColumns.restored(columns)
        for seq_id in dropped:
            del self._tables[seq_id]
        for seq_id, (stays, follows) in grown.items():
            table = self._tables.get(seq_id, [])
            if table and stays == len(table):
                # The same list object as in the encoder: the runner looks only at its new entries
                # (worker/model/block_tables).
                table.extend(follows)
            else:
                self._tables[seq_id] = [*table[:stays], *follows]
        ids = self._columns.ids
        known = self._histories.decode(ids, histories)
        return ScheduledBatch.restored(self._columns, [self._tables[seq_id] for seq_id in ids], known, fields)
