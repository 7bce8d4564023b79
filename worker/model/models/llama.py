"""LlamaForCausalLM, and the decoder that its relatives share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from common.wire.heads import CLASSIFIER
from kernels.interface import Decoder, DecoderLayer, FusedDecoder, KVSpec
from worker.config.model_config import FULL_ATTENTION, INDEXED_ATTENTION, ModelConfig, ModelError, RopeConfig
from worker.model.forward_context import get_forward_context
from worker.model.layers.attention import Attention
from worker.model.layers.build import Build
from worker.model.layers.classifier import Classifier
from worker.model.layers.embedding import Embedding, LMHead, head_weight
from worker.model.layers.linear import ColumnLinear, RowLinear
from worker.model.layers.norm import RMSNorm
from worker.model.layers.rotary import RotaryEmbedding
from worker.model.sharding import Shard, length, times
from worker.weights.checkpoint import Shape

CosSin = tuple[torch.Tensor, torch.Tensor]


class LlamaAttention:
    """Grouped-query attention with rotary positions; heads are split over the ranks.

    Args:
        build: shared by the layers.
        prefix: of the layer's attention tensors.
        layer: its index.
        window: number of keys that a row sees, including its own; None for all before it.

    Attributes:
        qkv, out: the projections.
        norms: of each head's queries and keys, or None.
        attention: stores keys and values, and attends.
    """

    # False leaves queries and keys as they are: positions come from other layers (NoPE).
    rotates = True
    # False if no back end can fuse such a layer.
    fuses = True

    def __init__(self, build: Build, prefix: str, layer: int, window: int | None = None) -> None:
        config = build.config
        self._elementwise = build.kernels.elementwise
        self._head_dim = config.head_dim
        queries = build.shard.part(config.num_attention_heads, "num_attention_heads")
        keys = build.shard.kv_part(config.num_key_value_heads)
        self._heads = [length(queries), length(keys), length(keys)]
        rows, kv_rows = times(queries, config.head_dim), times(keys, config.head_dim)
        qkv_bias, output_bias = self.biases(config)
        self.qkv = ColumnLinear(build, self.qkv_parts(config, prefix, rows, kv_rows), qkv_bias)
        self.norms = self.head_norms(build, prefix)
        self.out = RowLinear(build, f"{prefix}.o_proj", rows, output_bias)
        sinks, softcap = self.sinks(build, prefix, queries), self.softcap(config)
        self.attention = Attention(build, layer, self.scale(config), window, sinks, softcap)

    @staticmethod
    def qkv_parts(
        config: ModelConfig, prefix: str, rows: slice, kv_rows: slice
    ) -> Mapping[str, slice | Sequence[slice]]:
        """Tensors of the projections, with the rows of queries, of keys and of values that this rank computes."""
        return {f"{prefix}.q_proj": rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}

    @staticmethod
    def scale(config: ModelConfig) -> float:
        """Factor of the scores."""
        return float(config.head_dim**-0.5)

    @staticmethod
    def softcap(config: ModelConfig) -> float:
        """Bound that scores approach, see `AttentionOps.apply`; 0 for none."""
        return 0.0

    @staticmethod
    def biases(config: ModelConfig) -> tuple[bool, bool]:
        """Says if the projections of queries, keys and values have biases, and if that of the output has one."""
        return config.attention_bias, config.attention_bias

    def sinks(self, build: Build, prefix: str, heads: slice) -> torch.Tensor | None:
        """Scores [Hq] of this rank's `heads` that enter the softmax without a value; None in Llama."""
        return None

    @staticmethod
    def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of the tensors of `head_norms`."""
        return {}

    def head_norms(self, build: Build, prefix: str) -> tuple[RMSNorm, RMSNorm] | None:
        """Norms of each head's queries and keys before the rotation; None in Llama."""
        return None

    def __call__(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        q, k, v = heads.split_with_sizes(self._heads, dim=1)
        q, k = self.normed(q, k)
        if self.rotates:
            q, k = self._elementwise.rope(q, k, *cos_sin)
        return self.out(self.attention(q, k, v))

    def normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, D] and keys [T, Hkv, D] of this rank after `norms`."""
        return (q, k) if self.norms is None else (self.norms[0](q), self.norms[1](k))


class LlamaMLP:
    """Gated feed-forward network of `inner` units, which are split over the ranks.

    Attributes:
        gate_up, down: the projections.
    """

    def __init__(self, build: Build, prefix: str, inner: int, bias: bool = False) -> None:
        self._elementwise = build.kernels.elementwise
        part = build.shard.part(inner, "intermediate_size")
        self.gate_up = ColumnLinear(build, self.gate_up_parts(prefix, inner, part), bias)
        self.down = RowLinear(build, f"{prefix}.down_proj", part, bias)

    @staticmethod
    def gate_up_parts(prefix: str, inner: int, part: slice) -> Mapping[str, slice | Sequence[slice]]:
        """Tensors of the two projections of the input, with the rows that this rank computes."""
        return {f"{prefix}.gate_proj": part, f"{prefix}.up_proj": part}

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2I] -> [T, I]"""
        return self._elementwise.silu_and_mul(gate_up)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], this rank's summand"""
        return self.down.partial(self.activate(self.gate_up(x)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]"""
        return self.down(self.activate(self.gate_up(x)))


class LlamaDecoderLayer:
    """Attention and feed-forward network, each after a norm and beside a residual connection.

    Args:
        build: shared by the layers.
        layer: its index.
        attention: [T, H] and cosines and sines -> [T, H].
        mlp: [T, H] -> [T, H].

    Attributes:
        norm: class of the norms.
        norm_names: names of the norms.
    """

    norm: type[RMSNorm] = RMSNorm
    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")

    def __init__(
        self,
        build: Build,
        layer: int,
        attention: Callable[[torch.Tensor, CosSin], torch.Tensor],
        mlp: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._norms = [self.norm(build, f"model.layers.{layer}.{name}") for name in self.norm_names]
        self._attention = attention
        self._mlp = mlp

    def fusible(self) -> DecoderLayer | None:
        """The layer in the form that a back end can fuse; None for attention that none can."""
        attention, mlp = self._attention, self._mlp
        if not isinstance(attention, LlamaAttention) or not (attention.fuses and attention.rotates):
            return None
        gated = mlp if isinstance(mlp, LlamaMLP) else None
        input_norm, post_norm = self._norms
        return DecoderLayer(
            input_norm=input_norm.weight,
            qkv=attention.qkv.packed,
            head_norms=attention.norms and (attention.norms[0].weight, attention.norms[1].weight),
            window=attention.attention.window,
            sinks=attention.attention.sinks,
            out=attention.out.packed,
            post_norm=post_norm.weight,
            gate_up=gated and gated.gate_up.packed,
            down=gated and gated.down.packed,
            network=None if gated else mlp,
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(layer output, residual), both [T, H]; their sum is the residual stream."""
        input_norm, post_norm = self._norms
        normed, residual = (input_norm(x), x) if residual is None else input_norm.add(x, residual)
        normed, residual = post_norm.add(self._attention(normed, cos_sin), residual)
        return self._mlp(normed), residual


class LlamaForCausalLM:
    """Llama 2 and 3: every projection may have a bias, embeddings may be tied.

    Related architectures override `check`, `window`, `make_rotary`, `make_attention`, `make_mlp`,
    `attention_shapes`, `mlp_shapes`, and the class attributes.

    Args:
        build: shared by the layers; its weights are those of `tensor_shapes`.

    Attributes:
        attention, mlp, layer: classes of the parts.
        activation: entry of config.json that names the activation of `mlp`, and its only supported value.
        has_local_rope: True if layers with a window may have a rotary embedding of their own.
        embedding: of token ids.
        rotary: the rotary embedding of all layers, or of all without a window.
        head: gives logits; None for a checkpoint that generates nothing.
        classifier: gives scores of labels; None for a checkpoint without one.
    """

    attention: type[LlamaAttention] = LlamaAttention
    mlp: type[LlamaMLP] = LlamaMLP
    layer: type[LlamaDecoderLayer] = LlamaDecoderLayer
    activation = ("hidden_act", "silu")
    has_local_rope = False

    def __init__(self, build: Build) -> None:
        config = build.config
        self.embedding = Embedding(build, "model.embed_tokens", config.tie_word_embeddings)
        self._aux_layers = build.aux_layers
        self.rotary = self.make_rotary(build)
        self._local_rotary = self.make_rotary(build, config.local_rope) if config.local_rope else None
        layers = range(config.num_hidden_layers)
        self._slides = [self.window(config, layer) is not None for layer in layers]
        self._layers = [self.make_layer(build, layer) for layer in layers]
        self._norm = self.layer.norm(build, "model.norm")
        self.head = self._make_head(build)
        self.classifier = Classifier(build) if config.head == CLASSIFIER else None
        self._fused = self._fuse(build)

    def _make_head(self, build: Build) -> LMHead | None:
        config = build.config
        if not config.generates:
            return None
        if config.tie_word_embeddings:
            return LMHead(build, self.embedding.packed)
        return LMHead(build, head_weight(build, self.head_name(config)))

    def _fuse(self, build: Build) -> FusedDecoder | None:
        """All layers as one operation; None if the back end or the model has none."""
        layers = tuple(filter(None, (layer.fusible() for layer in self._layers)))
        if len(layers) < len(self._layers) or self._local_rotary is not None:
            return None
        config, shard = build.config, build.shard
        decoder = Decoder(
            layers,
            self._norm.weight,
            config.rms_norm_eps,
            length(shard.part(config.num_attention_heads, "num_attention_heads")),
            self.attention.scale(config),
            shard.collectives.all_reduce if shard.size > 1 else None,
            self._aux_layers,
        )
        return build.kernels.fuse_decoder(decoder, build.kv_dtype or build.dtype)

    @staticmethod
    def head_name(config: ModelConfig) -> str:
        """Name of the head's tensor, without `.weight`."""
        return "model.embed_tokens" if config.tie_word_embeddings else "lm_head"

    def make_layer(self, build: Build, layer: int) -> LlamaDecoderLayer:
        """One decoder layer."""
        prefix = f"model.layers.{layer}"
        attention = self.make_attention(build, f"{prefix}.self_attn", layer)
        return self.layer(build, layer, attention, self.make_mlp(build, f"{prefix}.mlp", layer))

    def make_rotary(self, build: Build, rope: RopeConfig | None = None) -> RotaryEmbedding:
        """A rotary embedding by `rope`, or config.json's for all layers."""
        config = build.config
        return RotaryEmbedding(rope or config.rope, config.head_dim, build.max_position, build.kernels.device)

    def make_attention(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor, CosSin], torch.Tensor]:
        """The attention of one layer."""
        return self.attention(build, prefix, layer, self.window(build.config, layer))

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The feed-forward network of one layer."""
        return self.mlp(build, prefix, build.config.intermediate_size, build.config.mlp_bias)

    @classmethod
    def kv_spec(cls, config: ModelConfig, shard: Shard) -> KVSpec:
        """Keys and values of this rank's heads."""
        return KVSpec(length(shard.kv_part(config.num_key_value_heads)), config.head_dim)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Refuses settings of config.json that would change the numbers if they were ignored.

        Raises:
            ModelError: a setting is not supported by this architecture.
        """
        refuse_partial_rotary(config)
        refuse_windows(config)

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """Number of keys that a row of a layer sees, its own included; None for all before it.

        Raises:
            ModelError: config.json contradicts itself.
        """
        return None

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """Name prefixes of tensors that are not loaded: none."""
        return ()

    @classmethod
    def draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Tensors of a draft layer: Llama has none.

        Raises:
            ModelError: always.
        """
        raise ModelError(f"{config.architecture} has no layers that draft (MTP)")

    @classmethod
    def optional_draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Tensors of a draft layer that a checkpoint may omit: none."""
        return {}

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of the checkpoint.

        Raises:
            ModelError: see `check`.
        """
        refuse_activations(config, *cls.activation)
        if config.local_rope is not None and not cls.has_local_rope:
            raise ModelError(f"rope that differs by layer is not supported for {config.architecture}")
        cls.check(config)
        shapes: dict[str, Shape] = {
            "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "model.norm.weight": (config.hidden_size,),
        }
        if config.generates and not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        if config.head == CLASSIFIER:
            shapes["score.weight"] = (config.num_labels, config.hidden_size)
        for layer in range(config.num_hidden_layers):
            for name, shape in cls.layer_shapes(config, layer).items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes

    @classmethod
    def layer_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of one layer."""
        norms: dict[str, Shape] = {f"{name}.weight": (config.hidden_size,) for name in cls.layer.norm_names}
        return norms | cls.attention_shapes(config) | cls.mlp_shapes(config, layer)

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's attention."""
        hidden, (bias, output_bias) = config.hidden_size, cls.attention.biases(config)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        return (
            linear_shapes("self_attn.q_proj", queries, hidden, bias)
            | linear_shapes("self_attn.k_proj", keys, hidden, bias)
            | linear_shapes("self_attn.v_proj", keys, hidden, bias)
            | linear_shapes("self_attn.o_proj", hidden, queries, output_bias)
            | cls.attention.norm_shapes(config)
        )

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        return dense_shapes("mlp", config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] after the last norm, for token ids and positions int64 [T].

        With n `aux_layers` the result is [T, (1 + n) H]: beside the states the residual streams before those layers.
        """
        x = self.embed(token_ids)
        cos_sin = self.rotary(positions)
        local = cos_sin if self._local_rotary is None else self._local_rotary(positions)
        if self._fused is not None:
            context = get_forward_context()
            return self._fused.run(x, *cos_sin, context.kv_cache_data["layers.0"].cache, context.attn_metadata)
        residual: torch.Tensor | None = None
        streams: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in self._aux_layers:
                streams[index] = x if residual is None else x + residual
            x, residual = layer(x, residual, local if self._slides[index] else cos_sin)
        states = self._norm(x) if residual is None else self._norm.add(x, residual)[0]
        aux = [streams[index] for index in self._aux_layers]
        return torch.cat((states, *aux), dim=1) if aux else states

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input [T, H] of the first layer, for token ids int64 [T]."""
        return self.embedding(token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] of hidden states [S, H]."""
        assert self.head is not None
        return self.head(hidden)

    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, of hidden states [S, H]."""
        assert self.head is not None
        return self.head.greedy(hidden, limit)


