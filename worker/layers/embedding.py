"""Token embeddings and the output head, which may share one matrix."""

from __future__ import annotations

import torch

from kernels.interface import KernelBackend
from worker.loader import Weights


class Embedding:
    """The rows of `{name}.weight` [V, H]."""

    def __init__(self, weights: Weights, name: str, dtype: torch.dtype) -> None:
        self.weight = weights.take(f"{name}.weight").to(dtype, copy=True)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]"""
        return self.weight.index_select(0, token_ids)


class LMHead:
    """Logits of the vocabulary in float32; `weight` [V, H] is the embedding's or the head's own."""

    def __init__(self, kernels: KernelBackend, weight: torch.Tensor) -> None:
        self._kernels = kernels
        self._packed = kernels.pack_linear(weight, None, weight.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 [T, V]"""
        return self._kernels.linear(hidden, self._packed).float()
