"""The classes of the architectures in worker/config/architectures.py, and what the model runner calls on them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kernels.interface import KVSpec
from worker.config.architectures import draft_head_arch_dict, parted, support_model_arch_dict
from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.classifier import Classifier
from worker.model.sharding import Shard
from worker.weights.checkpoint import Shape

if TYPE_CHECKING:
    from worker.model.models.eagle3 import Eagle3Head


class CausalModel(Protocol):
    """Decoder of one architecture, as the model runner calls it.

    Attributes:
        classifier: head of a classifying checkpoint; None for others.
    """

    classifier: Classifier | None

    def __init__(self, build: Build) -> None: ...

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of the (unquantized) checkpoint, whole.

        Raises:
            ModelError: config.json has a setting that this architecture does not support.
        """
        ...

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """Name prefixes of checkpoint tensors that are not loaded, such as MTP layers."""
        ...

    @classmethod
    def kv_spec(cls, config: ModelConfig, shard: Shard) -> KVSpec:
        """Shape of one token's KV cache in one layer of this rank."""
        ...

    @classmethod
    def draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of the checkpoint's drafting layers.

        Raises:
            ModelError: the checkpoint has none.
        """
        ...

    @classmethod
    def optional_draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of tensors of the drafting layers that a checkpoint may lack."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] after the last norm, for token ids and positions int64 [T].

        With n `Build.aux_layers` the result is [T, (1 + n) H]: the residual streams before these layers follow.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 [S, V] of hidden states [S, H]; for generating checkpoints only."""
        ...

    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, for each of the hidden states [S, H]."""
        ...


class DraftModel(Protocol):
    """Model that drafts from the hidden states of its target: a head, or a layer of the target's checkpoint.

    Attributes:
        kv_names: names of its layers in the forward context.
    """

    kv_names: tuple[str, ...]

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """States [T, H] for `forward`, from the target's states [T, (1 + n) H]."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """States [T, W], from the tokens after positions int64 [T] and the states at these positions.

        The given states are `combine`'s [T, H], or this model's own.
        """
        ...

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] over the target's ids, from states [S, W]; -inf for ids that it never drafts."""
        ...

    def greedy(self, states: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, for each of the states [S, W]."""
        ...


def model_class(architecture: str) -> type[CausalModel]:
    """The class of a supported architecture with any head. Imports its module."""
    found: Any = _imported(support_model_arch_dict[parted(architecture)[0]])
    return found  # type: ignore[no-any-return]


def draft_head_class(architecture: str) -> type[Eagle3Head]:
    """The class of a draft head's architecture. Imports its module."""
    found: Any = _imported(draft_head_arch_dict[architecture])
    return found  # type: ignore[no-any-return]


def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)
