"""Glm4MoeForCausalLM (GLM-4.5 and 4.6): partial rotary, dense layers first, then mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.layers.build import Build
from worker.layers.moe import grouped_moe, grouped_moe_shapes
from worker.layers.norm import RMSNorm
from worker.loader import Shape
from worker.model_config import ModelConfig
from worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, dense_shapes, refuse_windows


class Glm4MoeAttention(LlamaAttention):
    """Attention with, in some models, a norm on each head's queries and keys."""

    output_bias = False

    def __init__(self, build: Build, prefix: str, layer: int, window: int | None = None) -> None:
        super().__init__(build, prefix, layer, window)
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        if _has_norms(build.config):
            self._norms = RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms each head of q [T, Hq, D] and k [T, Hkv, D], if there are norms."""
        return (q, k) if self._norms is None else (self._norms[0](q), self._norms[1](k))


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4 MoE. MTP layers of the checkpoint are kept for speculation."""

    attention = Glm4MoeAttention

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """See LlamaForCausalLM."""
        refuse_windows(config)

    @classmethod
    def sparse(cls, config: ModelConfig, layer: int) -> bool:
        """Whether a layer's feed-forward network is a mixture of experts."""
        return layer >= config.count("first_k_dense_replace", 1, least=0)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts, or a dense network in the first layers."""
        if not self.sparse(build.config, layer):
            return LlamaMLP(build, prefix, build.config.intermediate_size)
        return grouped_moe(build, prefix, LlamaMLP(build, f"{prefix}.shared_experts", _shared(build.config)).partial)

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """The MTP layers, which are numbered on behind the others."""
        first = config.num_hidden_layers
        count = config.count("num_nextn_predict_layers", 0, least=0)
        return tuple(f"model.layers.{layer}." for layer in range(first, first + count))

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Llama's tensors and, in some models, the two norms."""
        norm: Shape = (config.head_dim,)
        norms = {"self_attn.q_norm.weight": norm, "self_attn.k_norm.weight": norm} if _has_norms(config) else {}
        return super().attention_shapes(config) | norms

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        if not cls.sparse(config, layer):
            return dense_shapes("mlp", config.hidden_size, config.intermediate_size)
        return grouped_moe_shapes(config) | dense_shapes("mlp.shared_experts", config.hidden_size, _shared(config))


def _has_norms(config: ModelConfig) -> bool:
    return config.flag("use_qk_norm", False)


def _shared(config: ModelConfig) -> int:
    """Inner units of all shared experts, which are one network."""
    return config.count("moe_intermediate_size") * config.count("n_shared_experts", 1)
