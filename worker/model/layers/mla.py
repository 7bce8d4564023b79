"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in the absorbed form, and its indexer.

A token's cache entry is one latent vector c, from which every head's key and value would be projected, and one rotated
key part that all heads share. Instead of projecting each cached token up, each query is projected into the latent
space: q . (W_UK c) = (W_UK^T q) . c, and the mean of the values W_UV c is W_UV times the mean of the latents. So
attention has one key/value head, whose keys are [c, rotated part] and whose values are c; prefill, chunk and decode are
one path.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernels.interface import IndexSpec, KVSpec, PackedHeads, PackedLinear, TokenSelection
from worker.config.model_config import ModelConfig, ModelError, yarn_mscale
from worker.model.forward_context import get_forward_context
from worker.model.layers.build import Build
from worker.model.layers.linear import WHOLE, ColumnLinear, RowLinear
from worker.model.layers.norm import LayerNorm, RMSNorm
from worker.model.sharding import length, times
from worker.weights.checkpoint import Shape

CosSin = tuple[torch.Tensor, torch.Tensor]

# Epsilon of the attention's norms, which ignore rms_norm_eps.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MLAConfig:
    """The widths of latent attention, named as in config.json.

    Attributes:
        q_lora_rank: width of the queries' latent; None if queries are projected from the hidden state.
        interleaved: True if rotated pairs are neighbours; otherwise they are half a head apart.
        index: the indexer; None for full attention.

    Raises:
        ModelError: an indexer does not fit the other widths.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool
    index: IndexSpec | None = None

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ModelError(f"qk_rope_head_dim {self.qk_rope_head_dim} is odd; rotary embeddings need an even one")
        if self.index is None:
            return
        if self.q_lora_rank is None:
            raise ModelError("q_lora_rank is null; the indexer needs the queries' latent")
        if self.index.head_dim < self.qk_rope_head_dim:
            raise ModelError(
                f"index_head_dim {self.index.head_dim} is less than qk_rope_head_dim {self.qk_rope_head_dim}"
            )

    @classmethod
    def of(cls, config: ModelConfig, indexer: bool) -> MLAConfig:
        """MLA part of config.json, with an indexer or without.

        Raises:
            ModelError: an entry is missing or malformed, or they do not fit each other.
        """
        index = None
        if indexer:
            index = IndexSpec(config.count("index_n_heads"), config.count("index_head_dim"), config.count("index_topk"))
        return cls(
            q_lora_rank=None if config.source.get("q_lora_rank") is None else config.count("q_lora_rank"),
            kv_lora_rank=config.count("kv_lora_rank"),
            qk_nope_head_dim=config.count("qk_nope_head_dim"),
            qk_rope_head_dim=config.count("qk_rope_head_dim"),
            v_head_dim=config.count("v_head_dim"),
            interleaved=config.flag("rope_interleave", True),
            index=index,
        )

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_spec(self) -> KVSpec:
        """The latent cache, which every rank holds as a whole."""
        return KVSpec(1, self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank, self.index)

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Name, after `self_attn.`, and shape of every tensor of a layer's attention."""
        heads, hidden = config.num_attention_heads, config.hidden_size
        shapes: dict[str, Shape] = {
            "kv_a_proj_with_mqa.weight": (self.kv_lora_rank + self.qk_rope_head_dim, hidden),
            "kv_a_layernorm.weight": (self.kv_lora_rank,),
            "kv_b_proj.weight": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "o_proj.weight": (hidden, heads * self.v_head_dim),
        }
        if self.q_lora_rank is None:
            shapes["q_proj.weight"] = (heads * self.qk_head_dim, hidden)
        else:
            shapes["q_a_proj.weight"] = (self.q_lora_rank, hidden)
            shapes["q_a_layernorm.weight"] = (self.q_lora_rank,)
            shapes["q_b_proj.weight"] = (heads * self.qk_head_dim, self.q_lora_rank)
        if config.attention_bias:
            biased = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}
            weights = {name: shapes[f"{name}.weight"] for name in biased if f"{name}.weight" in shapes}
            shapes |= {f"{name}.bias": shape[:1] for name, shape in weights.items()}
        return shapes | self._index_shapes(hidden)

    def _index_shapes(self, hidden: int) -> dict[str, Shape]:
        if self.index is None or self.q_lora_rank is None:
            return {}
        return {
            "indexer.wq_b.weight": (self.index.num_heads * self.index.head_dim, self.q_lora_rank),
            "indexer.wk.weight": (self.index.head_dim, hidden),
            "indexer.k_norm.weight": (self.index.head_dim,),
            "indexer.k_norm.bias": (self.index.head_dim,),
            "indexer.weights_proj.weight": (self.index.num_heads, hidden),
        }


