"""MistralForCausalLM (arXiv:2310.06825): Llama's decoder with one sliding window for all layers, and no biases."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import SLIDING_ATTENTION, ModelConfig, ModelError
from worker.model.models.llama import LlamaAttention, LlamaForCausalLM, refuse_partial_rotary


class MistralAttention(LlamaAttention):
    """Attention without biases, whatever config.json says."""

    @staticmethod
    @override
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        return False, False


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral 7B, Nemo and Small; later versions have no window."""

    attention = MistralAttention

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        others = {*(config.listed("layer_types", str) or ())} - {SLIDING_ATTENTION}
        if cls.window(config, 0) is not None and others:
            raise ModelError(f"layer_types with {min(others)} beside a sliding window is not supported for Mistral")

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """`sliding_window`, in every layer."""
        return None if config.source["sliding_window"] is None else config.count("sliding_window")
