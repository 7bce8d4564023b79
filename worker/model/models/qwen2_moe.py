"""Qwen2MoeForCausalLM (Qwen1.5-MoE, Qwen2-57B): Qwen2 with mixtures of experts, and one that all rows share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from kernels.interface import Routing
from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.moe import ExpertNames, ExpertRouter, MoE, MoEConfig
from worker.model.models.llama import LlamaAttention, LlamaMLP, dense_shapes
from worker.model.models.qwen2 import Qwen2ForCausalLM
from worker.weights.checkpoint import Shape

Network = Callable[[torch.Tensor], torch.Tensor]


class Qwen2MoeAttention(LlamaAttention):
    """Attention with biases on queries, keys and values by `qkv_bias`."""

    @staticmethod
    @override
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        return config.flag("qkv_bias"), False


class SharedExpert:
    """A network that every row uses, weighted by the sigmoid of a product of the row: an expert that is always chosen.

    Args:
        build: shared by the layers.
        prefix: of the mixture's tensors.
        inner: units of the network.
    """

    def __init__(self, build: Build, prefix: str, inner: int) -> None:
        self._network = LlamaMLP(build, f"{prefix}.shared_expert", inner)
        # A router of one expert: torch's own sigmoid has other bits at the end of a batch.
        self._gate = ExpertRouter(build, f"{prefix}.shared_expert_gate", Routing(1, scoring="sigmoid"))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], this rank's summand"""
        _, weights = self._gate(x)
        return self._network.partial(x) * weights.to(x.dtype)


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen MoE: softmax over all experts, the best of them weighted as they are or so that they add up to 1."""

    attention: type[LlamaAttention] = Qwen2MoeAttention

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

    @classmethod
    def shared_inner(cls, config: ModelConfig) -> int:
        """Units of the expert that all rows share; 0 without one."""
        return config.count("shared_expert_intermediate_size")

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Network:
        """A mixture of experts, or a dense network."""
        if not self.sparse(build.config, layer):
            return LlamaMLP(build, prefix, build.config.intermediate_size)
        config, inner = self.moe_config(build.config), self.shared_inner(build.config)
        router = ExpertRouter(build, f"{prefix}.gate", config.routing)
        shared = SharedExpert(build, prefix, inner).partial if inner else None
        experts = ExpertNames().take(build, f"{prefix}.experts", config)
        return MoE(build, f"{prefix}.experts", config, router, experts, shared)

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        hidden = config.hidden_size
        if not cls.sparse(config, layer):
            return dense_shapes("mlp", hidden, config.intermediate_size)
        moe, inner = cls.moe_config(config), cls.shared_inner(config)
        shapes: dict[str, Shape] = {"mlp.gate.weight": (moe.num_experts, hidden)}
        if inner:
            shapes |= {"mlp.shared_expert_gate.weight": (1, hidden), **dense_shapes("mlp.shared_expert", hidden, inner)}
        return shapes | ExpertNames().shapes("mlp.experts", moe, hidden)
