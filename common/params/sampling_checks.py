"""Checks of single sampling parameters: each returns the canonical value, or names the field and what is valid.

Real numbers are rounded to float32 once, here, because they travel as proto `float`: 0.7 is not float32(0.7), and the
same request must sample the same tokens through gRPC and through LLMEngine (docs/explanation/determinism.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence, Sized
from numbers import Integral, Real
from typing import Any, Final, TypeAlias

from common.errors import InvalidFieldError
from common.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES

UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1
TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]
Check: TypeAlias = Callable[[str, Any], Any]
"""Takes the name and the value of a parameter; raises InvalidFieldError."""
_FLOAT32: Final = struct.Struct("<f")


def float32(value: float) -> float:
    """Rounds `value` to the nearest float32; infinite if it is out of range."""
    try:
        return _FLOAT32.unpack(_FLOAT32.pack(value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, value)


def _shortest(value: float) -> str:
    """Formats a number as its sender wrote it: a float32 with the fewest digits that tell it from others."""
    if float32(value) != value:
        return str(value)
    return next(str(short) for digits in range(1, 18) if float32(short := float(f"{value:.{digits}g}")) == value)


def real(valid: str, is_valid: Callable[[float], bool]) -> Check:
    """Makes the check of a real number.

    Args:
        valid: range in words.
        is_valid: compares a float32. It must be false for NaN, as comparisons are.
    """

    def check(name: str, given: Any) -> float:
        _require_kind(name, given, float, Real, valid)
        value = float32(given)
        if not is_valid(value):
            raise InvalidFieldError(f"sampling_params.{name}", f"is {_shortest(given)}", valid)
        return value

    return check


def integer(low: int, high: int) -> Check:
    """Makes the check of an integer in [low, high]."""
    valid = f"an integer from {low} to {high}"

    def check(name: str, value: Any) -> int:
        _require_kind(name, value, int, Integral, valid)
        if not low <= int(value) <= high:
            raise InvalidFieldError(f"sampling_params.{name}", f"is {value}", valid)
        # The scheduler mixes integers with truth values, which fails with integers of numpy.
        return int(value)

    return check


def flag(name: str, value: Any) -> Any:
    """Checks that a value is True or False."""
    if not isinstance(value, bool):
        raise InvalidFieldError(f"sampling_params.{name}", f"is {value!r}", "true or false")
    return value


def texts(most: int, most_bytes: int) -> Check:
    """Makes the check of a list of texts.

    Args:
        most: texts.
        most_bytes: bytes of each in UTF-8.
    """

    def check(name: str, given: Sequence[str]) -> tuple[str, ...]:
        path = f"sampling_params.{name}"
        if isinstance(given, str):
            raise InvalidFieldError(path, "is one string", "a list of strings")
        for i, text in enumerate(_listed(name, given)):
            if not isinstance(text, str):
                raise InvalidFieldError(f"{path}[{i}]", f"is {text!r}", "a string")
        _check_count(name, given, most)
        for i, text in enumerate(given):
            if not 1 <= len(text.encode("utf-8", "surrogatepass")) <= most_bytes:
                raise InvalidFieldError(f"{path}[{i}]", "is empty or too long", f"1 to {most_bytes} bytes of UTF-8")
        return tuple(given)

    return check


def token_ids(most: int) -> Check:
    """Makes the check of a list of at most `most` token ids."""

    def check(name: str, ids: Any) -> tuple[int, ...]:
        checked = _checked_ids(name, ids)
        _check_count(name, checked, most)
        return checked

    return check


def token_sequences(name: str, sequences: Any) -> TokenSequences:
    """Checks a list of lists of token ids."""
    return tuple(_checked_ids(f"{name}[{i}]", ids) for i, ids in enumerate(_listed(name, sequences)))


def bad_word_sequences(name: str, sequences: Any) -> TokenSequences:
    """Checks the token ids of bad words."""
    checked = token_sequences(name, sequences)
    # Each word has two sequences: alone, and after a blank.
    _check_count(name, checked, 2 * MAX_BAD_WORDS)
    for i, ids in enumerate(checked):
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            valid = f"1 to {MAX_BAD_WORD_TOKENS} token ids"
            raise InvalidFieldError(f"sampling_params.{name}[{i}]", f"has {len(ids)} entries", valid)
    return checked


def bias_pairs(name: str, given: Any) -> tuple[tuple[int, float], ...]:
    """Checks token ids with the number to add to the logit of each; returns pairs in the order of the ids."""
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


def _require_kind(name: str, value: object, usual: type, kind: type, valid: str) -> None:
    """Refuses a value that is not of `kind`; a value of type `usual` is recognized fastest."""
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
    # Fast for thousands of ids from a proto.
    if set(map(type, listed)) <= {int} and min(listed, default=0) >= 0:
        return listed
    for i, token in enumerate(listed):
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise InvalidFieldError(f"sampling_params.{name}[{i}]", f"is {token!r}", "a token id")
    return tuple(map(int, listed))
