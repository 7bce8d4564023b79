"""DeepseekV3ForCausalLM (arXiv:2412.19437): latent attention, dense layers first, then mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from kernels.interface import KVSpec
from worker.config.model_config import ModelConfig, ModelError, RopeConfig
from worker.model.layers.build import Build
from worker.model.layers.mla import CosSin, MLAConfig, MLAttention
from worker.model.layers.rotary import RotaryEmbedding
from worker.model.models.grouped_moe import GroupedMoEForCausalLM
from worker.model.sharding import Shard
from worker.weights.checkpoint import Shape


class DeepseekV3ForCausalLM(GroupedMoEForCausalLM):
    """DeepSeek-V3 and R1."""

    indexer = False
    layer_type = "full_attention"

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        if config.source.get("moe_layer_freq", 1) != 1:
            raise ModelError(f"moe_layer_freq {config.source['moe_layer_freq']} is not supported; supported: 1")
        if config.mlp_bias:
            raise ModelError(f"mlp_bias is not supported for {config.architecture}; leave it out")
        if set(config.listed("layer_types", str) or (cls.layer_type,)) != {cls.layer_type}:
            types = f"layer_types {config.source['layer_types']} is not supported for {config.architecture}"
            raise ModelError(f"{types}; supported: {cls.layer_type} for each layer")

    def make_rotary(self, build: Build, rope: RopeConfig | None = None) -> RotaryEmbedding:
        """Rotary embedding of the rotated part of a head."""
        return RotaryEmbedding(
            rope or build.config.rope, build.config.count("qk_rope_head_dim"), build.max_position, build.kernels.device
        )

    def make_attention(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor, CosSin], torch.Tensor]:
        """Latent attention."""
        return MLAttention(build, prefix, layer, MLAConfig.of(build.config, self.indexer))

    @classmethod
    def kv_spec(cls, config: ModelConfig, shard: Shard) -> KVSpec:
        """Latents, which every rank holds whole."""
        return MLAConfig.of(config, cls.indexer).kv_spec

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's attention."""
        shapes = MLAConfig.of(config, cls.indexer).shapes(config)
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}
