"""Phi3ForCausalLM (Phi-3, Phi-3.5, Phi-4): Llama's decoder with joined projections, and maybe a window and longrope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from worker.config.model_config import ModelConfig
from worker.model.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from worker.weights.checkpoint import Shape


class Phi3Attention(LlamaAttention):
    """Attention whose queries, keys and values have one tensor, and no biases."""

    @staticmethod
    @override
    def qkv_parts(
        config: ModelConfig, prefix: str, rows: slice, kv_rows: slice
    ) -> Mapping[str, slice | Sequence[slice]]:
        queries, keys = _widths(config)
        return {f"{prefix}.qkv_proj": (rows, _moved(kv_rows, queries), _moved(kv_rows, queries + keys))}

    @staticmethod
    @override
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        return False, False


class Phi3MLP(LlamaMLP):
    """Feed-forward network whose two projections of the input have one tensor."""

    @staticmethod
    @override
    def gate_up_parts(prefix: str, inner: int, part: slice) -> Mapping[str, slice | Sequence[slice]]:
        return {f"{prefix}.gate_up_proj": (part, _moved(part, inner))}


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 and 4, which may rotate a part of each head."""

    attention = Phi3Attention
    mlp = Phi3MLP

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        cls.window(config, 0)

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """`sliding_window`, in every layer."""
        return None if config.source["sliding_window"] is None else config.count("sliding_window")

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's attention."""
        queries, keys = _widths(config)
        return {
            "self_attn.qkv_proj.weight": (queries + 2 * keys, config.hidden_size),
            "self_attn.o_proj.weight": (config.hidden_size, queries),
        }

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        hidden, inner = config.hidden_size, config.intermediate_size
        return {"mlp.gate_up_proj.weight": (2 * inner, hidden), "mlp.down_proj.weight": (hidden, inner)}


def _widths(config: ModelConfig) -> tuple[int, int]:
    """Numbers of all queries and of all keys in a row."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _moved(part: slice, places: int) -> slice:
    return slice(part.start + places, part.stop + places)
