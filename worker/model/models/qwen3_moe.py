"""Qwen3MoeForCausalLM: Qwen2's mixtures without a shared expert, and Qwen3's attention."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig, ModelError
from worker.model.models.llama import refuse_partial_rotary
from worker.model.models.qwen2_moe import Qwen2MoeForCausalLM
from worker.model.models.qwen3 import Qwen3Attention


class Qwen3MoeForCausalLM(Qwen2MoeForCausalLM):
    """Qwen3 MoE."""

    attention = Qwen3Attention

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        if config.source.get("layer_types") is not None:
            raise ModelError(f"layer_types is not supported for {config.architecture}; leave it out")

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """The sliding window of every layer; None without `use_sliding_window`."""
        return None if config.source["sliding_window"] is None else config.count("sliding_window")

    @classmethod
    @override
    def shared_inner(cls, config: ModelConfig) -> int:
        return 0
