"""Glm4MoeForCausalLM (GLM-4.5 and 4.6): partial rotary, dense layers first, then mixtures with shared experts."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.norm import RMSNorm
from worker.model.models.grouped_moe import GroupedMoEForCausalLM
from worker.model.models.llama import LlamaAttention, refuse_windows
from worker.weights.checkpoint import Shape


class Glm4MoeAttention(LlamaAttention):
    """Attention with, in some models, a norm on each head's queries and keys."""

    @staticmethod
    @override
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        return config.attention_bias, False

    @staticmethod
    @override
    def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
        norm: Shape = (config.head_dim,)
        return {"self_attn.q_norm.weight": norm, "self_attn.k_norm.weight": norm} if _has_norms(config) else {}

    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm] | None:
        """`{prefix}.q_norm` and `{prefix}.k_norm`, if there are norms."""
        if not _has_norms(build.config):
            return None
        return RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")


class Glm4MoeForCausalLM(GroupedMoEForCausalLM):
    """GLM-4 MoE."""

    attention = Glm4MoeAttention

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_windows(config)


def _has_norms(config: ModelConfig) -> bool:
    return config.flag("use_qk_norm")
