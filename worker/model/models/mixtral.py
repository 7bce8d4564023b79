"""MixtralForCausalLM (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.interface import Routing
from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.moe import ExpertNames, ExpertRouter, MoE, MoEConfig
from worker.model.models.mistral import MistralForCausalLM
from worker.weights.checkpoint import Shape

_EXPERTS = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralForCausalLM(MistralForCausalLM):
    """Mixtral: softmax over the experts, the best two weighted so that they add up to 1."""

    @classmethod
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        """The experts' shape."""
        routing = Routing(config.count("num_experts_per_tok"), renormalize=True)
        return MoEConfig(config.count("num_local_experts"), config.intermediate_size, routing)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts."""
        prefix = prefix.removesuffix("mlp") + "block_sparse_moe"
        config = self.moe_config(build.config)
        router = ExpertRouter(build, f"{prefix}.gate", config.routing)
        return MoE(build, f"{prefix}.experts", config, router, _EXPERTS.take(build, f"{prefix}.experts", config))

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's mixture."""
        moe = cls.moe_config(config)
        gate: dict[str, Shape] = {"block_sparse_moe.gate.weight": (moe.num_experts, config.hidden_size)}
        return gate | _EXPERTS.shapes("block_sparse_moe.experts", moe, config.hidden_size)
