"""Qwen3ForCausalLM (dense): Qwen2's decoder with a norm on each head's queries and keys."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.norm import RMSNorm
from worker.model.models.llama import LlamaAttention
from worker.model.models.qwen2 import Qwen2ForCausalLM
from worker.weights.checkpoint import Shape


class Qwen3Attention(LlamaAttention):
    """Attention with q_norm and k_norm."""

    @staticmethod
    @override
    def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
        return {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}

    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        """`{prefix}.q_norm` and `{prefix}.k_norm`."""
        return RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3 dense: windows as in Qwen2, and biases of attention by `attention_bias`."""

    attention = Qwen3Attention
