"""Requests and events of engine doors: the terms between a peer's messages and Fissile's engine.

A door is a servicer for another project's engine protocol. It turns a peer's request into a DoorRequest and writes
DoorEvents as the peer's messages; everything between is in `worker/doors/door_adapter.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from common.errors import ApiError, FieldViolation
from common.params.pooling import Pooling
from common.wire.logprob_rows import TokenLogprobs
from worker.engine.sequence import Priority
from worker.session.kv_session import KvSession

# Prefixes of our own field paths, which no peer has.
_PREFIXES = ("sampling_params.", "params.")


@dataclass(frozen=True, slots=True)
class EngineDoor:
    """One engine protocol.

    Attributes:
        name: as the worker's option and the log have it.
        fields: paths of the peer's fields by our names (fields of DoorRequest and SamplingParams, `constraint.regex`),
            so that errors name the field that the peer has sent. A name that is missing here stays as it is.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, error: ApiError) -> ApiError:
        """The error with the peer's names of the fields."""
        if not error.violations:
            return error
        violations = tuple(FieldViolation(self._path(each.path), each.problem, each.valid) for each in error.violations)
        message = str(violations[0]) if error.message == str(error.violations[0]) else error.message
        return ApiError(error.code, message, violations, error.retry_after_s, error.reason, error.metadata)

    def _path(self, path: str) -> str:
        for prefix in _PREFIXES:
            path = path.removeprefix(prefix)
        if path in self.fields:
            return self.fields[path]
        end = min((at for at in (path.find("."), path.find("[")) if at >= 0), default=len(path))
        return self.fields.get(path[:end], path[:end]) + path[end:]


@dataclass(frozen=True, slots=True)
class DoorRequest:
    """A request for `n` answers.

    Attributes:
        prompt: text, or token ids.
        params: values of SamplingParams by name, only those that the peer has given. The others have the model's
            defaults; without `max_tokens` an answer may fill the model's length. `bad_words`, `constraint`
            (`Constraint` or a mapping such as `{"regex": "a+"}`), `stop_strings` and `n` are served too.
        request_id: the peer's id, by which the request can be aborted; "" for a random one. Without `seed` the seed is
            derived from it, as everywhere in Fissile.
        cache_salt: requests of different salts share no cached blocks.
        reads_cache: False to compute the whole prompt; its blocks are still cached for others.
        priority: priority class.
        returns_text: False for outputs without text, if there are no stop strings.
        keeps_special_tokens: True if text has special tokens.
        keeps_stop_token: True if text has the stop token (not end-of-sequence) that ended an answer.
        is_context_only: True to compute the prompt's blocks alone. The answer is another request's, so `params` are
            only checked.
        session: a prefill's session, whose blocks the prompt may wait for; None without one.
    """

    prompt: str | Sequence[int]
    params: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""
    cache_salt: str = ""
    reads_cache: bool = True
    priority: Priority = Priority.NORMAL
    returns_text: bool = True
    keeps_special_tokens: bool = False
    keeps_stop_token: bool = False
    is_context_only: bool = False
    session: KvSession | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A request for a prompt's vector.

    Attributes:
        prompt: text, or token ids.
        request_id: the peer's id; "" for a random one.
        pooling: None for the checkpoint's own, else `last`.
        dimensions: number of leading elements to keep; None for all.
        normalize: True for a vector of length 1.
        cache_salt: as in DoorRequest.
    """

    prompt: str | Sequence[int]
    request_id: str = ""
    pooling: Pooling | None = None
    dimensions: int | None = None
    normalize: bool = True
    cache_salt: str = ""


class FinishKind(enum.Enum):
    """Why an answer ended. Failures are no finish: they raise."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORTED = enum.auto()


@dataclass(frozen=True, slots=True)
class DoorFinish:
    """End of one answer; at most one of the matches is set, and none if a constraint was complete.

    Attributes:
        kind: why it ended.
        eos_token_id: end-of-sequence token of the model that ended it.
        stop_token_id: stop token of the request that ended it.
        stop_string: stop string of the request that ended it.
    """

    kind: FinishKind
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class DoorPrompt:
    """The first event of every request of which a token was computed; there is one, whatever `n` is.

    Attributes:
        token_ids: of the prompt.
        cached_tokens: number of them that came from the prefix cache.
        logprobs: of the prompt's tokens from `logprobs_start` on, if `prompt_logprobs` was given.
        logprobs_start: position of the first of them; at least 1, because the first token has none.
    """

    token_ids: Sequence[int]
    cached_tokens: int
    logprobs: Sequence[TokenLogprobs] = ()
    logprobs_start: int = 1


@dataclass(slots=True)
class DoorOutput:
    """New tokens and text of one answer.

    Attributes:
        index: of the answer, below `n`.
        token_ids: new tokens, with the one that ended the answer. Tokens behind a stop string are left out.
        text: new text, without the token that ended the answer and without a matched stop string, unless asked for.
            Text that may still become a stop string or part of a character comes with a later output.
        logprobs: one for each token, if `logprobs` was given.
        finish: the end of the answer, with its last output; None before.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: DoorFinish | None = None


DoorEvent: TypeAlias = DoorPrompt | DoorOutput


@dataclass(frozen=True, slots=True)
class DoorUsage:
    """Tokens of a request so far, summed over its answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class AbortResult(enum.Enum):
    """Effect of aborting a request by its id."""

    ABORTED = enum.auto()
    ALREADY_FINISHED = enum.auto()
    UNKNOWN = enum.auto()


class DoorState(enum.Enum):
    """State of the worker, as doors report it."""

    STARTING = enum.auto()
    READY = enum.auto()
    CORDONED = enum.auto()
    DRAINING = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class DoorLoad:
    """Load of the engine after its last step.

    Attributes:
        running_seqs: sequences in the engine's batch.
        decoding_seqs: sequences among them whose prompt is computed.
        waiting_seqs: sequences that wait for their first step.
        waiting_tokens: tokens to compute before every sequence decodes.
        used_blocks: KV blocks that sequences hold.
        total_blocks: all KV blocks.
        busy_s: duration of the current step so far; 0 when idle.
    """

    running_seqs: int = 0
    decoding_seqs: int = 0
    waiting_seqs: int = 0
    waiting_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    busy_s: float = 0.0
