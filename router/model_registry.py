"""The models that the workers serve, as the router must know them to validate, tokenize and answer.

Pure. Workers of one name may differ in what a prompt's tokens and hashes depend on, and in the weights, as while new
weights are rolled out: each such `identity` is a model of its own, and a request has one of them from its prompt to its
last token. A model whose workers are all gone stays known, so that its requests get UNAVAILABLE and not NOT_FOUND; it
is forgotten when its addresses serve others.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fissile.worker.v1 import worker_pb2 as wpb

from common.constraints.library import ENGINE
from common.errors import (
    InvalidFieldError,
    NoOutputHeadError,
    NoWorkerError,
    OtherModelStateError,
    UnknownModelError,
)
from common.limits import MAX_BLOCK_TOKENS, MAX_MODEL_LEN
from common.params.pooling import Pooling
from common.params.sampling_params import SamplingParams, model_defaults
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, read_json
from common.wire.head_protos import told_head
from common.wire.heads import CLASSIFIER, OUTPUT_HEAD, Head
from common.wire.pooling_protos import told_pooling
from common.wire.protocol import EMBED_FEATURE, LOGPROBS_FEATURE
from router.answers.channels.form import ResponseForm, response_form
from router.rerank_template import RERANK_ROLES, rerank_template

# In what workers of one identity agree, besides the name.
_IDENTITY = ("weights_digest", "tokenizer_sha256", "block_size", "hash_seed", "architecture", "vocab_size")
# Models that are remembered though none of the router's addresses serves them any more.
_MAX_UNUSED = 16


class WorkerRefusedError(Exception):
    """A worker cannot be used; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Everything that comes with a model's tokenizer files; all None or default when it has none.

    Attributes:
        rerank_template: makes a prompt of a query and a document.
        response_form: the form of answers to a conversation; None where they are content alone.
    """

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    rerank_template: ChatTemplate | None = None
    response_form: ResponseForm | None = None
    defaults: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TextAssets:
        """Reads the files of a checkpoint; takes up to a second for a large vocabulary.

        Raises:
            TokenizerError: a file cannot be used.
        """
        defaults = model_defaults(read_json(files, "generation_config.json"))
        tokenizer = Tokenizer.from_files(files)
        template = ChatTemplate.from_tokenizer(tokenizer)
        form = response_form(files, tokenizer, template)
        return cls(tokenizer, template, rerank_template(template, tokenizer), form, defaults)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model on one worker, or on all ready ones of an identity: `max_model_len` (tokens) is then the longest,
    `features` what all have, and `grammar_engine` the router's own if any has that. Of `relevance_tokens` the first
    says that a document is relevant, the second that it is not; None for a model that was not trained for that."""

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
    eos_token_ids: frozenset[int] = frozenset()
    features: frozenset[str] = frozenset()
    hidden_size: int = 0
    default_pooling: Pooling | None = None
    relevance_tokens: tuple[int, int] | None = None
    head: Head = OUTPUT_HEAD
    num_labels: int = 0
    grammar_engine: str = ""
    identity: str = field(init=False)
    """Equal for workers that a prompt made for one of them can be given to, and that hold the same weights."""

    def __post_init__(self) -> None:
        identity = "/".join(str(getattr(self, name)) for name in ("name", *_IDENTITY))
        object.__setattr__(self, "identity", identity)

    @property
    def num_ids(self) -> int:
        """Ids below it can be generated: embedding matrices are often padded beyond the tokenizer's vocabulary."""
        tokenizer = self.text.tokenizer
        return self.vocab_size if tokenizer is None else min(self.vocab_size, tokenizer.vocab_size)

    @property
    def serves_logprobs(self) -> bool:
        """True if all its ready workers do."""
        return LOGPROBS_FEATURE in self.features

    @property
    def serves_constraints(self) -> bool:
        """True if a ready worker compiles grammars as they are checked here."""
        return self.grammar_engine == ENGINE and self.text.tokenizer is not None and bool(self.eos_token_ids)

    @property
    def embeds(self) -> bool:
        """True if all its ready workers do."""
        return EMBED_FEATURE in self.features

    @property
    def generates(self) -> bool:
        """True if it has an output head."""
        return self.head == OUTPUT_HEAD

    @property
    def has_relevance_head(self) -> bool:
        """True if its classifier gives one number."""
        return self.head == CLASSIFIER and self.num_labels == 1

    @property
    def reranks(self) -> bool:
        """True if it was trained to, and all its ready workers do what that needs."""
        says = self.generates and self.relevance_tokens is not None and self.serves_logprobs
        return (says or self.has_relevance_head) and self.text.tokenizer is not None

    @property
    def pairs_texts(self) -> bool:
        """True if query and document stand beside each other in a prompt, in no form of words."""
        own = self.text.template
        return self.has_relevance_head and (own is None or not own.roles >= RERANK_ROLES)

    def check_generates(self) -> None:
        """Refuses what needs an output head.

        Raises:
            NoOutputHeadError: it has none.
        """
        if not self.generates:
            raise NoOutputHeadError(self.name)

    @property
    def reasons(self) -> bool:
        """True if its answers may have reasoning, which can be told from their content."""
        return self.text.response_form is not None and self.text.response_form.template.has_reasoning

    @property
    def calls_tools(self) -> bool:
        """True if the model's prompts contain the tools of a request, and calls can be separated from content."""
        return self.text.response_form is not None and self.text.response_form.calls_tools

    def disagreement(self, other: ServedModel) -> str:
        """In what `other` differs from this, "" when their identities are the same."""
        values = [(name, getattr(self, name), getattr(other, name)) for name in _IDENTITY]
        return "; ".join(f"{name} is {theirs}, not {ours}" for name, ours, theirs in values if ours != theirs)


