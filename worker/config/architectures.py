"""The architectures that can be served. Adding one takes a file in worker/model/models and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD, Head

if TYPE_CHECKING:
    import torch

    from kernels.interface import KVSpec
    from worker.config.model_config import ModelConfig
    from worker.model.layers.build import Build
    from worker.model.layers.classifier import Classifier
    from worker.model.models.eagle3 import Eagle3Head
    from worker.model.sharding import Shard
    from worker.weights.checkpoint import Shape

# `architectures` entry of config.json -> module:class. Names, so that PyTorch is not needed to read them.
support_model_arch_dict: dict[str, str] = {
    "Qwen3ForCausalLM": "worker.model.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "worker.model.models.qwen3_moe:Qwen3MoeForCausalLM",
    "LlamaForCausalLM": "worker.model.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "worker.model.models.mixtral:MixtralForCausalLM",
    "GptOssForCausalLM": "worker.model.models.gpt_oss:GptOssForCausalLM",
    "Glm4MoeForCausalLM": "worker.model.models.glm4_moe:Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM": "worker.model.models.deepseek_v3:DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM": "worker.model.models.deepseek_v32:DeepseekV32ForCausalLM",
}

_GENERATES: Final = "ForCausalLM"
# Ends of names of the same decoders with another head than the one that generates.
_OTHER_HEADS: Final[dict[str, Head]] = {"Model": NO_HEAD, "ForSequenceClassification": CLASSIFIER}
# Likewise of what drafts for another model alone.
draft_head_arch_dict: dict[str, str] = {
    "LlamaForCausalLMEagle3": "worker.model.models.eagle3:Eagle3Head",
}


class CausalModel(Protocol):
    """A decoder: what the model runner needs of an architecture.

    Attributes:
        classifier: head of a checkpoint that classifies; None for others.
    """

    classifier: Classifier | None

    def __init__(self, build: Build) -> None: ...

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of the (unquantized) checkpoint, whole.

        Raises:
            ModelError: config.json asks for what this architecture's file does not do.
        """
        ...

    @classmethod
    def kept_tensors(cls, config: ModelConfig) -> tuple[str, ...]:
        """Beginnings of names of tensors that the checkpoint may have and that are not loaded, such as MTP layers."""
        ...

    @classmethod
    def kv_spec(cls, config: ModelConfig, shard: Shard) -> KVSpec:
        """KV cache of one token in one layer of this rank."""
        ...

    @classmethod
    def draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor of the layers of the checkpoint that draft.

        Raises:
            ModelError: it has none.
        """
        ...

    @classmethod
    def optional_draft_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Likewise, of those that the checkpoint need not have."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] after the last norm, for token ids and positions int64 [T].

        Beside them, [T, (1 + n) H], are the residual streams before the n `Build.aux_layers`.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] of hidden states [S, H], of a checkpoint that generates."""
        ...

    def greedy(self, hidden: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, of hidden states [S, H]."""
        ...


class DraftModel(Protocol):
    """Model that drafts for another one by its states: a head, or a layer of its checkpoint.

    Attributes:
        kv_names: names of its layers in the forward context.
    """

    kv_names: tuple[str, ...]

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """States [T, H] as `forward` takes them, of the target's [T, (1 + n) H]."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Its states [T, W] for tokens behind the positions int64 [T] and the states at them: [T, H], or its own."""
        ...

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] of its states [S, W], for the target's ids; -inf for those that it does not draft."""
        ...

    def greedy(self, states: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, of its states [S, W]."""
        ...


def parted(architecture: str) -> tuple[str, Head]:
    """The name of a decoder with the head that generates, and the head that it has: the former for its relatives,
    `Qwen3Model` and `Qwen3ForSequenceClassification`; other names as they are.
    """
    for end, head in _OTHER_HEADS.items():
        decoder = architecture.removesuffix(end) + _GENERATES
        if architecture.endswith(end) and decoder in support_model_arch_dict:
            return decoder, head
    return architecture, OUTPUT_HEAD


def model_type(decoder: str) -> str:
    """The `model_type` of a decoder in `transformers`, which is also the name of its class's module here."""
    return support_model_arch_dict[decoder].partition(":")[0].rpartition(".")[2]


def model_class(architecture: str) -> type[CausalModel]:
    """The class of a supported architecture, whatever its head. Imports PyTorch."""
    found: Any = _imported(support_model_arch_dict[parted(architecture)[0]])
    return found  # type: ignore[no-any-return]


def draft_head_class(architecture: str) -> type[Eagle3Head]:
    """The class of a draft head's architecture. Imports PyTorch."""
    found: Any = _imported(draft_head_arch_dict[architecture])
    return found  # type: ignore[no-any-return]


def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)
