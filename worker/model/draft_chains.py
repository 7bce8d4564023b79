"""All drafts of a step by a head whose part of it is one operation of the kernels, from the engine's batch."""

from __future__ import annotations

import numpy as np
import torch

from kernels.interface import DraftStep, FusedDrafts, SampleParams
from kernels.no_token import NO_TOKEN
from worker.engine.batch import SequenceColumns
from worker.model.block_tables import BlockTables
from worker.model.draft_proposer import SampledStep
from worker.model.models.eagle3 import Eagle3Head


class DraftChains:
    """Drafts of a head.

    Args:
        head: with an embedding.
        fused: what it does in a step.
    """

    def __init__(self, head: Eagle3Head, fused: FusedDrafts) -> None:
        self._head = head
        self._fused = fused
        self._tables = BlockTables()
        self._drawn = _Drawn(SequenceColumns([]))

    def run(self, step: SampledStep, wanted: dict[int, int]) -> tuple[torch.Tensor, list[list[int]]]:
        """Computes the step's rows into the head's KV, and drafts.

        Args:
            step: behind which they stand.
            wanted: how many drafts of the sequences that may have any, by place in the batch; 0 for those that are
                drawn elsewhere.

        Returns:
            The head's states [D, 2H] behind the last rows of these sequences, and their drafts.
        """
        batch = step.batch
        asking, counts = np.array(list(wanted), np.int64), np.array(list(wanted.values()), np.int64)
        right = np.array(step.right_rows, np.int64)
        reached = step.starts + right
        # The last draft of each is not computed.
        reached[asking] += np.maximum(counts - 1, 0)
        self._head.reach(int(reached.max()))
        if self._drawn.columns is not batch.columns:
            self._drawn = _Drawn(batch.columns)
        made = DraftStep(
            step.begins,
            step.starts,
            right,
            np.array(step.next_tokens, np.int64),
            step.token_ids,
            step.states,
            self._tables.of_step(batch.tables, -(-reached // batch.block_size)),
            asking,
            counts,
            self._drawn.params,
            self._drawn.seeds,
            self._drawn.choices,
        )
        states, ids = self._fused.run(made, step.kv_cache_data[self._head.kv_names[0]].cache)
        return states, [[token for token in own if token != NO_TOKEN] for own in ids.tolist()]


class _Drawn:
    """Parameters of the sequences of a step as arrays, kept while the sequences are the same."""

    def __init__(self, columns: SequenceColumns) -> None:
        self.columns = columns
        self.params = SampleParams(
            temperature=np.array(columns.temperatures, np.float32),
            top_k=np.array(columns.top_ks, np.int64),
            top_p=np.array(columns.top_ps, np.float32),
            min_p=np.array(columns.min_ps, np.float32),
        )
        self.seeds = np.array(columns.seeds, np.uint64)
        self.choices = np.array(columns.choices, np.int64)
