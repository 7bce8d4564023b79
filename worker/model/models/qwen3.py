"""Qwen3ForCausalLM (dense): Llama's decoder with a norm on each head's queries and keys."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build
from worker.model.layers.norm import RMSNorm
from worker.model.models.llama import LlamaAttention, LlamaForCausalLM, refuse_partial_rotary
from worker.weights.checkpoint import Shape


class Qwen3Attention(LlamaAttention):
    """Attention with q_norm and k_norm."""

    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        """`{prefix}.q_norm` and `{prefix}.k_norm`."""
        return RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 dense. Its checkpoints have no MLP biases, whatever config.json says."""

    attention = Qwen3Attention

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        for layer in range(config.num_hidden_layers):
            cls.window(config, layer)

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """The sliding window of a layer that `layer_types` calls sliding; None for other layers."""
        if not config.slides(layer):
            return None
        if not config.flag("use_sliding_window"):
            raise ModelError("layer_types has sliding_attention, but use_sliding_window is not true")
        return config.count("sliding_window")

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Llama's tensors and the two norms."""
        norms: dict[str, Shape] = {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
        return super().attention_shapes(config) | norms