class Indexer:
    """Chooses the tokens that a row attends to (DeepSeek-V3.2, arXiv:2512.02556, section 2.1); the same on every rank.

    DeepSeek's own code multiplies queries and keys by a Hadamard matrix before it rounds them to FP8. That does not
    change their products, so it is left out here, where nothing is rounded.
    """

    def __init__(self, build: Build, prefix: str, layer: int, spec: IndexSpec) -> None:
        self._linear = build.kernels.linear
        self._elementwise = build.kernels.elementwise
        self._latent_attention = build.kernels.latent_attention
        self._name = f"layers.{layer}"
        self._num_heads = spec.num_heads
        self._queries = ColumnLinear(build, {f"{prefix}.wq_b": WHOLE})
        self._keys = ColumnLinear(build, {f"{prefix}.wk": WHOLE})
        self._key_norm = LayerNorm(build, f"{prefix}.k_norm", _NORM_EPS)
        # In float32 for every model dtype: the weights decide which of two close scores is higher.
        self._weights = build.kept.keep(f"{prefix}.weights_proj", lambda: self._pack_weights(build, prefix))
        self._scale = (spec.num_heads * spec.head_dim) ** -0.5

    def _pack_weights(self, build: Build, prefix: str) -> PackedLinear:
        weight = build.weights.take(f"{prefix}.weights_proj.weight", dtype=torch.float32)
        return self._linear.pack(weight, None, torch.float32)

    def __call__(self, x: torch.Tensor, q_latent: torch.Tensor, cos_sin: CosSin) -> TokenSelection | None:
        """Stores the rows' index keys and selects, by x [T, H] and the queries' latents [T, q_lora_rank]."""
        context = get_forward_context()
        kv = context.kv_cache_data[self._name]
        q = self._queries(q_latent).view(x.shape[0], self._num_heads, -1)
        k = self._key_norm(self._keys(x)).unsqueeze(1)
        q, k = self._elementwise.rope(q, k, *cos_sin)
        self._latent_attention.write_index(kv.cache, kv.layer_num, k.squeeze(1), context.attn_metadata)
        weights = self._linear.apply(x.float(), self._weights) * self._scale
        return self._latent_attention.select_tokens(q, weights, kv.cache, kv.layer_num, context.attn_metadata)