def describe(description: wpb.GetWorkerResponse, text: TextAssets) -> ServedModel:
    """The model that a worker serves.

    Raises:
        WorkerRefusedError: the block size or the longest sequence is out of range.
    """
    if not 1 <= description.block_size <= MAX_BLOCK_TOKENS:
        raise WorkerRefusedError(f"block_size is {description.block_size}, not 1 to {MAX_BLOCK_TOKENS}")
    if not 1 <= description.limits.max_model_len <= MAX_MODEL_LEN:
        raise WorkerRefusedError(f"max_model_len is {description.limits.max_model_len}, not 1 to {MAX_MODEL_LEN}")
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
        eos_token_ids=frozenset(description.eos_token_ids),
        features=frozenset(description.features),
        hidden_size=description.hidden_size,
        default_pooling=told_pooling(description.default_pooling),
        grammar_engine=description.grammar_engine,
        relevance_tokens=(description.relevance_tokens.yes, description.relevance_tokens.no)
        if description.HasField("relevance_tokens")
        else None,
        head=told_head(description.head),
        num_labels=description.num_labels,
    )


class ModelRegistry:
    """Models of the router, the weights they have, and the workers that serve them."""

    def __init__(self) -> None:
        # By name and identity: the weights that are known, the latest last.
        self._models: dict[str, dict[str, ServedModel]] = {}
        # What each address has served last, and what each ready one serves.
        self._assigned: dict[str, ServedModel] = {}
        self._ready: dict[str, ServedModel] = {}
        # Names of the models that any address has served last.
        self._names: list[str] = []
        # By name and identity: how many are ready, of those that have any.
        self._counts: dict[str, Counter[str]] = {}

    def admit(self, worker: str, model: ServedModel) -> str:
        """Counts the worker at address `worker` among those that serve `model`.

        Returns:
            In what it differs from other ready workers of this name, if it is the first one that does; else "".
        """
        self.release(worker)
        before, self._assigned[worker] = self._assigned.get(worker), model
        self._names = self._assigned_names()
        difference = self._difference(model)
        self._ready[worker] = model
        self._counts.setdefault(model.name, Counter())[model.identity] += 1
        self._models.setdefault(model.name, {})[model.identity] = model
        self._measure(model)
        self._forget_unused(model.name)
        if before is not None and before.name not in self._names:
            del self._models[before.name]
        self._forget_oldest()
        return difference

    def release(self, worker: str) -> None:
        """The worker at this address is gone, or takes no more work."""
        gone = self._ready.pop(worker, None)
        if gone is None:
            return
        counts = self._counts[gone.name]
        counts[gone.identity] -= 1
        if not counts[gone.identity]:
            del counts[gone.identity]
        self._measure(gone)

    def forget(self, worker: str) -> None:
        """The worker at this address is none of this router's any more."""
        self.release(worker)
        gone = self._assigned.pop(worker, None)
        self._names = self._assigned_names()
        if gone is not None:
            self._forget_unused(gone.name)
            self._forget_oldest()

    def knows(self, name: str) -> bool:
        """True if there is, or was, a model called `name`, or any for an empty name."""
        return name in self._models if name else bool(self._models)

    def get(self, name: str) -> ServedModel:
        """The model called `name`, or the only one for an empty name, with the weights that most ready workers have.

        Raises:
            NoWorkerError: no worker has come up yet.
            UnknownModelError: there is no such model.
            InvalidFieldError: the name is empty and there are several.
        """
        name = self._resolve(name)
        counts = self._counts.get(name, Counter())
        return max(reversed(self._models[name].values()), key=lambda model: counts[model.identity])

    def choose(self, name: str, key: str) -> ServedModel:
        """The model called `name` with the weights that a new request gets: the same ones for the same `key`.

        Weighted rendezvous hashing (Thaler and Ravishankar 1996; Schindelhauer and Schomaker 2005): each of its weights
        gets new requests in proportion to its ready workers. Routers with the same ready workers choose alike, and
        only keys whose weights have lost workers, or others have won some, change theirs.

        Raises:
            ApiError: as `get`.
        """
        name = self._resolve(name)
        counts = self._counts.get(name)
        if not counts:
            return next(reversed(self._models[name].values()))
        if len(counts) == 1:
            return self._models[name][next(iter(counts))]
        return self._models[name][max(counts, key=lambda identity: _score(identity, key, counts[identity]))]

    def resumable(self, name: str, weights_digest: str, numerics: str) -> ServedModel:
        """The model called `name` with these weights, of which a worker of this numerics class is ready.

        Args:
            name: as of `get`.
            weights_digest: of the weights; "" for any.
            numerics: the class; "" for any.

        Raises:
            OtherModelStateError: there is no such worker.
            ApiError: as `get`.
        """
        name = self._resolve(name)
        ready = [model for model in self._ready.values() if model.name == name]
        if not ready:
            raise NoWorkerError(f"no worker serves model {name!r} now")
        of_weights = [model for model in ready if weights_digest in ("", model.weights_digest)]
        if not of_weights:
            served = ", ".join(sorted({model.weights_digest for model in ready}))
            raise OtherModelStateError("weights_digest", weights_digest, served)
        of_class = [model for model in of_weights if numerics in ("", model.numerics)]
        if not of_class:
            served = ", ".join(sorted({model.numerics for model in of_weights}))
            raise OtherModelStateError("numerics", numerics, served)
        return self._models[name][of_class[0].identity]

    def is_replaced(self, name: str, identity: str) -> bool:
        """True if no worker of an identity is ready, and one of another identity of the same name is."""
        counts = self._counts.get(name, Counter())
        return bool(counts) and identity not in counts

    def ready_workers(self, name: str) -> int:
        """Number of workers that serve a model now, whatever its weights."""
        return sum(self._counts.get(name, Counter()).values())

    @property
    def models(self) -> list[ServedModel]:
        """All models, in order of their names, each as in `get`."""
        return [self.get(name) for name in sorted(self._models)]

    @property
    def serving(self) -> bool:
        """True if any worker serves."""
        return bool(self._ready)

    @contextlib.contextmanager
    def watched(self, serving_changed: Callable[[], None]) -> Iterator[None]:
        """Calls `serving_changed` when the block makes the first worker serve, or leaves none that does."""
        was_serving = self.serving
        yield
        if self.serving != was_serving:
            serving_changed()

    def _resolve(self, name: str) -> str:
        """The full name of a model."""
        if not self._models:
            raise NoWorkerError("no worker has come up yet")
        if name:
            if name not in self._models:
                raise UnknownModelError(name, sorted(self._models))
            return name
        # One that no address serves any more is not in the way of the others.
        names = self._names or sorted(self._models)
        if len(names) > 1:
            raise InvalidFieldError("model", "is empty", f"one of {', '.join(names)}")
        return names[0]

    def _difference(self, model: ServedModel) -> str:
        """In what a model differs from the ready one of its name, "" where its weights are known to be ready."""
        counts = self._counts.get(model.name)
        if not counts or model.identity in counts:
            return ""
        return self._models[model.name][next(iter(counts))].disagreement(model)

    def _measure(self, model: ServedModel) -> None:
        """Notes the length of the longest ready worker, and what all can do; without one that stays as it was."""
        ready = [served for served in self._ready.values() if served.identity == model.identity]
        if ready:
            longest = max(served.max_model_len for served in ready)
            features = frozenset.intersection(*(served.features for served in ready))
            engine = ENGINE if any(served.grammar_engine == ENGINE for served in ready) else ""
            measured = replace(ready[-1], max_model_len=longest, features=features, grammar_engine=engine)
            self._models[model.name][model.identity] = measured

    def _assigned_names(self) -> list[str]:
        return sorted({model.name for model in self._assigned.values()})

    def _forget_unused(self, name: str) -> None:
        """Forgets the weights that no address has served last; the latest stay if none has."""
        used = {model.identity for model in self._assigned.values() if model.name == name}
        known = self._models[name]
        if not used:
            used = {next(reversed(known))}
        self._models[name] = {identity: model for identity, model in known.items() if identity in used}

    def _forget_oldest(self) -> None:
        """Bounds the models that are known though no address serves them any more."""
        unused = self._models.keys() - set(self._names)
        for name in [name for name in self._models if name in unused][: max(0, len(unused) - _MAX_UNUSED)]:
            del self._models[name]


def _score(identity: str, key: str, weight: int) -> float:
    """Preference of a key for an identity; it gets the one with the highest score."""
    digest = hashlib.blake2b(f"{identity}\0{key}".encode(), digest_size=8).digest()
    # Strictly between 0 and 1: 52 bits and a half.
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52
    return -weight / math.log(uniform)
