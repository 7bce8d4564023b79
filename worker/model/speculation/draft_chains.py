"""All drafts of a step by a head whose part of it is one operation of the kernels, from the engine's batch."""

from __future__ import annotations

import numpy as np
import torch

from kernels.interface import DraftStep, FusedDrafts, SampleParams
from kernels.no_token import NO_TOKEN
from worker.model.block_tables import BlockTables
from worker.model.models.eagle3 import Eagle3Head
from worker.model.speculation.draft_proposer import SampledStep


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
        reached = step.ends.copy()
        # The last draft of each is not computed.
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
