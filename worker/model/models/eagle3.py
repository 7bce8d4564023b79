"""LlamaForCausalLMEagle3 (arXiv:2503.01840): a one-layer draft head over states of three layers of its target.

A row takes the target's states at a position and the next token, and predicts the token after that. For further drafts
the head uses its own states in place of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from kernels.interface import Decoder, DecoderLayer, DraftHead, FusedDrafts, KVSpec
from worker.config.model_config import ModelConfig, ModelError
from worker.model.forward_context import get_forward_context
from worker.model.layers.build import Build
from worker.model.layers.embedding import Embedding, LMHead, head_weight
from worker.model.layers.linear import WHOLE, ColumnLinear
from worker.model.layers.norm import RMSNorm
from worker.model.layers.rotary import RotaryEmbedding
from worker.model.models.llama import (
    LlamaAttention,
    LlamaMLP,
    dense_shapes,
    linear_shapes,
    refuse_activations,
    refuse_partial_rotary,
)
from worker.model.sharding import Shard, length
from worker.weights.checkpoint import Shape

NUM_AUX: Final = 3
_LAYER: Final = "midlayer"
_EMBEDDING: Final = "embed_tokens"
# Draft id -> difference between the target's id and it.
_TO_TARGET: Final = "d2t"


@dataclass(frozen=True)
class Eagle3Config:
    """Entries of config.json that only a draft head has.

    Attributes:
        draft_vocab_size: ids that it drafts.
        target_hidden_size: hidden size of its target.
        norm_before_residual: True if the residual stream continues from the normed states.
    """

    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool

    @classmethod
    def of(cls, config: ModelConfig) -> Eagle3Config:
        """The entries of a head.

        Raises:
            ModelError: an entry is malformed.
        """
        return cls(
            draft_vocab_size=config.count("draft_vocab_size", config.vocab_size),
            target_hidden_size=config.count("target_hidden_size", config.hidden_size),
            norm_before_residual=config.flag("norm_before_residual", False),
        )


def aux_layers(config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of the target, of `num_layers`, whose incoming residual stream the head uses.

    Raises:
        ModelError: config.json names layers that the target does not have.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    own = config.source.get("eagle_config")
    given: Any = own.get(key) if isinstance(own, Mapping) else None
    given = config.source.get(key) if given is None else given
    found = [2, num_layers // 2, num_layers - 3] if given is None else given
    every = range(num_layers)
    if not isinstance(found, list) or len(found) != NUM_AUX or any(type(each) is not int for each in found):
        raise ModelError(f"config.json: {key} is {found!r}; it must be a list of {NUM_AUX} whole numbers")
    if any(each not in every for each in found):
        raise ModelError(f"{key} {found} do not fit a target of {num_layers} layers; they are counted from 0")
    return tuple(found)


class Eagle3Head:
    """The draft head; a `DraftModel` once it has an embedding (`share`).

    Args:
        build: shared by the layers; its weights are those of `tensor_shapes`.

    Attributes:
        embedding: of token ids; None if the folder has none.
    """

    kv_names: tuple[str, ...] = ("layers.0",)

    def __init__(self, build: Build) -> None:
        config = build.config
        own = Eagle3Config.of(config)
        self._vocab_size, self._hidden_size = config.vocab_size, config.hidden_size
        self._norms_first, self._aux_width = own.norm_before_residual, NUM_AUX * own.target_hidden_size
        self.embedding = self._own_embedding(build)
        self._combine = ColumnLinear(build, {"fc": WHOLE})
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, build.max_position, build.kernels.device)
        self._input_norm = RMSNorm(build, f"{_LAYER}.input_layernorm")
        self._hidden_norm = RMSNorm(build, f"{_LAYER}.hidden_norm")
        self._attention = LlamaAttention(build, f"{_LAYER}.self_attn", 0)
        self._post_norm = RMSNorm(build, f"{_LAYER}.post_attention_layernorm")
        self._mlp = LlamaMLP(build, f"{_LAYER}.mlp", config.intermediate_size, config.mlp_bias)
        self._norm = RMSNorm(build, "norm")
        narrow = replace(build, config=replace(config, vocab_size=own.draft_vocab_size))
        self._head = LMHead(narrow, head_weight(narrow, "lm_head"))
        self._target_ids = build.kept.keep(_TO_TARGET, lambda: _target_ids(build, own.draft_vocab_size))
        # True if draft ids equal the target's ids.
        self._drafts_all = torch.equal(self._target_ids.cpu(), torch.arange(config.vocab_size))
        self._kernels, self._kv_dtype = build.kernels, build.kv_dtype or build.dtype
        self._decoder = self._as_decoder(build)
        self._fused = build.kernels.fuse_decoder(self._decoder, self._kv_dtype)

    def _as_decoder(self, build: Build) -> Decoder:
        config, shard, attention = build.config, build.shard, self._attention
        layer = DecoderLayer(
            input_norm=self._input_norm.weight,
            qkv=attention.qkv.packed,
            head_norms=None,
            window=None,
            sinks=None,
            out=attention.out.packed,
            post_norm=self._post_norm.weight,
            gate_up=self._mlp.gate_up.packed,
            down=self._mlp.down.packed,
        )
        return Decoder(
            (layer,),
            self._norm.weight,
            config.rms_norm_eps,
            length(shard.part(config.num_attention_heads, "num_attention_heads")),
            config.head_dim**-0.5,
            shard.collectives.all_reduce if shard.size > 1 else None,
            aux_layers=(1,),
            stream_norm=self._hidden_norm.weight,
            norms_first=self._norms_first,
        )

    def fuse_drafts(self, limit: int) -> FusedDrafts | None:
        """All drafts of a step as one operation, for a head with an embedding and ids below `limit`; None if the back
        end has none."""
        assert self.embedding is not None
        target_ids = None if self._drafts_all else self._target_ids
        head = DraftHead(
            self._decoder,
            self._combine.packed,
            self.embedding.matrix,
            *self._rotary.tables,
            self._head.packed,
            target_ids,
            self._vocab_size,
            limit,
        )
        return self._kernels.fuse_drafts(head, self._kv_dtype)

    def reach(self, num_positions: int) -> None:
        """Fills the rotary tables of the fused operation for the first `num_positions` positions."""
        self._rotary.make(num_positions)

    def share(self, embedding: Embedding) -> None:
        """Uses the target's embedding if the head has none.

        Raises:
            ModelError: the target's embedding has another width.
        """
        if self.embedding is not None:
            return
        if embedding.hidden_size != self._hidden_size:
            widths = f"the target's has {embedding.hidden_size} columns, not {self._hidden_size}"
            raise ModelError(f"{_EMBEDDING}.weight is missing, and {widths}; download the head again")
        self.embedding = embedding

    @staticmethod
    def _own_embedding(build: Build) -> Embedding | None:
        name = f"{_EMBEDDING}.weight"
        there = build.kept.keep(f"{name} is there", lambda: torch.tensor([name in build.weights]))
        return Embedding(build, _EMBEDDING, for_head=False) if bool(there) else None

    @classmethod
    def kv_spec(cls, config: ModelConfig, shard: Shard) -> KVSpec:
        """Keys and values of this rank's heads."""
        return KVSpec(length(shard.kv_part(config.num_key_value_heads)), config.head_dim)

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor that a head must have.

        Raises:
            ModelError: config.json has a setting that is not supported here.
        """
        refuse_activations(config, "hidden_act", "silu")
        refuse_partial_rotary(config)
        if config.num_hidden_layers != 1:
            raise ModelError(f"{config.architecture} has {config.num_hidden_layers} layers; supported: 1")
        own = Eagle3Config.of(config)
        hidden, bias = config.hidden_size, config.attention_bias
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        norms = [f"{_LAYER}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in (*norms, "norm")}
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes |= linear_shapes(f"{_LAYER}.self_attn.{name}", rows, 2 * hidden, bias)
        shapes |= linear_shapes(f"{_LAYER}.self_attn.o_proj", hidden, queries, bias)
        shapes |= dense_shapes(f"{_LAYER}.mlp", hidden, config.intermediate_size, config.mlp_bias)
        shapes["fc.weight"] = (hidden, NUM_AUX * own.target_hidden_size)
        shapes["lm_head.weight"] = (own.draft_vocab_size, hidden)
        if own.draft_vocab_size != config.vocab_size:
            shapes[_TO_TARGET] = (own.draft_vocab_size,)
        return shapes

    @classmethod
    def optional_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of tensors that a head may have."""
        own = Eagle3Config.of(config)
        embedding: dict[str, Shape] = {f"{_EMBEDDING}.weight": (config.vocab_size, config.hidden_size)}
        return embedding | {_TO_TARGET: (own.draft_vocab_size,)}

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """Tensors that are not loaded: `t2d` says which ids are drafted, as `d2t` does."""
        return ("t2d",)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The input states of `forward`, from the target's states: [T, (1 + n) H of the target] -> [T, H]."""
        return self._combine(states[:, -self._aux_width :])

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """States [T, 2H]: normed states beside the head's own. Inputs: the tokens after the positions int64 [T], and
        the states at the positions, which are the last H of each row."""
        assert self.embedding is not None
        embedded, cos_sin, states = self.embedding(token_ids), self._rotary(positions), states[:, -self._hidden_size :]
        if self._fused is not None:
            context = get_forward_context()
            cache = context.kv_cache_data[self.kv_names[0]].cache
            return self._fused.run(states, *cos_sin, cache, context.attn_metadata, embedded)
        normed = self._hidden_norm(states)
        residual = normed if self._norms_first else states
        both = torch.cat((self._input_norm(embedded), normed), dim=1)
        x, residual = self._post_norm.add(self._attention(both, cos_sin), residual)
        return torch.cat(self._norm.add(self._mlp(x), residual), dim=1)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] over the target's ids, of states [S, 2H]; -inf for ids that are never drafted."""
        logits = self._head(states[:, : self._hidden_size])
        if self._drafts_all:
            return logits
        every = logits.new_full((len(logits), self._vocab_size), -math.inf)
        return every.index_copy_(1, self._target_ids, logits)

    def greedy(self, states: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, of states [S, 2H]."""
        if self._drafts_all:
            return self._head.greedy(states[:, : self._hidden_size], limit)
        return self.compute_logits(states)[:, :limit].argmax(dim=1)


def _target_ids(build: Build, count: int) -> torch.Tensor:
    """int64 [count]: the target's id of each draft id.

    Raises:
        ModelError: an id is outside the vocabulary, or occurs twice.
    """
    ids = torch.arange(count)
    if _TO_TARGET in build.weights:
        ids += build.weights.take(_TO_TARGET, dtype=torch.int64)
    vocab = build.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) < count:
        raise ModelError(f"{_TO_TARGET} does not give each draft id one of the {vocab} ids; download the head again")
    return ids.to(build.kernels.device)
