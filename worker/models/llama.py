"""LlamaForCausalLM, and the decoder that its relatives share."""

from __future__ import annotations

import torch

from kernels.interface import KernelBackend
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding, LMHead
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryEmbedding
from worker.loader import Shape, Weights
from worker.model_config import ModelConfig


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(
        self, config: ModelConfig, kernels: KernelBackend, weights: Weights, prefix: str, layer: int, dtype: torch.dtype
    ) -> None:
        self._kernels = kernels
        self._heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self._head_dim = config.head_dim
        projections = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = Linear(kernels, weights, projections, config.attention_bias, dtype)
        self._out = Linear(kernels, weights, [f"{prefix}.o_proj"], config.attention_bias, dtype)
        self._attention = Attention(kernels, layer, config.head_dim)

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What happens to queries and keys before the rotation: nothing in Llama."""
        return q, k

    def __call__(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        q, k, v = heads.split_with_sizes(self._heads, dim=1)
        q, k = self._kernels.rope(*self.normed(q, k), *cos_sin)
        return self._out(self._attention(q, k, v))


class LlamaMLP:
    """Gated feed-forward network."""

    def __init__(
        self, config: ModelConfig, kernels: KernelBackend, weights: Weights, prefix: str, dtype: torch.dtype
    ) -> None:
        self._kernels = kernels
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self._gate_up = Linear(kernels, weights, names, config.mlp_bias, dtype)
        self._down = Linear(kernels, weights, [f"{prefix}.down_proj"], config.mlp_bias, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        return self._down(self._kernels.silu_and_mul(self._gate_up(x)))


class LlamaDecoderLayer:
    """Attention and feed-forward, each behind a norm and beside a residual connection."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelBackend,
        weights: Weights,
        layer: int,
        dtype: torch.dtype,
        attention: type[LlamaAttention],
    ) -> None:
        prefix = f"model.layers.{layer}"
        eps = config.rms_norm_eps
        self._input_norm = RMSNorm(kernels, weights, f"{prefix}.input_layernorm", eps, dtype)
        self._attention = attention(config, kernels, weights, f"{prefix}.self_attn", layer, dtype)
        self._post_norm = RMSNorm(kernels, weights, f"{prefix}.post_attention_layernorm", eps, dtype)
        self._mlp = LlamaMLP(config, kernels, weights, f"{prefix}.mlp", dtype)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(layer output, residual), both [T, H]; their sum is the residual stream."""
        if residual is None:
            normed, residual = self._input_norm(x), x
        else:
            normed, residual = self._input_norm.add(x, residual)
        normed, residual = self._post_norm.add(self._attention(normed, cos_sin), residual)
        return self._mlp(normed), residual


class LlamaForCausalLM:
    """Llama 2 and 3: every projection may have a bias, embeddings may be tied.

    Args:
        config: the shape.
        kernels: the back end.
        weights: the checkpoint, with the tensors of `tensor_shapes`.
        dtype: of weights and activations.
        max_position: positions that rotary tables are made for.
    """

    attention = LlamaAttention

    def __init__(
        self, config: ModelConfig, kernels: KernelBackend, weights: Weights, dtype: torch.dtype, max_position: int
    ) -> None:
        self._embedding = Embedding(weights, "model.embed_tokens", dtype)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, max_position)
        self._layers = [
            LlamaDecoderLayer(config, kernels, weights, layer, dtype, self.attention)
            for layer in range(config.num_hidden_layers)
        ]
        self._norm = RMSNorm(kernels, weights, "model.norm", config.rms_norm_eps, dtype)
        head = self._embedding if config.tie_word_embeddings else Embedding(weights, "lm_head", dtype)
        self._head = LMHead(kernels, head.weight)

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of the checkpoint."""
        shapes: dict[str, Shape] = {
            "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "model.norm.weight": (config.hidden_size,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        for layer in range(config.num_hidden_layers):
            for name, shape in cls.layer_shapes(config).items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes

    @classmethod
    def layer_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of one layer."""
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        projections = {
            "self_attn.q_proj": (queries, hidden, config.attention_bias),
            "self_attn.k_proj": (keys, hidden, config.attention_bias),
            "self_attn.v_proj": (keys, hidden, config.attention_bias),
            "self_attn.o_proj": (hidden, queries, config.attention_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        for name, (outputs, inputs, bias) in projections.items():
            shapes[f"{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{name}.bias"] = (outputs,)
        return shapes

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] after the last norm, for token ids and positions int64 [T]."""
        x = self._embedding(token_ids)
        cos_sin = self._rotary(positions)
        residual: torch.Tensor | None = None
        for layer in self._layers:
            x, residual = layer(x, residual, cos_sin)
        return self._norm(x) if residual is None else self._norm.add(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] of hidden states [S, H]."""
        return self._head(hidden)
