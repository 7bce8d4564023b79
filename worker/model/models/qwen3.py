"""Qwen3ForCausalLM (dense): Qwen2's decoder with a norm on each head's queries and keys."""

from __future__ import annotations

from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.norm import RMSNorm
from worker.model.models.llama import LlamaAttention
from worker.model.models.qwen2 import Qwen2ForCausalLM
from worker.weights.checkpoint import Shape


class Qwen3Attention(LlamaAttention):
    """Attention with q_norm and k_norm."""

    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        """`{prefix}.q_norm` and `{prefix}.k_norm`."""
        return RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3 dense: windows as in Qwen2, and biases of attention by `attention_bias`."""

    attention = Qwen3Attention

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """The projections' tensors and the two norms."""
        norms: dict[str, Shape] = {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
        return super().attention_shapes(config) | norms
