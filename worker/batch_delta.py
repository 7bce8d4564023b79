"""Batches as an engine sends them to its ranks: what changed since the batch before. Pure.

A decode step of 256 sequences with 8000 tokens each has half a megabyte of block tables, of which 16 numbers are new.
Both ends keep the tables that have been sent. A table only grows at its end, or is replaced by another list
(ScheduledBatch), so that the same list needs only what it has more than before.
"""

from __future__ import annotations

from typing import Any, Final

from worker.batch import ScheduledBatch, SequenceColumns

# Tables that are kept; when there are more, both ends begin anew.
_MAX_TABLES: Final = 8192


class BatchEncoder:
    """The engine's end. Every batch it encodes must be decoded, in the same order."""

    def __init__(self, max_tables: int = _MAX_TABLES) -> None:
        self._max_tables = max_tables
        self._columns: SequenceColumns | None = None
        # By sequence: its list, kept so that no other one can be taken for it, and how much of it has been sent.
        self._sent: dict[int, tuple[list[int], int]] = {}

    def encode(self, batch: ScheduledBatch) -> tuple[Any, ...]:
        """What the other end needs: columns or None, whether to forget all tables, grown tables, fields."""
        columns = None if batch.columns is self._columns else batch.columns.values()
        self._columns = batch.columns
        forget = len(self._sent) + len(batch.req_ids) > self._max_tables
        if forget:
            self._sent.clear()
        return columns, forget, self._grown(batch), batch.fields()

    def _grown(self, batch: ScheduledBatch) -> dict[int, tuple[int, list[int]]]:
        """By sequence: how much of its table stays, and what follows."""
        grown = {}
        size = batch.block_size
        rows = zip(batch.req_ids, batch.tables, batch.context_lens, strict=True)
        for seq_id, table, context_len in rows:
            needed = min(len(table), -(-context_len // size))
            known, count = self._sent.get(seq_id, (None, 0))
            if known is not table:
                count = 0
            if known is not table or needed > count:
                grown[seq_id] = (count, table[count:needed])
                self._sent[seq_id] = (table, needed)
        return grown


class BatchDecoder:
    """A rank's end."""

    def __init__(self) -> None:
        self._columns = SequenceColumns([])
        self._tables: dict[int, list[int]] = {}

    def decode(self, columns: Any, forget: bool, grown: Any, fields: Any) -> ScheduledBatch:
        """The batch of what `BatchEncoder.encode` gave."""
        if columns is not None:
            self._columns = SequenceColumns.restored(columns)
        if forget:
            self._tables.clear()
        for seq_id, (stays, follows) in grown.items():
            self._tables[seq_id] = [*self._tables.get(seq_id, ())[:stays], *follows]
        return ScheduledBatch.restored(self._columns, [self._tables[seq_id] for seq_id in self._columns.ids], fields)
