"""Olmo2ForCausalLM (arXiv:2501.00656): norms after attention and network, and on all queries and on all keys."""

from __future__ import annotations

import torch
from typing_extensions import override

from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.norm import RMSNorm
from worker.model.models.llama import CosSin, LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from worker.model.sharding import length
from worker.weights.checkpoint import Shape


class Olmo2Attention(LlamaAttention):
    """Attention whose q_norm takes the queries of all heads together, and k_norm the keys."""

    fuses = False

    def __init__(self, build: Build, prefix: str, layer: int, window: int | None = None) -> None:
        super().__init__(build, prefix, layer, window)
        config, shard = build.config, build.shard
        self._collectives = shard.collectives
        self._queries = shard.part(config.num_attention_heads, "num_attention_heads")
        self._keys = shard.kv_part(config.num_key_value_heads)
        # Ranks that hold the same key head; only the first of them counts.
        self._holders = max(1, shard.size // config.num_key_value_heads)

    @staticmethod
    @override
    def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        return {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}

    @override
    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm]:
        return RMSNorm(build, f"{prefix}.q_norm"), RMSNorm(build, f"{prefix}.k_norm")

    @override
    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.norms is not None
        return self._whole(self.norms[0], q, self._queries), self._whole(self.norms[1], k, self._keys, self._holders)

    def _whole(self, norm: RMSNorm, heads: torch.Tensor, own: slice, holders: int = 1) -> torch.Tensor:
        """Norm of all ranks' heads [T, H, D] together: this rank's `own` heads of the result."""
        rows, _, dim = heads.shape
        gathered = self._collectives.all_gather(heads.flatten(1))
        every = gathered.view(rows, -1, holders, length(own) * dim)[:, :, 0]
        return norm(every.reshape(rows, -1)).view(rows, -1, dim)[:, own]


class PostNormLayer(LlamaDecoderLayer):
    """Attention and feed-forward network, each before a norm and beside a residual connection."""

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    @override
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention_norm, mlp_norm = self._norms
        stream = x if residual is None else x + residual
        stream = stream + attention_norm(self._attention(stream, cos_sin))
        return mlp_norm(self._mlp(stream)), stream


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2."""

    attention = Olmo2Attention
    layer = PostNormLayer
