"""Sampling parameters, validated and canonical.

Real numbers are rounded to float32 once, here, because they travel as proto `float`: 0.7 is not float32(0.7), and the
same request must sample the same tokens through gRPC and through LLMEngine (docs/explanation/determinism.md).
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from types import UnionType
from typing import Any, Final, TypeAlias, cast

from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from common.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from common.params.logprobs import LOGPROBS_KINDS, PROCESSED, RAW, LogprobLayout

_FLOAT32: Final = struct.Struct("<f")
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]
# Parameters that shape the distribution which tokens are drawn from.
DISTRIBUTION_FIELDS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def float32(value: float) -> float:
    """`value` rounded to the nearest float32; infinite when it is out of range."""
    try:
        return _FLOAT32.unpack(_FLOAT32.pack(value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, value)


def _shortest(value: float) -> str:
    """A number as whoever has sent it has written it: a float32 with no more digits than tell it from others."""
    if float32(value) != value:
        return str(value)
    return next(str(short) for digits in range(1, 18) if float32(short := float(f"{value:.{digits}g}")) == value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling: how tokens are chosen, when generation stops, and which logprobs are wanted.

    `logit_bias` is given as a mapping, and kept as pairs in order of their ids. `bad_words` are texts for those who
    have the tokenizer; the engine knows their `bad_words_token_ids`. Likewise `constraint`, also given as a mapping
    (`Constraint.of`), is for those who check it, and `grammar` (common/constraints/lark.py) for the engine.

    Raises:
        InvalidFieldError: a value is out of range; names the field and what would be valid.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: TokenSequences = ()
    n: int = 1
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: TokenSequences = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logprobs_kind: str = RAW
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 1
    num_drafts: int | None = None
    constraint: Constraint | None = None
    grammar: str = ""

    def __post_init__(self) -> None:
        for name, (valid, ok) in _REAL_RANGES.items():
            given = getattr(self, name)
            _require_kind(name, given, float, Real, valid)
            value = float32(given)
            if not ok(value):
                raise InvalidFieldError(f"sampling_params.{name}", f"is {_shortest(given)}", valid)
            object.__setattr__(self, name, value)
        for name, (low, high) in _INTEGER_RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            _require_kind(name, value, int, Integral, f"an integer from {low} to {high}")
            if not low <= int(value) <= high:
                raise InvalidFieldError(f"sampling_params.{name}", f"is {value}", f"an integer from {low} to {high}")
            if type(value) is not int:
                # An integer of numpy is none to arithmetic that mixes it with truth values, as the scheduler's does.
                object.__setattr__(self, name, int(value))
        for name in ("ignore_eos", "include_stop_string"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidFieldError(f"sampling_params.{name}", f"is {getattr(self, name)!r}", "true or false")
        for name, check in _LISTS.items():
            # Most requests have none of them.
            if (value := getattr(self, name)) != () or type(value) is not tuple:
                object.__setattr__(self, name, check(name, value))
        if self.logprobs is not None or self.prompt_logprobs is not None or self.logprob_token_ids:
            self._check_logprobs()
        if self.constraint is not None or self.grammar:
            self._check_constraint()

    def _check_constraint(self) -> None:
        if self.constraint is not None:
            object.__setattr__(self, "constraint", Constraint.of(self.constraint))
        if (size := len(self.grammar.encode())) > MAX_GRAMMAR_BYTES:
            valid = f"at most {MAX_GRAMMAR_BYTES} bytes of UTF-8"
            raise InvalidFieldError("sampling_params.grammar", f"has {size} bytes", valid)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                valid = f"an integer from 0 to {MAX_TOP_LOGPROBS}"
                _require_kind(name, count, int, Integral, valid)
                if not 0 <= count <= MAX_TOP_LOGPROBS:
                    raise InvalidFieldError(f"sampling_params.{name}", f"is {count}", valid)
        ids = _checked_ids("logprob_token_ids", self.logprob_token_ids)
        if len(ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidFieldError(
                "sampling_params.logprob_token_ids", f"has {len(ids)} entries", f"at most {MAX_LOGPROB_TOKEN_IDS}"
            )
        object.__setattr__(self, "logprob_token_ids", ids)
        if self.logprobs is None and self.prompt_logprobs is None:
            problem = "stands without logprobs"
            raise InvalidFieldError("sampling_params.logprob_token_ids", problem, "logprobs or prompt_logprobs")
        if self.logprobs_kind not in LOGPROBS_KINDS:
            valid = " or ".join(LOGPROBS_KINDS)
            raise InvalidFieldError("sampling_params.logprobs_kind", f"is {self.logprobs_kind!r}", valid)

    @property
    def logprob_layout(self) -> LogprobLayout:
        """Rows of the generated tokens' logprobs."""
        return LogprobLayout(self.logprobs or 0, len(self.logprob_token_ids))

    @property
    def prompt_logprob_layout(self) -> LogprobLayout:
        """Rows of the prompt's logprobs."""
        return LogprobLayout(self.prompt_logprobs or 0, len(self.logprob_token_ids))

    @property
    def without_given_logprobs(self) -> SamplingParams:
        """The parameters without logprobs of given tokens."""
        if self.prompt_logprobs is None:
            return self
        # Ids without any logprobs are refused.
        ids = self.logprob_token_ids if self.logprobs is not None else ()
        return replace(self, prompt_logprobs=None, prompt_logprobs_start=1, logprob_token_ids=ids)

    @property
    def wants_logprobs(self) -> bool:
        """True if any are wanted, of generated tokens or of the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def processes_logprobs(self) -> bool:
        """True if logprobs of generated tokens are of the distribution that they are drawn from."""
        return self.logprobs is not None and self.logprobs_kind == PROCESSED

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """True if tokens already there become less, or more, likely."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def steers(self) -> bool:
        """True if something changes the logits of every token: penalties, a bias or masks."""
        is_masked = self.bad_words_token_ids or self.allowed_token_ids or self.grammar
        return self.penalized or bool(self.logit_bias or is_masked)


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Values for absent parameters: the model's `generation_config.json`, else the defaults above.

    The sampling parameters that transformers and vLLM take from that file, but for its lengths. `do_sample` plays no
    part: a request that wants greedy says `temperature` 0. A value that is not valid is
    left out: a checkpoint's odd value must not fail every request.
    """
    params = SamplingParams()
    for name, kind in _OF_THE_MODEL.items():
        given: dict[str, Any] = {name: generation_config.get(name)}
        if isinstance(given[name], kind) and not isinstance(given[name], bool):
            with contextlib.suppress(InvalidFieldError):
                params = replace(params, **given)
    return params


_OF_THE_MODEL: dict[str, type | UnionType] = {
    "temperature": int | float,
    "top_k": int,
    "top_p": int | float,
    "min_p": int | float,
    "repetition_penalty": int | float,
}
_Range = tuple[str, Callable[[float], bool]]
# A comparison with NaN is false, so NaN is refused by every row.
_REAL_RANGES: dict[str, _Range] = {
    "temperature": ("a number from 0 (greedy) to 100", lambda v: 0.0 <= v <= 100.0),
    "top_p": ("a number above 0 and at most 1 (off)", lambda v: 0.0 < v <= 1.0),
    "min_p": ("a number from 0 (off) to 1", lambda v: 0.0 <= v <= 1.0),
    "repetition_penalty": ("a number above 0 and at most 100; 1 is off", lambda v: 0.0 < v <= 100.0),
    "presence_penalty": ("a number from -2 to 2; 0 is off", lambda v: -2.0 <= v <= 2.0),
    "frequency_penalty": ("a number from -2 to 2; 0 is off", lambda v: -2.0 <= v <= 2.0),
}
_INTEGER_RANGES = {
    "top_k": (0, UINT32_MAX),
    "seed": (0, UINT64_MAX),
    "max_tokens": (1, UINT32_MAX),
    "min_tokens": (0, UINT32_MAX),
    "n": (1, 128),
    "prompt_logprobs_start": (1, UINT32_MAX),
    "num_drafts": (0, UINT32_MAX),
}
_OPTIONAL: Final = frozenset({"seed", "num_drafts"})


def _require_kind(name: str, value: object, usual: type, kind: type, valid: str) -> None:
    """Refuses what is no `kind`; `usual` is the one of them that is found out fastest."""
    if type(value) is not usual and (isinstance(value, bool) or not isinstance(value, kind)):
        raise InvalidFieldError(f"sampling_params.{name}", f"is {value!r}", valid)


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidFieldError(f"sampling_params.{name}", f"is {value!r}", "a list")
    return tuple(value)


def _check_count(name: str, value: Sized, most: int) -> None:
    if len(value) > most:
        raise InvalidFieldError(f"sampling_params.{name}", f"has {len(value)} entries", f"at most {most}")


def _checked_ids(name: str, ids: Any) -> tuple[int, ...]:
    listed = _listed(name, ids)
    # Thousands of ids as they come of a proto take no look each.
    if set(map(type, listed)) <= {int} and min(listed, default=0) >= 0:
        return listed
    for i, token in enumerate(listed):
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise InvalidFieldError(f"sampling_params.{name}[{i}]", f"is {token!r}", "a token id")
    return tuple(map(int, listed))


def _checked_texts(name: str, texts: Sequence[str], most: int, most_bytes: int) -> tuple[str, ...]:
    path = f"sampling_params.{name}"
    if isinstance(texts, str):
        raise InvalidFieldError(path, "is one string", "a list of strings")
    for i, text in enumerate(_listed(name, texts)):
        if not isinstance(text, str):
            raise InvalidFieldError(f"{path}[{i}]", f"is {text!r}", "a string")
    _check_count(name, texts, most)
    for i, text in enumerate(texts):
        if not 1 <= len(text.encode("utf-8", "surrogatepass")) <= most_bytes:
            raise InvalidFieldError(f"{path}[{i}]", "is empty or too long", f"1 to {most_bytes} bytes of UTF-8")
    return tuple(texts)


def _few_ids(name: str, ids: Any, most: int) -> tuple[int, ...]:
    checked = _checked_ids(name, ids)
    _check_count(name, checked, most)
    return checked


def _checked_sequences(name: str, sequences: Any) -> TokenSequences:
    return tuple(_checked_ids(f"{name}[{i}]", ids) for i, ids in enumerate(_listed(name, sequences)))


def _checked_bad_words(name: str, sequences: Any) -> TokenSequences:
    checked = _checked_sequences(name, sequences)
    # Each word has two: alone, and behind a blank.
    _check_count(name, checked, 2 * MAX_BAD_WORDS)
    for i, ids in enumerate(checked):
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            valid = f"1 to {MAX_BAD_WORD_TOKENS} token ids"
            raise InvalidFieldError(f"sampling_params.{name}[{i}]", f"has {len(ids)} entries", valid)
    return checked


def _checked_bias(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    path = f"sampling_params.{name}"
    try:
        bias = dict(given)
    except (TypeError, ValueError):
        raise InvalidFieldError(path, f"is {given!r}", "token ids and what is added to their logits") from None
    _check_count(name, bias, MAX_LOGIT_BIASES)
    valid = f"a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
    _checked_ids(name, bias)
    for token, value in bias.items():
        _require_kind(f"{name}[{token}]", value, float, Real, valid)
        # A comparison with NaN is false.
        if not -MAX_LOGIT_BIAS <= float32(value) <= MAX_LOGIT_BIAS:
            raise InvalidFieldError(f"{path}[{token}]", f"is {_shortest(value)}", valid)
    return tuple(sorted((int(token), float32(value)) for token, value in bias.items()))


# Checks of lists, which give them in their canonical form.
_LISTS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "stop_strings": partial(_checked_texts, most=MAX_STOP_STRINGS, most_bytes=MAX_STOP_STRING_BYTES),
    "bad_words": partial(_checked_texts, most=MAX_BAD_WORDS, most_bytes=MAX_BAD_WORD_BYTES),
    "stop_token_ids": partial(_few_ids, most=MAX_STOP_TOKEN_IDS),
    "allowed_token_ids": partial(_few_ids, most=MAX_ALLOWED_TOKEN_IDS),
    "stop_token_sequences": _checked_sequences,
    "bad_words_token_ids": _checked_bad_words,
    "logit_bias": _checked_bias,
}
