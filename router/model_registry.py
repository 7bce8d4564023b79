"""The models that the workers serve, as the router must know them to validate, tokenize and answer.

Pure. Workers of one model must agree in what a prompt's tokens and hashes depend on, and in the weights; the first one
decides while it serves. A model whose workers are all gone stays known, so that its requests get UNAVAILABLE and not
NOT_FOUND; it is forgotten when each of its addresses serves another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import InvalidFieldError, NoWorkerError, UnknownModelError
from common.sampling_params import SamplingParams, model_defaults
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, read_json


class WorkerRefusedError(Exception):
    """A worker can not be used together with the others; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What comes with a model's tokenizer files; all None or default when it has none."""

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    defaults: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TextAssets:
        """Reads the files of a checkpoint; takes up to a second for a large vocabulary.

        Raises:
            TokenizerError: a file can not be used.
        """
        defaults = model_defaults(read_json(files, "generation_config.json"))
        return cls(Tokenizer.from_files(files), ChatTemplate.from_files(files), defaults)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model on one worker, or of all its ready workers: then `max_model_len` (tokens) is the shortest."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    tokenizer_sha256: str
    weights_digest: str
    block_size: int
    hash_seed: int
    text: TextAssets
    numerics: str = ""

    @property
    def identity(self) -> str:
        """Equal for workers that a prompt made for one of them can be given to, and that hold the same weights."""
        parts = (self.name, self.weights_digest, self.tokenizer_sha256, self.block_size, self.hash_seed)
        return "/".join(map(str, parts))

    def disagreement(self, other: ServedModel) -> str:
        """In what `other` differs from this, "" when they can be served under one name."""
        fields = ("architecture", "vocab_size", "tokenizer_sha256", "weights_digest", "block_size", "hash_seed")
        values = [(name, getattr(self, name), getattr(other, name)) for name in fields]
        return "; ".join(f"{name} is {theirs}, not {ours}" for name, ours, theirs in values if ours != theirs)


def describe(description: wpb.GetWorkerResponse, text: TextAssets) -> ServedModel:
    """The model that a worker serves."""
    return ServedModel(
        name=description.model,
        architecture=description.architecture,
        max_model_len=description.limits.max_model_len,
        vocab_size=description.vocab_size,
        tokenizer_sha256=description.tokenizer_sha256,
        weights_digest=description.weights_digest,
        block_size=description.block_size,
        hash_seed=description.hash_seed,
        text=text,
        numerics=description.numerics,
    )


class ModelRegistry:
    """Which models there are, and which workers serve them."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        # Latest model of each address, and what each ready address serves.
        self._assigned: dict[str, str] = {}
        self._ready: dict[str, ServedModel] = {}

    def admit(self, worker: str, model: ServedModel) -> None:
        """Counts the worker at address `worker` among those that serve `model`.

        Raises:
            WorkerRefusedError: it differs from the workers that serve a model of this name.
        """
        others = [served for served in self._ready.values() if served.name == model.name]
        if others and (difference := others[0].disagreement(model)):
            raise WorkerRefusedError(f"differs from the other workers of model {model.name!r}: {difference}")
        self._assigned[worker] = model.name
        self._ready[worker] = model
        self._models[model.name] = replace(model, max_model_len=min(m.max_model_len for m in [*others, model]))
        for name in self._models.keys() - set(self._assigned.values()):
            del self._models[name]

    def release(self, worker: str) -> None:
        """The worker at this address is gone, or takes no more work."""
        gone = self._ready.pop(worker, None)
        if gone is None:
            return
        lengths = [m.max_model_len for m in self._ready.values() if m.name == gone.name]
        if lengths:
            self._models[gone.name] = replace(self._models[gone.name], max_model_len=min(lengths))

    def forget(self, worker: str) -> None:
        """The worker at this address is none of this router's any more; a model that only it had goes with it."""
        self.release(worker)
        self._assigned.pop(worker, None)
        for name in self._models.keys() - set(self._assigned.values()):
            del self._models[name]

    def get(self, name: str) -> ServedModel:
        """The model called `name`, or the only one for an empty name.

        Raises:
            NoWorkerError: no worker has come up yet.
            UnknownModelError: there is no such model.
            InvalidFieldError: the name is empty and there are several.
        """
        if not self._models:
            raise NoWorkerError("no worker has come up yet")
        if not name and len(self._models) > 1:
            raise InvalidFieldError("model", "is empty", f"one of {', '.join(sorted(self._models))}")
        if not name:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise UnknownModelError(name, sorted(self._models))
        return self._models[name]

    def ready_workers(self, name: str) -> int:
        """Number of workers that serve a model now."""
        return sum(served.name == name for served in self._ready.values())

    @property
    def models(self) -> list[ServedModel]:
        """All models, in order of their names."""
        return [self._models[name] for name in sorted(self._models)]

    @property
    def serving(self) -> bool:
        """Whether any worker serves."""
        return bool(self._ready)
