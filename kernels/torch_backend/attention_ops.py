"""The attention operations of PyTorch's back end: plans of steps, and their execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from typing_extensions import override

from kernels.interface import AttentionMetaData, AttentionOps, KVCacheOps, KVSpec, LatentAttentionOps
from kernels.torch_backend import token_selection
from kernels.torch_backend.attention import AttentionPlan, Ints, PagedAttention, PagedKVCache, plan
from kernels.torch_backend.token_selection import SelectionPlan, TokenSelector


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
        """The plan for layers whose rows see the last `window` keys, their own included; None for all keys."""
        if window not in self._plans:
            self._plans[window] = plan(*self._step, window)
        return self._plans[window]


def _slot_rows(slots: Ints, cache: PagedKVCache) -> torch.Tensor:
    blocks, offsets = np.divmod(slots, cache.block_size)
    heads = np.arange(cache.num_kv_heads)
    rows = (blocks[:, None] * cache.num_kv_heads + heads) * cache.block_size + offsets[:, None]
    return torch.from_numpy(rows.ravel())


class TorchKVCacheOps(KVCacheOps):
    """Caches in the host's memory."""

    @override
    def allocate(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedKVCache:
        return PagedKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype)

    @override
    def touch(self, cache: PagedKVCache, progress: Callable[[int, int], None]) -> None:
        cache.touch(progress)

    @override
    def contents(self, cache: PagedKVCache, block_id: int) -> list[torch.Tensor]:
        return cache.contents(block_id)

    @override
    def copy_blocks(self, cache: PagedKVCache, pairs: Iterable[tuple[int, int]]) -> None:
        cache.copy_blocks(pairs)


class TorchAttentionOps(AttentionOps):
    """Attention over a TorchStepPlan. Keeps its buffers, so one object serves one thread."""

    def __init__(self) -> None:
        self._attention = PagedAttention()

    @override
    def plan(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> TorchStepPlan:
        metadata = metadata.moved(cache.block_size)
        return TorchStepPlan(metadata, cache, num_heads, token_selection.plan(metadata, cache, num_heads))

    @override
    def write(
        self, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        plan: TorchStepPlan = metadata.plan
        tokens = metadata.num_tokens
        cache.write(layer, plan.slot_rows, k[:tokens], v[:tokens])

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        plan: TorchStepPlan = metadata.plan
        return self._attention.attend(q, cache, layer, plan.attention(window), scale, sinks, softcap)


class TorchLatentAttentionOps(LatentAttentionOps):
    """Latent attention over a TorchStepPlan. Keeps its buffers, so one object serves one thread."""

    def __init__(self) -> None:
        self._attention = PagedAttention()
        self._selector = TokenSelector()

    @override
    def write(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        plan: TorchStepPlan = metadata.plan
        cache.write(layer, plan.slot_rows, k[: metadata.num_tokens])

    @override
    def write_index(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        # The cache has one head, so index keys lie in the same rows as keys.
        plan: TorchStepPlan = metadata.plan
        assert cache.index is not None
        cache.index.write(layer, plan.slot_rows, k[: metadata.num_tokens])

    @override
    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: PagedKVCache, layer: int, metadata: AttentionMetaData
    ) -> AttentionPlan | None:
        plan: TorchStepPlan = metadata.plan
        if plan.selection is None:
            return None
        return self._selector.select(q, weights, cache, layer, metadata, plan.selection)

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: AttentionPlan | None,
    ) -> torch.Tensor:
        if selection is not None:
            return self._attention.attend(q, cache.by_token(), layer, selection, scale)
        plan: TorchStepPlan = metadata.plan
        return self._attention.attend(q, cache, layer, plan.attention(None), scale)
