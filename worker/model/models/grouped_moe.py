"""Common parts of DeepSeek-V3 and GLM-4: dense layers first, then mixtures with shared experts, then MTP layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.moe import grouped_moe, grouped_moe_shapes
from worker.model.models.llama import LlamaForCausalLM, LlamaMLP, dense_shapes
from worker.weights.checkpoint import Shape


class GroupedMoEForCausalLM(LlamaForCausalLM):
    """Llama's decoder with such feed-forward networks. MTP layers of the checkpoint are kept for speculation."""

    # Dense layers where config.json does not say how many.
    dense_layers: int

    @classmethod
    def sparse(cls, config: ModelConfig, layer: int) -> bool:
        """True if a layer's feed-forward network is a mixture of experts."""
        return layer >= config.count("first_k_dense_replace", cls.dense_layers, least=0)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts, or a dense network in the first layers."""
        if not self.sparse(build.config, layer):
            return LlamaMLP(build, prefix, build.config.intermediate_size)
        shared = LlamaMLP(build, f"{prefix}.shared_experts", _shared_inner(build.config))
        return grouped_moe(build, prefix, shared.partial)

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """The MTP layers, which are numbered on behind the others."""
        first = config.num_hidden_layers
        count = config.count("num_nextn_predict_layers", 0, least=0)
        return tuple(f"model.layers.{layer}." for layer in range(first, first + count))

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        hidden = config.hidden_size
        if not cls.sparse(config, layer):
            return dense_shapes("mlp", hidden, config.intermediate_size)
        return grouped_moe_shapes(config) | dense_shapes("mlp.shared_experts", hidden, _shared_inner(config))


def _shared_inner(config: ModelConfig) -> int:
    """Inner units of all shared experts, which are one network."""
    return config.count("moe_intermediate_size") * config.count("n_shared_experts", 1)
