"""Plan of one step: the slots of its keys and values, and the items of its attention."""

from __future__ import annotations

import numpy as np
import torch

from kernels.interface import AttentionMetaData
from kernels.torch_backend.attention import AttentionPlan, Ints, PagedKVCache, plan
from kernels.torch_backend.token_selection import SelectionPlan


class TorchStepPlan:
    """Plan of one step for every layer. Attention with a window is planned when the first layer with that window asks.

    Attributes:
        slot_rows: int64 [tokens * Hkv], rows of the cache that keys and values are written to.
        selection: plan of the token selection; None when every row attends to all tokens.
    """

    def __init__(
        self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int, selection: SelectionPlan | None = None
    ) -> None:
        self.selection = selection
        self.slot_rows = _slot_rows(metadata.slot_mapping, cache)
        self._step = metadata, cache, num_heads
        self._plans: dict[int | None, AttentionPlan] = {}

    def attention(self, window: int | None) -> AttentionPlan:
        """The plan for layers whose rows see the last `window` keys, themselves included; None for all."""
        if window not in self._plans:
            self._plans[window] = plan(*self._step, window)
        return self._plans[window]


def _slot_rows(slots: Ints, cache: PagedKVCache) -> torch.Tensor:
    blocks, offsets = np.divmod(slots, cache.block_size)
    heads = np.arange(cache.num_kv_heads)
    rows = (blocks[:, None] * cache.num_kv_heads + heads) * cache.block_size + offsets[:, None]
    return torch.from_numpy(rows.ravel())
