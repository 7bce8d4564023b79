"""Qwen3ForCausalLM (dense): Llama's decoder with a norm on each head's queries and keys."""

from __future__ import annotations

import torch

from worker.layers.build import Build
from worker.layers.norm import RMSNorm
from worker.loader import Shape
from worker.model_config import ModelConfig
from worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """Attention with q_norm and k_norm."""

    def __init__(self, build: Build, prefix: str, layer: int) -> None:
        super().__init__(build, prefix, layer)
        self._q_norm = RMSNorm(build, f"{prefix}.q_norm")
        self._k_norm = RMSNorm(build, f"{prefix}.k_norm")

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms each head of q [T, Hq, D] and k [T, Hkv, D]."""
        return self._q_norm(q), self._k_norm(k)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 dense. Its checkpoints have no MLP biases, whatever config.json says."""

    attention = Qwen3Attention

    @classmethod
    def layer_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Llama's tensors and the two norms."""
        norms: dict[str, Shape] = {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
        return super().layer_shapes(config, layer) | norms
