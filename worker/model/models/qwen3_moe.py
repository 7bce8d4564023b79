"""Qwen3MoeForCausalLM: Qwen3 with mixtures of experts in some layers or all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from kernels.interface import Routing
from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build
from worker.model.layers.moe import ExpertNames, ExpertRouter, MoE, MoEConfig
from worker.model.models.llama import LlamaMLP, dense_shapes, refuse_partial_rotary
from worker.model.models.qwen3 import Qwen3ForCausalLM
from worker.weights.checkpoint import Shape


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 MoE: softmax over all experts, the best of them weighted as they are or so that they add up to 1."""

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
    def sparse(cls, config: ModelConfig, layer: int) -> bool:
        """True if a layer's feed-forward network is a mixture of experts."""
        dense_only = config.listed("mlp_only_layers", int) or ()
        return layer not in dense_only and (layer + 1) % config.count("decoder_sparse_step") == 0

    @classmethod
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        """The experts' shape."""
        routing = Routing(config.count("num_experts_per_tok"), renormalize=config.flag("norm_topk_prob"))
        return MoEConfig(config.count("num_experts"), config.count("moe_intermediate_size"), routing)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts, or a dense network."""
        if not self.sparse(build.config, layer):
            return LlamaMLP(build, prefix, build.config.intermediate_size)
        config = self.moe_config(build.config)
        router = ExpertRouter(build, f"{prefix}.gate", config.routing)
        return MoE(build, f"{prefix}.experts", config, router, ExpertNames().take(build, f"{prefix}.experts", config))

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        if not cls.sparse(config, layer):
            return dense_shapes("mlp", config.hidden_size, config.intermediate_size)
        moe = cls.moe_config(config)
        gate: dict[str, Shape] = {"mlp.gate.weight": (moe.num_experts, config.hidden_size)}
        return gate | ExpertNames().shapes("mlp.experts", moe, config.hidden_size)
