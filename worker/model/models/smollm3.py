"""SmolLM3ForCausalLM: Llama's decoder, some of whose layers do not rotate queries and keys (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from typing_extensions import override

from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build
from worker.model.models.llama import LlamaAttention, LlamaForCausalLM, refuse_partial_rotary


class SmolLM3Attention(LlamaAttention):
    """Attention that rotates in the layers of which `no_rope_layers` says 1."""

    def __init__(self, build: Build, prefix: str, layer: int, window: int | None = None) -> None:
        super().__init__(build, prefix, layer, window)
        self.rotates = _rotates(build.config)[layer]


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3."""

    attention = SmolLM3Attention

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        _rotates(config)
        for layer in range(config.num_hidden_layers):
            cls.window(config, layer)

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """The sliding window of a layer that `layer_types` calls sliding, if windows are used."""
        slides = config.slides(layer) and config.flag("use_sliding_window")
        return config.count("sliding_window") if slides else None


def _rotates(config: ModelConfig) -> list[bool]:
    """Says of each layer if it rotates.

    Raises:
        ModelError: `no_rope_layers` has not one 0 or 1 per layer.
    """
    listed = config.listed("no_rope_layers", int) or []
    if len(listed) != config.num_hidden_layers or not set(listed) <= {0, 1}:
        raise ModelError(f"config.json: no_rope_layers must list 0 or 1 for each of {config.num_hidden_layers} layers")
    return [bool(each) for each in listed]
