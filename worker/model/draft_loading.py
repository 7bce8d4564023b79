"""Finds and loads the draft model that a speculative config asks for, beside its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import Config, QuantizationConfig
from common.config_parts import EAGLE3, MTP
from common.hub import HubError, model_folder
from worker.config.architectures import draft_head_arch_dict
from worker.config.model_config import ModelConfig, ModelError
from worker.model.draft_proposer import DraftProposer
from worker.model.model_loader import ModelLoader
from worker.model.model_proposers import EagleProposer, MtpProposer
from worker.model.models.eagle3 import Eagle3Config, Eagle3Head, aux_layers
from worker.weights.checkpoint import no_progress

if TYPE_CHECKING:
    from worker.model.model_runner import ModelRunner

# Takes a config, the folder's own one, and what the target is loaded with besides.
MakeLoader = Callable[..., ModelLoader]


@dataclass(frozen=True)
class DraftSource:
    """A draft model that is asked for, before it is loaded.

    Attributes:
        method: of the speculative config.
        folder: its own; None where it is a layer of the target's checkpoint.
        config: of that folder.
        aux_layers: layers of the target whose streams it takes.
    """

    method: str
    folder: Path | None = None
    config: ModelConfig | None = None
    aux_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config, target: ModelConfig) -> DraftSource | None:
        """The draft model of an engine's config; None where it has none.

        Args:
            config: of the engine.
            target: that it drafts for.

        Raises:
            ModelError: it cannot draft for that; one line.
        """
        spec = config.speculative_config
        if spec is None or spec.method not in (EAGLE3, MTP):
            return None
        if spec.method == MTP:
            if config.parallel_config.data_parallel_size > 1:
                raise ModelError(
                    "speculative_config.method mtp: engines in lockstep share no layers that draft; "
                    "leave out --data-parallel-size, or speculation"
                )
            return cls(MTP)
        folder = _folder(spec.model)
        try:
            return cls._head(folder, target)
        except ModelError as error:
            raise _named(folder, error) from None

    @classmethod
    def _head(cls, folder: Path, target: ModelConfig) -> DraftSource:
        config = ModelConfig.from_folder(folder, tuple(draft_head_arch_dict))
        wanted = Eagle3Config.of(config)
        for name, own, there in (
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("target_hidden_size", wanted.target_hidden_size, target.hidden_size),
        ):
            if own != there:
                raise ModelError(f"{name} is {own}, but the model has {there}; give a head that was made for it")
        return cls(EAGLE3, folder, config, aux_layers(config, target.num_hidden_layers))

    @property
    def wanted(self) -> dict[str, Any]:
        """Arguments of ModelLoader with which the target has to be loaded."""
        return {"aux_layers": self.aux_layers, "drafts": self.folder is None}

    def load(self, runner: ModelRunner, make_loader: MakeLoader) -> DraftProposer:
        """The draft model, beside a target that is loaded.

        Raises:
            ModelError: it cannot be used; one line.
        """
        target: Any = runner.model
        if self.folder is None or self.config is None:
            return MtpProposer.of(target.draft_layer, runner)
        config = replace(runner.config, model=str(self.folder), quant_config=QuantizationConfig())
        try:
            head: Eagle3Head = make_loader(config, self.config).load_head(no_progress)
            head.share(target.embedding)
            return EagleProposer.of(head, self.config, runner)
        except ModelError as error:
            raise _named(self.folder, error) from None


def _folder(model: str) -> Path:
    try:
        return model_folder(model)
    except (HubError, ModuleNotFoundError) as error:
        raise ModelError(f"speculative_config.model: {error}") from None


def _named(folder: Path, error: ModelError) -> ModelError:
    return ModelError(f"speculative_config.model {folder}: {error}")
