"""Draft models as the runner calls them: after every step, on each rank, in the same forward pass.

A draft model has KV of its own under the block ids of the target, so that prefix hits, preemption and eviction need no
more. Its rows are those of the target's steps. Where a slot is stale or was never written, drafts are worse, and no
token is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import KVCache, KVSpec
from kernels.no_token import NO_TOKEN
from worker.engine.batch import ScheduledBatch, TokenHistory
from worker.model.forward_context import KVCacheTensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledStep:
    """A step whose tokens are drawn.

    Attributes:
        batch: the step.
        tokens: the new tokens of each sequence that has any: its right drafts, and the one behind them.
        token_ids: int64 [T], tokens of all rows.
        states: [T, (1 + n) H], the target's hidden states, and the streams before n `aux_layers`. Of rows that give
            no tokens the hidden states may be anything unless the draft model takes them.
        kv_cache_data: the draft model's KV, by the names of its layers.
        behind: int64 [S], by how much each sequence stands further in front than the batch says: its drafts that were
            in flight when it was scheduled, and wrong; None where there were none.
    """

    batch: ScheduledBatch
    tokens: Mapping[int, tuple[int, ...]]
    token_ids: Ints
    states: torch.Tensor
    kv_cache_data: Mapping[str, KVCacheTensor]
    behind: Ints | None = None

    @cached_property
    def begins(self) -> Ints:
        """int64 [S]: the first row of each sequence."""
        lengths = np.array(self.batch.num_scheduled_tokens, np.int64)
        return np.cumsum(lengths) - lengths

    @cached_property
    def starts(self) -> Ints:
        """int64 [S]: the position of that row."""
        starts = np.array(self.batch.num_computed_tokens, np.int64)
        return starts if self.behind is None else starts - self.behind

    @cached_property
    def right_rows(self) -> list[int]:
        """Rows of each sequence without those of drafts that were wrong."""
        rows, drafts = list(self.batch.num_scheduled_tokens), self.batch.scheduled_spec_decode_tokens
        if drafts:
            for i, seq_id in enumerate(self.batch.req_ids):
                num_drafts = len(drafts.get(seq_id, ()))
                num_wrong = num_drafts + 1 - len(self.new_tokens(i)) if num_drafts else 0
                rows[i] -= num_wrong
        return rows

    @cached_property
    def counts(self) -> Ints:
        """int64 [S]: `right_rows`."""
        return np.array(self.right_rows, np.int64)

    @cached_property
    def ends(self) -> Ints:
        """int64 [S]: the position behind the last of these rows."""
        return self.starts + self.counts

    @cached_property
    def next_tokens(self) -> list[int]:
        """The token behind the last right row of each sequence; any id where nobody knows it."""
        known = self.batch.next_token_ids
        every = ((seq_id, self.tokens.get(seq_id)) for seq_id in self.batch.req_ids)
        return [max(0, new[-1]) if new else known.get(seq_id, 0) for seq_id, new in every]

    def new_tokens(self, i: int) -> tuple[int, ...]:
        """The new tokens of a sequence, by its place in the batch."""
        return self.tokens.get(self.batch.req_ids[i], ())

    def num_tokens(self, i: int) -> int:
        """Tokens of a sequence whose last one the step has reached, with the new ones."""
        return int(self.ends[i]) + 1

    def num_drafts(self, i: int) -> int:
        """Drafts that a sequence wants and has slots for: the last one's KV is not computed, nor is the newest token's
        without the one behind it."""
        wanted = self.batch.drafts_wanted.get(self.batch.req_ids[i], 0)
        if not wanted or (self.new_tokens(i) or (NO_TOKEN,))[-1] == NO_TOKEN:
            return 0
        num_slots = len(self.batch.tables[i]) * self.batch.block_size
        return max(0, min(wanted, num_slots - self.num_tokens(i) + 2))

    def history(self, i: int, drafts: list[int]) -> TokenHistory | None:
        """History of a sequence behind the new tokens and these drafts, where it changes logits."""
        known = self.batch.histories.get(i)
        if known is None:
            return None
        if self.batch.from_last_output[i]:
            known = known.with_token(int(self.token_ids[self.begins[i]]))
        return known.with_drafts([*self.new_tokens(i), *drafts])


class DraftProposer(Protocol):
    """A draft model.

    Attributes:
        kv_spec: of one of its layers.
        num_layers: that have KV.
        takes_states: True if it takes the target's hidden states of all rows; the streams before `aux_layers` it gets
            in any case.
    """

    kv_spec: KVSpec
    num_layers: int
    takes_states: bool

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """KV of its layers as they find it in the forward context."""
        ...

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        """Computes the step's rows into its KV, and at most `SampledStep.num_drafts` drafts of each sequence."""
        ...
