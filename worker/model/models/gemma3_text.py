"""Gemma3ForCausalLM (arXiv:2503.19786), text: Gemma 2 with a norm on each head, and two rotary embeddings."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build
from worker.model.layers.norm import RMSNorm, ShiftedRMSNorm
from worker.model.models.gemma2 import Gemma2Attention, Gemma2ForCausalLM
from worker.model.models.qwen3 import Qwen3Attention
from worker.weights.checkpoint import Shape


class Gemma3Attention(Gemma2Attention):
    """Attention with q_norm and k_norm."""

    @staticmethod
    @override
    def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
        return Qwen3Attention.norm_shapes(config)

    @override
    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        return ShiftedRMSNorm(build, f"{prefix}.q_norm"), ShiftedRMSNorm(build, f"{prefix}.k_norm")


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, text."""

    attention = Gemma3Attention
    has_local_rope = True

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        # transformers reads the entry and does not use it.
        if config.source.get("attn_logit_softcapping") is not None:
            raise ModelError("attn_logit_softcapping is not supported for Gemma3ForCausalLM; leave it out")
