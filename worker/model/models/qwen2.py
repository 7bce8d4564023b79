"""Qwen2ForCausalLM (Qwen2 and 2.5, dense): Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig, ModelError
from worker.model.models.llama import LlamaAttention, LlamaForCausalLM, refuse_partial_rotary


class Qwen2Attention(LlamaAttention):
    """Attention whose output projection alone has no bias."""

    @staticmethod
    @override
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        return True, False


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and 2.5 dense. Their checkpoints have no MLP biases, whatever config.json says."""

    attention: type[LlamaAttention] = Qwen2Attention

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
