"""Finds and loads the draft model of a speculative config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.config import Config, QuantizationConfig
from common.hub import HubError
from common.params.config_parts import DRAFT_MODEL, EAGLE3, MTP, NGRAM
from worker.config.architectures import draft_head_arch_dict
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import has_tokenizer, model_tokenizer
from worker.model.architectures import model_class
from worker.model.model_loader import ModelLoader
from worker.model.models.eagle3 import Eagle3Config, aux_layers
from worker.model.speculation.draft_proposer import DraftProposer
from worker.model.speculation.model_proposers import DraftTarget, EagleProposer, MtpProposer, SmallModelProposer
from worker.model_download import model_folder
from worker.weights.checkpoint import no_progress

# Takes the engine's config, the folder's config, and the extra arguments that the target is loaded with.
MakeLoader = Callable[..., ModelLoader]


@dataclass(frozen=True)
class DraftSource:
    """A configured draft model that is not loaded yet.

    Attributes:
        method: method of the speculative config.
        folder: its folder; None if it is a layer of the target's checkpoint.
        config: config of that folder.
        aux_layers: layers of the target whose inputs it takes.
    """

    method: str
    folder: Path | None = None
    config: ModelConfig | None = None
    aux_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config, target: ModelConfig) -> DraftSource | None:
        """The draft model of an engine's config; None without one.

        Args:
            config: config of the engine.
            target: config of the model that it drafts for.

        Raises:
            ModelError: it cannot draft for the target; one line.
        """
        spec = config.speculative_config
        if spec is None or spec.method == NGRAM:
            return None
        if spec.method == MTP:
            _refuse_lockstep(config, MTP)
            return cls._layer(target)
        folder = _folder(spec.model)
        try:
            return cls._head(folder, target) if spec.method == EAGLE3 else cls._small(folder, config, target)
        except ModelError as error:
            raise _named(folder, error) from None

    @classmethod
    def _layer(cls, target: ModelConfig) -> DraftSource:
        try:
            model_class(target.architecture).draft_shapes(target)
        except ModelError as error:
            raise ModelError(f"speculative_config.method {MTP}: {error}; take another method") from None
        return cls(MTP)

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

    @classmethod
    def _small(cls, folder: Path, engine: Config, target: ModelConfig) -> DraftSource:
        config = ModelConfig.from_folder(folder)
        if config.has_experts:
            _refuse_lockstep(engine, DRAFT_MODEL)
        tokens, others = _token_strings(Path(engine.model)), _token_strings(folder)
        if tokens != others or config.vocab_size < len(tokens or range(target.vocab_size)):
            raise ModelError("its tokenizer differs from the model's; use a draft model that shares it")
        return cls(DRAFT_MODEL, folder, config)

    @property
    def wanted(self) -> dict[str, Any]:
        """Arguments of ModelLoader that the target needs for this draft model."""
        return {"aux_layers": self.aux_layers, "drafts": self.method == MTP}

    def load(self, runner: DraftTarget, make_loader: MakeLoader) -> DraftProposer:
        """Loads the draft model; the runner's target is loaded already.

        Raises:
            ModelError: it cannot be used; one line.
        """
        target: Any = runner.model
        if self.folder is None or self.config is None:
            return MtpProposer.of(target.draft_layer, runner)
        config = replace(runner.config, model=str(self.folder), quant_config=QuantizationConfig())
        try:
            loader = make_loader(config, self.config)
            if self.method == DRAFT_MODEL:
                return SmallModelProposer.of(loader.load(no_progress), self.config, runner)
            head = loader.load_head(no_progress)
            head.share(target.embedding)
            return EagleProposer.of(head, self.config, runner)
        except ModelError as error:
            raise _named(self.folder, error) from None


def _refuse_lockstep(config: Config, method: str) -> None:
    """Refuses a draft model with experts if several engines run in lockstep.

    Raises:
        ModelError: they do: experts are shared by all engines, which would have to draft in the same steps.
    """
    if config.parallel_config.data_parallel_size > 1:
        raise ModelError(
            f"speculative_config.method {method}: engines in lockstep share no experts of a draft model; "
            "leave out --dp-size, or speculation"
        )


def _token_strings(folder: Path) -> list[str] | None:
    """Token strings by id; None without a tokenizer."""
    if not has_tokenizer(folder):
        return None
    tokenizer = model_tokenizer(folder)
    return tokenizer.token_strings(range(tokenizer.vocab_size))


def _folder(model: str) -> Path:
    try:
        return model_folder(model)
    except (HubError, ModuleNotFoundError) as error:
        raise ModelError(f"speculative_config.model: {error}") from None


def _named(folder: Path, error: ModelError) -> ModelError:
    return ModelError(f"speculative_config.model {folder}: {error}")
