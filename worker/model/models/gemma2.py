"""Gemma2ForCausalLM (arXiv:2408.00118): norms before and after, GELU, scaled embeddings, bounded scores and logits."""

from __future__ import annotations

import torch
from typing_extensions import override

from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build
from worker.model.layers.norm import ShiftedRMSNorm
from worker.model.models.llama import (
    CosSin,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    refuse_partial_rotary,
)


class Gemma2Attention(LlamaAttention):
    """Attention whose scores are scaled by `query_pre_attn_scalar` and approach `attn_logit_softcapping`."""

    fuses = False

    @staticmethod
    @override
    def scale(config: ModelConfig) -> float:
        return float(config.positive("query_pre_attn_scalar") ** -0.5)

    @staticmethod
    @override
    def softcap(config: ModelConfig) -> float:
        return _cap(config, "attn_logit_softcapping")


class GeluMLP(LlamaMLP):
    """Gated feed-forward network with GELU."""

    @override
    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._elementwise.gelu_and_mul(gate_up)


class SandwichLayer(LlamaDecoderLayer):
    """Attention and feed-forward network, each between two norms and beside a residual connection."""

    norm = ShiftedRMSNorm
    norm_names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    @override
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        input_norm, attention_norm, mlp_norm, output_norm = self._norms
        normed, residual = (input_norm(x), x) if residual is None else input_norm.add(x, residual)
        normed, residual = mlp_norm.add(attention_norm(self._attention(normed, cos_sin)), residual)
        return output_norm(self._mlp(normed)), residual


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2. Its norms multiply by 1 + weight."""

    attention: type[LlamaAttention] = Gemma2Attention
    mlp = GeluMLP
    layer = SandwichLayer
    activation = ("hidden_activation", "gelu_pytorch_tanh")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._sampling = build.kernels.sampling
        self._elementwise = build.kernels.elementwise
        # transformers rounds the factor to the dtype of the weights.
        self._embedding_factor = float(torch.tensor(build.config.hidden_size**0.5).to(build.dtype))
        self._final_cap = _cap(build.config, "final_logit_softcapping")

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        if config.source.get("use_bidirectional_attention"):
            raise ModelError(f"use_bidirectional_attention is not supported for {config.architecture}; leave it out")
        for layer in range(config.num_hidden_layers):
            cls.window(config, layer)
        cls.attention.scale(config)
        cls.attention.softcap(config)
        _cap(config, "final_logit_softcapping")

    @classmethod
    @override
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        return config.listed_window(layer)

    @override
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * self._embedding_factor

    @override
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        return self._elementwise.softcap(logits, self._final_cap) if self._final_cap else logits

    @override
    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """As in Llama, from the bounded logits: two that differ may become equal."""
        if not self._final_cap:
            return super().greedy(hidden, limit)
        return self._sampling.argmax(self.compute_logits(hidden), limit)


def _cap(config: ModelConfig, name: str) -> float:
    """A bound of config.json; 0 for none."""
    return 0.0 if config.source.get(name) is None else config.positive(name)
