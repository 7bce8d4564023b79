"""GraniteForCausalLM (Granite 3, dense): Llama's decoder with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.models.llama import CosSin, LlamaAttention, LlamaForCausalLM, refuse_partial_rotary


class GraniteAttention(LlamaAttention):
    """Attention whose scores are multiplied by `attention_multiplier`, and its output by `residual_multiplier`."""

    # A back end that fuses layers knows no factor of their outputs.
    fuses = False

    def __init__(self, build: Build, prefix: str, layer: int, window: int | None = None) -> None:
        super().__init__(build, prefix, layer, window)
        self._factor = build.config.positive("residual_multiplier")

    @staticmethod
    @override
    def scale(config: ModelConfig) -> float:
        return config.positive("attention_multiplier")

    @override
    def __call__(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        return super().__call__(x, cos_sin) * self._factor


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite 3, dense."""

    attention = GraniteAttention

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._sampling = build.kernels.sampling
        self._embedding_multiplier = build.config.positive("embedding_multiplier")
        self._logits_scaling = build.config.positive("logits_scaling")

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
            config.positive(name)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Llama's network, its output multiplied by `residual_multiplier`."""
        mlp, factor = super().make_mlp(build, prefix, layer), build.config.positive("residual_multiplier")
        return lambda x: mlp(x) * factor

    @override
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * self._embedding_multiplier

    @override
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / self._logits_scaling

    @override
    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """As in Llama, from the divided logits: two that differ may become equal."""
        return self._sampling.argmax(self.compute_logits(hidden), limit)
