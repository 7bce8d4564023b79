"""Glm4MoeForCausalLM (GLM-4.5 and 4.6): partial rotary, dense layers first, then mixtures with shared experts."""

from __future__ import annotations

import torch

from worker.layers.build import Build
from worker.layers.norm import RMSNorm
from worker.loader import Shape
from worker.model_config import ModelConfig
from worker.models.grouped_moe import GroupedMoEForCausalLM
from worker.models.llama import LlamaAttention, refuse_windows


class Glm4MoeAttention(LlamaAttention):
    """Attention with, in some models, a norm on each head's queries and keys."""

    output_bias = False

    def __init__(self, build: Build, prefix: str, layer: int, window: int | None = None) -> None:
        super().__init__(build, prefix, layer, window)
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        if _has_norms(build.config):
            self._norms = RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms each head of q [T, Hq, D] and k [T, Hkv, D], if there are norms."""
        return (q, k) if self._norms is None else (self._norms[0](q), self._norms[1](k))


class Glm4MoeForCausalLM(GroupedMoEForCausalLM):
    """GLM-4 MoE."""

    attention = Glm4MoeAttention
    dense_layers = 1

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """See LlamaForCausalLM."""
        refuse_windows(config)

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Llama's tensors and, in some models, the two norms."""
        norm: Shape = (config.head_dim,)
        norms = {"self_attn.q_norm.weight": norm, "self_attn.k_norm.weight": norm} if _has_norms(config) else {}
        return super().attention_shapes(config) | norms


def _has_norms(config: ModelConfig) -> bool:
    return config.flag("use_qk_norm", False)
