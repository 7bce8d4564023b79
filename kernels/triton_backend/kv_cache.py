"""The paged KV cache on the device, and writing to it.

[layers, 2, blocks, block_size, Hkv, D]: the layout that AITER's kernels take too. The block is
the outermost dimension inside a layer, so that blocks can be copied without knowing heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from typing_extensions import override

from kernels.interface import IndexSpec, KVCacheOps, KVSpec


class DeviceKVCache:
    """Keys and values of all layers in one tensor of any float dtype, FP8 too.

    Args:
        data: zeros [layers, 2, blocks, block_size, Hkv, D]; a latent cache has 1 in place of 2: its values are the
            first `value_dim` numbers of its keys.
        value_dim: D, or the width of a latent cache's values.
        index_spec: the sparse-attention indexer; None for full attention.
        index: its keys for the same blocks, a latent cache of one head.
    """

    def __init__(
        self,
        data: torch.Tensor,
        value_dim: int,
        index_spec: IndexSpec | None = None,
        index: DeviceKVCache | None = None,
    ) -> None:
        _, sides, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim = data.shape
        self.data = data
        self.value_dim = value_dim
        self.latent = sides == 1
        self.index_spec = index_spec
        self.index = index

    @classmethod
    def allocate(
        cls,
        spec: KVSpec,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DeviceKVCache:
        """A zeroed cache of `num_blocks` blocks."""
        sides = 1 if spec.latent_value_dim else 2
        shape = (num_layers, sides, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        index = None
        if spec.index is not None:
            keys = KVSpec(1, spec.index.head_dim, latent_value_dim=spec.index.head_dim)
            index = cls.allocate(keys, num_layers, num_blocks, block_size, dtype, device)
        data = torch.zeros(shape, dtype=dtype, device=device)
        return cls(data, spec.latent_value_dim or spec.head_dim, spec.index, index)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies blocks. Allocates nothing, because a measured step may leave no free memory."""
        pairs = list(pairs)
        data = self.data.view(torch.uint8)
        for source, target in pairs:
            data[:, :, target] = data[:, :, source]
        if self.index is not None:
            self.index.copy_blocks(pairs)

    def keys(self, layer: int) -> torch.Tensor:
        """Keys of one layer: [blocks, block_size, Hkv, D]."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Values of one layer: [blocks, block_size, Hkv, value_dim]; for a latent cache, a part of its keys."""
        return self.data[layer, -1, ..., : self.value_dim]

    def contents(self, block_id: int) -> list[torch.Tensor]:
        """A block's keys and values of all layers, and its index keys: views."""
        own = self.data[:, :, block_id]
        return [own] if self.index is None else [own, *self.index.contents(block_id)]


class TritonKVCacheOps(KVCacheOps):
    """Operations on KV caches in device memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def allocate(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> DeviceKVCache:
        return DeviceKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype, self._device)

    @override
    def touch(self, cache: DeviceKVCache, progress: Callable[[int, int], None]) -> None:
        """Does nothing: the device's memory is taken at allocation."""

    @override
    def contents(self, cache: DeviceKVCache, block_id: int) -> list[torch.Tensor]:
        return cache.contents(block_id)

    @override
    def copy_blocks(self, cache: DeviceKVCache, pairs: Iterable[tuple[int, int]]) -> None:
        cache.copy_blocks(pairs)
