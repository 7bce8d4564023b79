"""The models that workers serve: what the router needs to validate, tokenize and answer.

Pure. While new weights are rolled out, workers of one model name differ in the weights, or in what the tokens and
hashes of a prompt depend on. Each such `identity` is a model of its own, and a request keeps one from its prompt to its
last token. A model whose workers are all gone stays known, so that its requests get UNAVAILABLE and not NOT_FOUND; it
is forgotten when its addresses serve other models.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

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
from common.wire.heads import CLASSIFIER, OUTPUT_HEAD, Head, told_head, told_pooling
from common.wire.protocol import EMBED_FEATURE, LOGPROBS_FEATURE
from router.answers.channels.form import ResponseForm, response_form

RERANK_ROLES: Final = frozenset(("query", "document"))
# The form of Qwen3-Reranker, as its model card has it.
_QWEN3: Final = """\
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first
    | default("Given a web search query, retrieve relevant passages that answer the query") -%}
{{- "<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    ~ 'provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n'
    ~ "<Instruct>: " ~ instruction ~ "\\n<Query>: " ~ query ~ "\\n<Document>: " ~ document
    ~ "<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" -}}
"""


def rerank_template(own: ChatTemplate | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Renders messages of the roles `system` (the instruction, which may be absent), `query` and `document`.

    Args:
        own: the model's chat template, which serves if it names these roles, as sentence-transformers has it.
        tokenizer: the model's tokenizer.

    Returns:
        The model's own template, else the form of Qwen3-Reranker.
    """
    return own if own is not None and own.roles >= RERANK_ROLES else ChatTemplate({"default": _QWEN3}, tokenizer)


# Fields in which workers of one identity agree, besides the name.
_IDENTITY = ("weights_digest", "tokenizer_sha256", "block_size", "hash_seed", "architecture", "vocab_size")
# Most models that are remembered without an address that serves them.
_MAX_UNUSED = 16


class WorkerRefusedError(Exception):
    """A worker cannot be used; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """Everything read from a model's tokenizer files; None or default without such files.

    Attributes:
        rerank_template: renders a query and a document as a prompt.
        response_form: the form of answers to a conversation; None for content alone.
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
    """One model on one worker, or on all ready workers of an identity.

    For several workers, `max_model_len` (tokens) is the longest, `features` are those of all, and `grammar_engine` is
    the router's own if any worker has it. `relevance_tokens` are the tokens for "relevant" and "not relevant"; None for
    a model that was not trained for reranking.
    """

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
    kv_stores: frozenset[str] = frozenset()
    identity: str = field(init=False)
    """Equal for workers that hold the same weights and can serve the same prepared prompt."""

    def __post_init__(self) -> None:
        identity = "/".join(str(getattr(self, name)) for name in ("name", *_IDENTITY))
        object.__setattr__(self, "identity", identity)

    @property
    def num_ids(self) -> int:
        """Number of token ids that can be generated; embedding matrices are often padded beyond the vocabulary."""
        tokenizer = self.text.tokenizer
        return self.vocab_size if tokenizer is None else min(self.vocab_size, tokenizer.vocab_size)

    @property
    def serves_logprobs(self) -> bool:
        """True if all ready workers have the feature."""
        return LOGPROBS_FEATURE in self.features

    @property
    def serves_constraints(self) -> bool:
        """True if a ready worker compiles grammars with the same library as the router."""
        return self.grammar_engine == ENGINE and self.text.tokenizer is not None and bool(self.eos_token_ids)

    @property
    def embeds(self) -> bool:
        """True if all ready workers have the feature."""
        return EMBED_FEATURE in self.features

    @property
    def generates(self) -> bool:
        """True if it has an output head."""
        return self.head == OUTPUT_HEAD

    @property
    def has_relevance_head(self) -> bool:
        """True if it is a classifier with one label."""
        return self.head == CLASSIFIER and self.num_labels == 1

    @property
    def reranks(self) -> bool:
        """True if it was trained for reranking, and all ready workers have the features for it."""
        says = self.generates and self.relevance_tokens is not None and self.serves_logprobs
        return (says or self.has_relevance_head) and self.text.tokenizer is not None

    @property
    def pairs_texts(self) -> bool:
        """True if a prompt is the query followed by the document, without a template."""
        own = self.text.template
        return self.has_relevance_head and (own is None or not own.roles >= RERANK_ROLES)

    def check_generates(self) -> None:
        """Checks that the model can generate.

        Raises:
            NoOutputHeadError: it has no output head.
        """
        if not self.generates:
            raise NoOutputHeadError(self.name)

    @property
    def reasons(self) -> bool:
        """True if its answers may have reasoning that can be separated from their content."""
        return self.text.response_form is not None and self.text.response_form.template.has_reasoning

    @property
    def calls_tools(self) -> bool:
        """True if the model's prompts contain the tools of a request, and calls can be separated from content."""
        return self.text.response_form is not None and self.text.response_form.calls_tools

    def disagreement(self, other: ServedModel) -> str:
        """The differences between this identity and that of `other`, "" without any."""
        values = [(name, getattr(self, name), getattr(other, name)) for name in _IDENTITY]
        return "; ".join(f"{name} is {theirs}, not {ours}" for name, ours, theirs in values if ours != theirs)


