"""Attention over the paged KV cache."""

from __future__ import annotations

import torch

from kernels.interface import KernelBackend
from worker.forward_context import get_forward_context


class Attention:
    """Stores the step's keys and values, then attends to the cache: also rows of this step are read back from it."""

    def __init__(self, kernels: KernelBackend, layer: int, head_dim: int) -> None:
        self._kernels = kernels
        self._name = f"layers.{layer}"
        self._scale = head_dim**-0.5

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]"""
        context = get_forward_context()
        kv = context.kv_cache_data[self._name]
        self._kernels.write_kv(kv.cache, kv.layer_num, k, v, context.attn_metadata)
        return self._kernels.attention(q, kv.cache, kv.layer_num, context.attn_metadata, self._scale).flatten(1)
