"""Attention over the paged KV cache."""

from __future__ import annotations

import torch

from worker.model.forward_context import get_forward_context
from worker.model.layers.build import Build


class Attention:
    """Stores the step's keys and values, then attends to the cache, which includes the rows of this step.

    Args:
        build: shared by the layers.
        layer: index of the layer.
        scale: of the scores.
        window: number of keys that a row sees, including its own; None for all before it.
        sinks: [Hq], scores that enter a head's softmax without a value.
        softcap: scores become softcap * tanh(score / softcap); 0 for off.

    Attributes:
        window, sinks: as given.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> None:
        self._attention = build.kernels.attention
        self._name = f"layers.{layer}"
        self._scale = scale
        self._softcap = softcap
        self.window = window
        self.sinks = sinks

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq * D]"""
        context = get_forward_context()
        kv = context.kv_cache_data[self._name]
        self._attention.write(kv.cache, kv.layer_num, k, v, context.attn_metadata)
        metadata = context.attn_metadata
        out = self._attention.apply(
            q, kv.cache, kv.layer_num, metadata, self._scale, self.window, self.sinks, self._softcap
        )
        return out.flatten(1)