class MLAttention:
    """Latent attention of one layer; query heads are split over the ranks, the latent cache is held by each."""

    def __init__(self, build: Build, prefix: str, layer: int, config: MLAConfig) -> None:
        self._linear = build.kernels.linear
        self._elementwise = build.kernels.elementwise
        self._latent_attention = build.kernels.latent_attention
        self._config = config
        self._name = f"layers.{layer}"
        bias = build.config.attention_bias
        heads = build.shard.part(build.config.num_attention_heads, "num_attention_heads")
        query_rows = times(heads, config.qk_head_dim)
        self._q_down: ColumnLinear | None = None
        if config.q_lora_rank is None:
            self._queries = ColumnLinear(build, {f"{prefix}.q_proj": query_rows})
        else:
            self._q_down = ColumnLinear(build, {f"{prefix}.q_a_proj": WHOLE}, bias)
            self._q_norm = RMSNorm(build, f"{prefix}.q_a_layernorm", _NORM_EPS)
            self._queries = ColumnLinear(build, {f"{prefix}.q_b_proj": query_rows})
        self._kv_down = ColumnLinear(build, {f"{prefix}.kv_a_proj_with_mqa": WHOLE}, bias)
        self._kv_norm = RMSNorm(build, f"{prefix}.kv_a_layernorm", _NORM_EPS)
        both = f"{prefix}.kv_b_proj"
        # Read once and kept as two objects, because a back end that adopts packed objects does not look into tuples.
        absorbed = functools.cache(lambda: _absorbed(build, both, heads, config))
        self._to_latent = build.kept.keep(f"{both} to latent", lambda: absorbed()[0])
        self._from_latent = build.kept.keep(f"{both} from latent", lambda: absorbed()[1])
        self._out = RowLinear(build, f"{prefix}.o_proj", times(heads, config.v_head_dim), bias)
        self._indexer = None if config.index is None else Indexer(build, f"{prefix}.indexer", layer, config.index)
        self._scale = softmax_scale(build.config, config)

    def __call__(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        q_latent = x if self._q_down is None else self._q_norm(self._q_down(x))
        selection = None if self._indexer is None else self._indexer(x, q_latent, cos_sin)
        queries, keys = self._queries_keys(q_latent, self._kv_down(x), cos_sin)
        context = get_forward_context()
        kv, metadata = context.kv_cache_data[self._name], context.attn_metadata
        self._latent_attention.write(kv.cache, kv.layer_num, keys, metadata)
        latents = self._latent_attention.apply(queries, kv.cache, kv.layer_num, metadata, self._scale, selection)
        return self._out(self._linear.apply_heads(latents, self._from_latent).flatten(1))

    def _queries_keys(
        self, q_latent: torch.Tensor, kv_latent: torch.Tensor, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, R + P] and keys [T, R + P] in the latent space, with R latent and P rotated numbers."""
        config = self._config
        q = self._queries(q_latent).view(q_latent.shape[0], -1, config.qk_head_dim)
        q_plain, q_rotary = q.split_with_sizes([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, k_rotary = kv_latent.unsqueeze(1).split_with_sizes(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        if config.interleaved:
            q_rotary, k_rotary = _halves(q_rotary), _halves(k_rotary)
        q_rotary, k_rotary = self._elementwise.rope(q_rotary, k_rotary, *cos_sin)
        queries = torch.cat((self._linear.apply_heads(q_plain, self._to_latent), q_rotary), dim=-1)
        return queries, torch.cat((self._kv_norm(latent), k_rotary), dim=-1).squeeze(1)


def softmax_scale(config: ModelConfig, mla: MLAConfig) -> float:
    """Factor of the scores: 1 / sqrt(width of a query), larger if yarn stretches positions."""
    mscale = yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) if config.rope.mscale_all_dim else 1.0
    return float(mla.qk_head_dim**-0.5 * mscale * mscale)


def _absorbed(build: Build, name: str, heads: slice, config: MLAConfig) -> tuple[PackedHeads, PackedHeads]:
    """Packed matrices of this rank's heads: W_UK^T [Hq, R, nope] and W_UV [Hq, v, R]."""
    width = config.qk_nope_head_dim + config.v_head_dim
    weight = build.weights.take(f"{name}.weight", rows=times(heads, width), dtype=build.dtype)
    keys, values = weight.view(length(heads), width, -1).split_with_sizes(
        [config.qk_nope_head_dim, config.v_head_dim], dim=1
    )
    pack = build.kernels.linear.pack_heads
    return pack(keys.transpose(1, 2), build.dtype), pack(values, build.dtype)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Moves pairs of neighbours [..., P] half a head apart. Scores stay the same if queries and keys are both moved."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
