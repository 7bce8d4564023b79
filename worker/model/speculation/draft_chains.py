"""Makes all drafts of a step by an EAGLE-3 head in one call of the kernels."""

from __future__ import annotations

import numpy as np
import torch

from kernels.interface import DraftStep, FusedDrafts, SampleParams
from kernels.no_token import NO_TOKEN
from worker.model.block_tables import BlockTables
from worker.model.models.eagle3 import Eagle3Head
from worker.model.speculation.draft_proposer import SampledStep


class DraftChains:
    """Drafts by a head whose work in a step is one operation of the kernels.

    Args:
        head: the head, with an embedding.
        fused: the operation.
    """

    def __init__(self, head: Eagle3Head, fused: FusedDrafts) -> None:
        self._head = head
        self._fused = fused
        self._tables = BlockTables()

    def run(self, step: SampledStep, wanted: dict[int, int]) -> tuple[torch.Tensor, list[list[int]]]:
        """Computes the step's rows into the head's KV, and makes drafts.

        Args:
            step: the step that the drafts follow.
            wanted: number of drafts by the sequence's place in the batch; 0 for sequences whose drafts are made
                elsewhere but which need the states.

        Returns:
            The head's states [D, 2H] after the last rows of these sequences, and their drafts.
        """
        batch = step.batch
        asking, counts = np.array(list(wanted), np.int64), np.array(list(wanted.values()), np.int64)
        reached = step.ends.copy()
        # The KV of a sequence's last draft is not computed.
        reached[asking] += np.maximum(counts - 1, 0)
        self._head.reach(int(reached.max()))
        sampling = batch.sampling
        made = DraftStep(
            step.begins,
            step.starts,
            step.counts,
            np.array(step.next_tokens, np.int64),
            step.token_ids,
            step.states,
            self._tables.of_step(batch.tables, -(-reached // batch.block_size)),
            asking,
            counts,
            SampleParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            sampling.seeds,
            sampling.choices,
        )
        states, ids = self._fused.run(made, step.kv_cache_data[self._head.kv_names[0]].cache)
        return states, [[token for token in own if token != NO_TOKEN] for own in ids.tolist()]