def describe(description: wpb.GetWorkerResponse, text: TextAssets) -> ServedModel:
    """Makes the model of a worker's description.

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
        kv_stores=frozenset(description.kv_stores),
        relevance_tokens=(description.relevance_tokens.yes, description.relevance_tokens.no)
        if description.HasField("relevance_tokens")
        else None,
        head=told_head(description.head),
        num_labels=description.num_labels,
    )


class ModelRegistry:
    """The router's models with their weights, and the workers that serve them."""

    def __init__(self) -> None:
        # By name and identity: the known models, the latest last.
        self._models: dict[str, dict[str, ServedModel]] = {}
        # By address: the model it served last, and the model that each ready worker serves.
        self._assigned: dict[str, ServedModel] = {}
        self._ready: dict[str, ServedModel] = {}
        # Names of the models in `_assigned`.
        self._names: list[str] = []
        # By name and identity: the number of ready workers, if any.
        self._counts: dict[str, Counter[str]] = {}

    def admit(self, worker: str, model: ServedModel) -> str:
        """Adds the worker at address `worker` to the ready workers of `model`.

        Returns:
            How it differs from the other ready workers of this name, if it is the first one that does; else "".
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
        """Removes a worker from the ready ones."""
        gone = self._ready.pop(worker, None)
        if gone is None:
            return
        counts = self._counts[gone.name]
        counts[gone.identity] -= 1
        if not counts[gone.identity]:
            del counts[gone.identity]
        self._measure(gone)

    def forget(self, worker: str) -> None:
        """Removes a worker that has left this router."""
        self.release(worker)
        gone = self._assigned.pop(worker, None)
        self._names = self._assigned_names()
        if gone is not None:
            self._forget_unused(gone.name)
            self._forget_oldest()

    def knows(self, name: str) -> bool:
        """True if a model called `name` is known, or any model for an empty name."""
        return name in self._models if name else bool(self._models)

    def get(self, name: str) -> ServedModel:
        """The model called `name` with the weights of most ready workers; for an empty name the only model.

        Raises:
            NoWorkerError: no worker has come up yet.
            UnknownModelError: there is no such model.
            InvalidFieldError: the name is empty and there are several.
        """
        name = self._resolve(name)
        counts = self._counts.get(name, Counter())
        return max(reversed(self._models[name].values()), key=lambda model: counts[model.identity])

    def choose(self, name: str, key: str) -> ServedModel:
        """Chooses the weights of a new request for the model called `name`: the same for the same `key`.

        Weighted rendezvous hashing (Thaler and Ravishankar 1996; Schindelhauer and Schomaker 2005): each identity gets
        new requests in proportion to its ready workers. Routers with the same ready workers choose alike, and few keys
        change their choice when workers come or go.

        Raises:
            ApiError: see `get`.
        """
        name = self._resolve(name)
        counts = self._counts.get(name)
        if not counts:
            return next(reversed(self._models[name].values()))
        if len(counts) == 1:
            return self._models[name][next(iter(counts))]
        return self._models[name][max(counts, key=lambda identity: _score(identity, key, counts[identity]))]

    def resumable(self, name: str, weights_digest: str, numerics: str) -> ServedModel:
        """The model called `name` with given weights, if a worker of the numerics class is ready.

        Args:
            name: see `get`.
            weights_digest: digest of the weights; "" for any.
            numerics: required numerics class; "" for any.

        Raises:
            OtherModelStateError: no ready worker has these weights and this class.
            ApiError: see `get`.
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
        """True if an identity has no ready worker, but another identity of the same name has."""
        counts = self._counts.get(name, Counter())
        return bool(counts) and identity not in counts

    def ready_workers(self, name: str) -> int:
        """Number of ready workers of a model name, with any weights."""
        return sum(self._counts.get(name, Counter()).values())

    @property
    def models(self) -> list[ServedModel]:
        """All models in order of their names, each as `get` returns it."""
        return [self.get(name) for name in sorted(self._models)]

    @property
    def serving(self) -> bool:
        """True if any worker is ready."""
        return bool(self._ready)

    @contextlib.contextmanager
    def watched(self, serving_changed: Callable[[], None]) -> Iterator[None]:
        """Calls `serving_changed` if the first worker becomes ready in the block, or the last one stops."""
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
        # Models without an address do not make an empty name ambiguous.
        names = self._names or sorted(self._models)
        if len(names) > 1:
            raise InvalidFieldError("model", "is empty", f"one of {', '.join(names)}")
        return names[0]

    def _difference(self, model: ServedModel) -> str:
        """Differences of a model from the ready one of its name, "" if its own identity is ready."""
        counts = self._counts.get(model.name)
        if not counts or model.identity in counts:
            return ""
        return self._models[model.name][next(iter(counts))].disagreement(model)

    def _measure(self, model: ServedModel) -> None:
        """Updates a model from its ready workers: longest length, common features; unchanged without any."""
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
        """Forgets identities that no address served last; keeps the latest one if none did."""
        used = {model.identity for model in self._assigned.values() if model.name == name}
        known = self._models[name]
        if not used:
            used = {next(reversed(known))}
        self._models[name] = {identity: model for identity, model in known.items() if identity in used}

    def _forget_oldest(self) -> None:
        """Keeps at most _MAX_UNUSED models without an address."""
        unused = self._models.keys() - set(self._names)
        for name in [name for name in self._models if name in unused][: max(0, len(unused) - _MAX_UNUSED)]:
            del self._models[name]


def _score(identity: str, key: str, weight: int) -> float:
    """Score of an identity for a key; the highest one is chosen."""
    digest = hashlib.blake2b(f"{identity}\0{key}".encode(), digest_size=8).digest()
    # 52 bits plus one half, so that the value is strictly between 0 and 1.
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52
    return -weight / math.log(uniform)
