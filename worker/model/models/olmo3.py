"""Olmo3ForCausalLM: OLMo 2 with sliding windows in most layers, which have a rotary embedding of their own."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig
from worker.model.models.llama import refuse_partial_rotary
from worker.model.models.olmo2 import Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3."""

    has_local_rope = True

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        for layer in range(config.num_hidden_layers):
            cls.window(config, layer)

    @classmethod
    @override
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        return config.listed_window(layer)