def linear_shapes(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    """Tensors of one projection."""
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def dense_shapes(prefix: str, hidden: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    """Tensors of one LlamaMLP."""
    return (
        linear_shapes(f"{prefix}.gate_proj", inner, hidden, bias)
        | linear_shapes(f"{prefix}.up_proj", inner, hidden, bias)
        | linear_shapes(f"{prefix}.down_proj", hidden, inner, bias)
    )


def refuse_activations(config: ModelConfig, name: str, supported: str) -> None:
    """Check of the activation that entry `name` of config.json names.

    Raises:
        ModelError: it is another one than `supported`.
    """
    if config.source.get(name) != supported:
        raise ModelError(f"config.json: {name} {config.source.get(name)!r} is not supported; supported: {supported}")


def refuse_partial_rotary(config: ModelConfig) -> None:
    """Check of architectures that rotate whole heads.

    Raises:
        ModelError: config.json rotates a part of a head.
    """
    ropes = filter(None, (config.rope, config.local_rope))
    if any(rope.partial_rotary_factor != 1.0 for rope in ropes):
        raise ModelError(f"partial_rotary_factor is not supported for {config.architecture}; leave it out")


def refuse_windows(config: ModelConfig) -> None:
    """Check of architectures with full attention.

    Raises:
        ModelError: config.json has a sliding window.
    """
    sliding = set(config.listed("layer_types", str) or ()) - {FULL_ATTENTION, INDEXED_ATTENTION}
    if config.source.get("use_sliding_window") or sliding:
        raise ModelError(f"sliding window attention is not supported for {config.architecture}")
