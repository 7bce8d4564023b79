"""DeepseekV3ForCausalLM (arXiv:2412.19437): latent attention, dense layers first, then mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.interface import KVSpec
from worker.layers.build import Build
from worker.layers.mla import CosSin, MLAConfig, MLAttention
from worker.layers.moe import grouped_moe, grouped_moe_shapes
from worker.layers.rotary import RotaryEmbedding
from worker.loader import Shape
from worker.model_config import ModelConfig, ModelError
from worker.models.llama import LlamaForCausalLM, LlamaMLP
from worker.parallel import Shard


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    """DeepSeek-V3 and R1. MTP layers of the checkpoint are kept for speculation."""

    indexer = False
    layer_type = "full_attention"

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """See LlamaForCausalLM."""
        if config.rope.partial_rotary_factor != 1.0:
            raise ModelError(f"partial_rotary_factor is not supported for {config.architecture}; leave it out")
        if config.source.get("moe_layer_freq", 1) != 1:
            raise ModelError(f"moe_layer_freq {config.source['moe_layer_freq']} is not supported; supported: 1")
        if config.mlp_bias:
            raise ModelError(f"mlp_bias is not supported for {config.architecture}; leave it out")
        if set(config.source.get("layer_types") or (cls.layer_type,)) != {cls.layer_type}:
            types = f"layer_types {config.source['layer_types']} is not supported for {config.architecture}"
            raise ModelError(f"{types}; supported: {cls.layer_type} for each layer")

    @classmethod
    def sparse(cls, config: ModelConfig, layer: int) -> bool:
        """Whether a layer's feed-forward network is a mixture of experts."""
        return layer >= config.count("first_k_dense_replace", 0, least=0)

    def make_rotary(self, build: Build) -> RotaryEmbedding:
        """Of the rotated part of a head."""
        return RotaryEmbedding(build.config.rope, build.config.count("qk_rope_head_dim"), build.max_position)

    def make_attention(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor, CosSin], torch.Tensor]:
        """Latent attention."""
        return MLAttention(build, prefix, layer, MLAConfig.of(build.config, self.indexer))

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts, or a dense network in the first layers."""
        if not self.sparse(build.config, layer):
            return LlamaMLP(build, prefix, build.config.intermediate_size)
        shared = LlamaMLP(build, f"{prefix}.shared_experts", _shared_inner(build.config))
        return grouped_moe(build, prefix, shared.partial)

    @classmethod
    def kv_spec(cls, config: ModelConfig, shard: Shard) -> KVSpec:
        """Latents, which every rank holds whole."""
        return MLAConfig.of(config, cls.indexer).kv_spec

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """The MTP layers, which are numbered on behind the others."""
        first = config.num_hidden_layers
        return tuple(f"model.layers.{first + i}." for i in range(config.count("num_nextn_predict_layers", 0, least=0)))

    @classmethod
    def layer_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of one layer."""
        hidden = config.hidden_size
        shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        attention = MLAConfig.of(config, cls.indexer).shapes(config)
        shapes |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if not cls.sparse(config, layer):
            return shapes | _mlp_shapes("mlp", hidden, config.intermediate_size)
        shared = _mlp_shapes("mlp.shared_experts", hidden, _shared_inner(config))
        return shapes | grouped_moe_shapes(config) | shared


def _shared_inner(config: ModelConfig) -> int:
    """Inner units of all shared experts, which are one network."""
    return config.count("moe_intermediate_size") * config.count("n_shared_experts")


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
