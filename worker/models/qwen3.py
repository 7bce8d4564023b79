"""Qwen3ForCausalLM (dense): Llama's decoder with a norm on each head's queries and keys."""

from __future__ import annotations

import torch

from kernels.interface import KernelBackend
from worker.layers.norm import RMSNorm
from worker.loader import Shape, Weights
from worker.model_config import ModelConfig
from worker.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3Attention(LlamaAttention):
    """Attention with q_norm and k_norm."""

    def __init__(
        self, config: ModelConfig, kernels: KernelBackend, weights: Weights, prefix: str, layer: int, dtype: torch.dtype
    ) -> None:
        super().__init__(config, kernels, weights, prefix, layer, dtype)
        self._q_norm = RMSNorm(kernels, weights, f"{prefix}.q_norm", config.rms_norm_eps, dtype)
        self._k_norm = RMSNorm(kernels, weights, f"{prefix}.k_norm", config.rms_norm_eps, dtype)

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms each head of q [T, Hq, D] and k [T, Hkv, D]."""
        return self._q_norm(q), self._k_norm(k)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 dense. Its checkpoints have no MLP biases, whatever config.json says."""

    attention = Qwen3Attention

    @classmethod
    def layer_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Llama's tensors and the two norms."""
        norms: dict[str, Shape] = {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
        return super().layer_shapes(config) | norms
