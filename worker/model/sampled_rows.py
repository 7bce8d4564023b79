"""Rows of logits that a step samples: one per sequence whose last token it reaches, plus one after each draft.

Row j of a sequence has seen its first j drafts. It is drawn at its own position, with the penalties and masks of a
history that contains them. So if the drafts are right, it equals the row of a plain decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernels.upload import to_device
from worker.engine.batch import ScheduledBatch, TokenHistory
from worker.model.speculation.rejection_sampler import SpecDecodeMetadata

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledRows:
    """The R rows of F sequences; the rows of each sequence are adjacent.

    Attributes:
        seq_ids: of the F sequences.
        sequences: int64 [R], index of each row's sequence in the batch.
        positions: int64 [R], absolute positions of the drawn tokens, if all drafts in flight are right.
        step_rows: int64 [R], ascending, rows of the step.
        metadata: says which rows verify drafts.
        num_rejected: int64 [R] on the back end's device: how many drafts in flight were wrong, which lowers the
            positions; None without drafts in flight.
    """

    seq_ids: list[int]
    sequences: Ints
    positions: Ints
    step_rows: Ints
    metadata: SpecDecodeMetadata
    num_rejected: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: ScheduledBatch) -> SampledRows:
        """The rows of a batch."""
        final = np.flatnonzero(np.array(batch.is_final, np.bool_))
        seq_ids = [batch.req_ids[i] for i in final.tolist()]
        metadata = SpecDecodeMetadata.of([batch.scheduled_spec_decode_tokens.get(seq_id, []) for seq_id in seq_ids])
        counts = metadata.num_draft_tokens + 1
        sequences = np.repeat(final, counts)
        # Number of its sequence's rows after each row.
        behind = np.repeat(metadata.bonus_logits_indices, counts) - np.arange(len(sequences))
        ends = np.cumsum(np.array(batch.num_scheduled_tokens, np.int64))
        positions = np.array(batch.context_lens, np.int64)[sequences] - behind
        return cls(seq_ids, sequences, positions, ends[sequences] - 1 - behind, metadata)

    def __len__(self) -> int:
        return len(self.sequences)

    def moved(self, num_rejected: torch.Tensor, sequences: Ints, positions: torch.Tensor) -> SampledRows:
        """A copy with `num_rejected`, which is also subtracted from the positions of all rows of the step.

        Args:
            num_rejected: int64 [S], of the sequences.
            sequences: int64 [T], of the step's rows.
            positions: int64 [T], changed.
        """
        places = to_device(np.concatenate((sequences, self.sequences)), num_rejected.device)
        of_rows = num_rejected.index_select(0, places)
        positions -= of_rows[: len(sequences)]
        return replace(self, num_rejected=of_rows[len(sequences) :])

    @property
    def draft_rows(self) -> Ints:
        """int64 [D]: rows of the step that compute drafts."""
        return self.step_rows[self.metadata.target_logits_indices] + 1

    @cached_property
    def rows_of(self) -> dict[int, range]:
        """Rows of each sequence, by its index in the batch."""
        metadata = self.metadata
        bounds = zip(metadata.bonus_logits_indices.tolist(), metadata.num_draft_tokens.tolist(), strict=True)
        runs = [range(last - count, last + 1) for last, count in bounds]
        return {int(self.sequences[run[0]]): run for run in runs}

    def histories(self, batch: ScheduledBatch, known: Mapping[int, TokenHistory]) -> dict[int, TokenHistory]:
        """The history of each row whose sequence has one, by row.

        Args:
            batch: of the rows.
            known: histories without drafts, by index in the batch.
        """
        found = {}
        for i, history in known.items():
            drafts = batch.scheduled_spec_decode_tokens.get(batch.req_ids[i], [])
            for count, row in enumerate(self.rows_of[i]):
                found[row] = history.with_drafts(drafts[:count]) if count else history
        return found
