"""Draft models as the runner calls them: after every step, on each rank, in the same forward pass.

A draft model has KV of its own under the block ids of the target, so that prefix hits, preemption and eviction need no
more. Its rows are those of the target's steps. Where a slot is stale or was never written, drafts are worse, and no
token is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.interface import KVCache, KVSpec
from kernels.no_token import NO_TOKEN
from worker.engine.batch import ScheduledBatch
from worker.model.forward_context import KVCacheTensor
from worker.model.sampled_rows import SampledRows


@dataclass(frozen=True)
class SampledStep:
    """A step whose tokens are drawn.

    Attributes:
        batch: the step.
        rows: that were sampled.
        tokens: the new tokens of each sequence that has any: its right drafts, and the one behind them.
        token_ids: int64 [T], tokens of all rows.
        states: [T, (1 + n) H], the target's hidden states of all rows, and the streams before n `aux_layers`.
        kv_cache_data: the draft model's KV, by the names of its layers.
    """

    batch: ScheduledBatch
    rows: SampledRows
    tokens: Mapping[int, tuple[int, ...]]
    token_ids: torch.Tensor
    states: torch.Tensor
    kv_cache_data: Mapping[str, KVCacheTensor]

    def num_tokens(self, i: int) -> int:
        """Tokens of a sequence, by its place in the batch, with the new ones."""
        seq_id = self.batch.req_ids[i]
        num_drafts = len(self.batch.scheduled_spec_decode_tokens.get(seq_id, ()))
        return self.batch.context_lens[i] - num_drafts + len(self.tokens.get(seq_id, ()))

    def num_drafts(self, i: int) -> int:
        """Drafts that a sequence wants and has slots for: the last one's KV is not computed, nor is the newest token's
        without the one behind it."""
        tokens = self.tokens.get(self.batch.req_ids[i], (NO_TOKEN,))
        if tokens[-1] == NO_TOKEN:
            return 0
        num_slots = len(self.batch.tables[i]) * self.batch.block_size
        wanted = self.batch.drafts_wanted.get(self.batch.req_ids[i], 0)
        return max(0, min(wanted, num_slots - self.num_tokens(i) + 2))


class DraftProposer(Protocol):
    """A draft model.

    Attributes:
        kv_spec: of one of its layers.
        num_layers: that have KV.
    """

    kv_spec: KVSpec
    num_layers: int

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """KV of its layers as they find it in the forward context."""
        ...

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        """Computes the step's rows into its KV, and at most `SampledStep.num_drafts` drafts of each sequence."""
        ...
