"""Common parts of DeepSeek-V3 and GLM-4: dense layers first, then mixtures with shared experts, then MTP layers.

Multi-token prediction (arXiv:2412.19437, section 2.2): an MTP layer takes the hidden state at a position and the next
token, and predicts the token after that. Only the first MTP layer is used, as a draft model; for further drafts it
takes its own states, in place of the other MTP layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from common.limits import MAX_MODEL_LAYERS
from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build
from worker.model.layers.embedding import Embedding, LMHead, head_weight
from worker.model.layers.linear import WHOLE, ColumnLinear
from worker.model.layers.moe import MoEConfig, grouped_moe, grouped_moe_config, grouped_moe_shapes
from worker.model.layers.norm import RMSNorm
from worker.model.models.llama import LlamaForCausalLM, LlamaMLP, dense_shapes
from worker.weights.checkpoint import Shape

# Matrices of an MTP layer that may equal the target's.
_EMBEDDING: Final = "embed_tokens"
_HEAD: Final = "shared_head.head"
# Rows compared at once.
_COMPARED_ROWS: Final = 4096


class GroupedMoEForCausalLM(LlamaForCausalLM):
    """Llama's decoder with dense networks in the first layers and mixtures with shared experts in the others.

    Attributes:
        draft_layer: the first MTP layer, if `Build.drafts`.
    """

    # True if the choice of experts has a correction bias.
    corrects = True

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.draft_layer = MtpLayer(build, self) if build.drafts else None

    @classmethod
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        """The experts' shape.

        Raises:
            ModelError: config.json describes another kind of mixture, or its numbers do not fit.
        """
        return grouped_moe_config(config)

    @classmethod
    def sparse(cls, config: ModelConfig, layer: int) -> bool:
        """True if a layer's feed-forward network is a mixture of experts."""
        return layer >= config.count("first_k_dense_replace", least=0)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts, or a dense network in the first layers."""
        if not self.sparse(build.config, layer):
            return LlamaMLP(build, prefix, build.config.intermediate_size)
        shared = LlamaMLP(build, f"{prefix}.shared_experts", _shared_inner(build.config))
        return grouped_moe(build, prefix, self.moe_config(build.config), self.corrects, shared.partial)

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """Name prefixes of the MTP layers, which are numbered after the others."""
        first = config.num_hidden_layers
        return tuple(f"model.layers.{layer}." for layer in range(first, first + _num_mtp_layers(config)))

    @classmethod
    def draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Tensors of the first MTP layer.

        Raises:
            ModelError: the checkpoint has none.
        """
        if not _num_mtp_layers(config):
            raise ModelError("config.json has no num_nextn_predict_layers; the checkpoint has no layer that drafts")
        layer, hidden = config.num_hidden_layers, config.hidden_size
        norms: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes = {**cls.layer_shapes(config, layer), **norms, "eh_proj.weight": (hidden, 2 * hidden)}
        return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}

    @classmethod
    def optional_draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Tensors of the first MTP layer that a checkpoint may omit because they equal the target's."""
        prefix, shape = f"model.layers.{config.num_hidden_layers}", (config.vocab_size, config.hidden_size)
        return {f"{prefix}.{name}.weight": shape for name in (_EMBEDDING, _HEAD)}

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's feed-forward network."""
        hidden = config.hidden_size
        if not cls.sparse(config, layer):
            return dense_shapes("mlp", hidden, config.intermediate_size)
        mixture = grouped_moe_shapes(cls.moe_config(config), hidden, cls.corrects)
        return mixture | dense_shapes("mlp.shared_experts", hidden, _shared_inner(config))


class MtpLayer:
    """The first MTP layer; a `DraftModel` beside its target.

    Args:
        build: shared by the layers.
        target: the model that it belongs to. It uses the target's embedding and head if its own are equal or absent.
    """

    def __init__(self, build: Build, target: GroupedMoEForCausalLM) -> None:
        index = build.config.num_hidden_layers
        prefix = f"model.layers.{index}"
        self.kv_names: tuple[str, ...] = (f"layers.{index}",)
        self._rotary = target.rotary
        assert target.head is not None
        self._embedding, self._head = target.embedding, target.head
        if _has_own(build, f"{prefix}.{_EMBEDDING}", "model.embed_tokens"):
            self._embedding = Embedding(build, f"{prefix}.{_EMBEDDING}", for_head=False)
        if _has_own(build, f"{prefix}.{_HEAD}", target.head_name(build.config)):
            self._head = LMHead(build, head_weight(build, f"{prefix}.{_HEAD}"))
        self._token_norm = RMSNorm(build, f"{prefix}.enorm")
        self._state_norm = RMSNorm(build, f"{prefix}.hnorm")
        self._join = ColumnLinear(build, {f"{prefix}.eh_proj": WHOLE})
        self._layer = target.make_layer(build, index)
        self._norm = RMSNorm(build, f"{prefix}.shared_head.norm")

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The input states of `forward`: the target's [T, H], unchanged."""
        return states

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Its own states [T, H], from the tokens after the positions int64 [T] and the states [T, H] at them."""
        both = torch.cat((self._token_norm(self._embedding(token_ids)), self._state_norm(states)), dim=1)
        x, residual = self._layer(self._join(both), None, self._rotary(positions))
        return x + residual

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] of its states [S, H]."""
        return self._head(self._norm(states))

    def greedy(self, states: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, of its states [S, H]."""
        return self._head.greedy(self._norm(states), limit)


def _num_mtp_layers(config: ModelConfig) -> int:
    count = config.count("num_nextn_predict_layers", 0, least=0)
    if count > MAX_MODEL_LAYERS:
        raise ModelError(f"config.json: num_nextn_predict_layers is {count}; it must be at most {MAX_MODEL_LAYERS}")
    return count


def _has_own(build: Build, name: str, shared: str) -> bool:
    """True if the checkpoint has a matrix [V, H] of that name with other numbers than the target's `shared` matrix."""

    def compare() -> torch.Tensor:
        weights, one, other = build.weights, f"{name}.weight", f"{shared}.weight"
        if one not in weights:
            return torch.tensor([False])
        starts = range(0, build.config.vocab_size, _COMPARED_ROWS)
        pieces = (slice(start, start + _COMPARED_ROWS) for start in starts)
        differ = (not torch.equal(weights.take(one, rows), weights.take(other, rows)) for rows in pieces)
        return torch.tensor([any(differ)])

    return bool(build.kept.keep(f"{name} is its own", compare))


def _shared_inner(config: ModelConfig) -> int:
    """Inner units of all shared experts, which are computed as one network."""
    return config.count("moe_intermediate_size") * config.count("n_shared_experts")
