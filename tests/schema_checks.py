"""Random walks through the grammars of JSON Schemas, and two independent validators for the resulting answers.

Answers are read strictly: both values of a name that occurs twice count, and integers stay exact. Validators see the
request's own schema.
"""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final

import jsonschema
import jsonschema_rs
import referencing.exceptions

from common.constraints import library
from common.constraints.check import GrammarChecker
from common.constraints.forms import JSON_SCHEMA, Constraint
from common.errors import InvalidFieldError

_CLOSING: Final = frozenset('"]}0')
# Characters that were misread before: quotes, escapes, and characters on which dialects of expressions differ.
_HOSTILE: Final = frozenset('"\\u&-~[\r\t\x7f\x85\u2028\ufeff0.e,')
_PIECES: Final = re.compile(
    r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u\{[0-9A-Fa-f]+\}|\\u....|\\x..|\\c.|\\.|\[\^\]|\[\^?|\(\?<(?![=!])|.",
    re.DOTALL,
)
# Ranges for shorthands within brackets, negated ones too, so that Python's own shorthands are never used.
_IN_SET: Final = {
    r"\d": "0-9",
    r"\D": r"\x00-/:-\U0010ffff",
    r"\w": "0-9A-Z_a-z",
    r"\W": r"\x00-/:-@\[-\^`{-\U0010ffff",
    r"\s": r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
    r"\S": r"\x00-\x08\x0e-\x1f!-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e\u2060-\u2fff"
    r"\u3001-\ufefe\uff00-\U0010ffff",
    "[": r"\[", "&": r"\&", "~": r"\~", "|": r"\|",
}  # fmt: skip
_ALONE: Final = {
    **{name: f"[{_IN_SET[name]}]" for name in (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S")},
    ".": r"[^\n\r\u2028\u2029]", "$": r"\Z", "[^]": r"[\s\S]", "(?<": "(?P<", r"\0": r"\x00",
}  # fmt: skip
_extend: Final[Any] = jsonschema.validators.extend
_CHECKER: Final = GrammarChecker({}, {256})


def grammar_of(schema: Any) -> str | None:
    """The grammar that a router makes of a schema; None if it refuses it."""
    try:
        return _CHECKER.check(Constraint(JSON_SCHEMA, (json.dumps(schema),)), optional_space=False)
    except InvalidFieldError:
        return None


def faults(schema: Any, walks: Iterator[Walk]) -> Iterator[str]:
    """Faults of walks through a schema's grammar: answers that a validator refuses, and dead ends."""
    judges = Judges(schema)
    for walk in walks:
        if walk.end == "dead":
            yield f"nothing can follow {walk.text!r}: {schema}"
        for value in readings(walk.text) if walk.end == "whole" else ():
            if by := judges.refused_by(value):
                yield f"{by} refuses {walk.text!r}: {schema}"


@dataclass(frozen=True, slots=True)
class Walk:
    """A random path through a grammar.

    Attributes:
        text: bytes of the chosen tokens.
        end: "whole" where the grammar may end, "cut" where the walk was too long, "spent" where a mask reached
            its bound of work, "dead" where nothing can follow.
    """

    text: bytes
    end: str


class Walker:
    """Walks through grammars by the masks of a vocabulary.

    Args:
        compiled: compiles a grammar as a worker does.
        tokens: bytes of each token; None for tokens without text.
        end: the token of the end.
    """

    def __init__(self, compiled: Callable[[str], library.Matcher], tokens: list[bytes | None], end: int) -> None:
        self._compiled = compiled
        self._tokens = tokens
        self._end = end
        self._by_kind = {kind: self._with(signs) for kind, signs in (("closing", _CLOSING), ("hostile", _HOSTILE))}
        self._blank = {i for i, text in enumerate(tokens) if text is not None and not text.strip(b" \n")}

    def _with(self, signs: frozenset[str]) -> set[int]:
        wanted = {sign.encode() for sign in signs} | {sign.encode()[:1] for sign in signs}
        return {i for i, text in enumerate(self._tokens) if text in wanted}

    def walks(self, grammar: str, rnd: random.Random, count: int, most: int = 300) -> Iterator[Walk]:
        """Random walks through a grammar; one third prefer closing signs, one third hostile ones."""
        start = self._compiled(grammar)
        assert not start.is_error(), start.get_error()
        for i in range(count):
            yield self._walk(start.deep_copy(), rnd, most, ("closing", "hostile", "any")[i % 3])

    def _walk(self, matcher: library.Matcher, rnd: random.Random, most: int, kind: str) -> Walk:
        text = bytearray()
        for steps in range(most):
            if matcher.is_stopped():
                return Walk(bytes(text), "dead" if matcher.is_error() else "whole")
            mask = matcher.compute_logit_bias()
            allowed = [token for token, value in enumerate(mask) if value]
            if matcher.is_error() or not allowed:
                is_spent = "too many" in matcher.get_error() or "fuel" in matcher.get_error()
                return Walk(bytes(text), "spent" if is_spent else "dead")
            if self._end in allowed and (rnd.random() < 0.5 or len(allowed) == 1):
                return Walk(bytes(text), "whole")
            # In its second half, every walk tries to end.
            wanted = self._by_kind["closing"] if steps > most // 2 else self._by_kind.get(kind, set())
            some = [token for token in allowed if token in wanted] if rnd.random() < 0.6 else []
            some = some or [token for token in allowed if token not in self._blank and token != self._end]
            token = rnd.choice(some or [token for token in allowed if token != self._end])
            text += self._tokens[token] or b""
            matcher.consume_token(token)
        return Walk(bytes(text), "cut")


def byte_walker() -> Walker:
    """A walker by single bytes."""
    vocab = library.byte_vocabulary({}, {256})
    tokens: list[bytes | None] = [bytes([value]) for value in range(256)]
    return Walker(lambda grammar: library.compiled(grammar, vocab, library.RUNNING), [*tokens, None], 256)


def readings(text: bytes) -> list[Any]:
    """Values that parsers may read from an answer: the first or the last value of a name that occurs twice.

    Raises:
        ValueError: it is no JSON.
    """
    last = json.loads(text, parse_constant=_refuse)
    first = json.loads(text, parse_constant=_refuse, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    return [last, first]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class Judges:
    """Both validators for one schema, formats included."""

    def __init__(self, schema: Any) -> None:
        draft_4 = any(isinstance(each, bool) for each in _exclusive(schema))
        plain = _without_dialect(schema)
        own_class = jsonschema.Draft4Validator if draft_4 else jsonschema.Draft202012Validator
        of_rust = jsonschema_rs.Draft4Validator if draft_4 else jsonschema_rs.Draft202012Validator
        self._first = _extend(own_class, _OWN)(plain, format_checker=own_class.FORMAT_CHECKER)
        try:
            self._second: Any = of_rust(plain, validate_formats=True)
        # It does not support all schemas and expressions.
        except (ValueError, jsonschema_rs.ReferencingError):
            self._second = None

    def refused_by(self, value: Any) -> str:
        """Name of a validator that refuses a value; empty for none."""
        try:
            if not self._first.is_valid(value):
                return "jsonschema"
        # It does not resolve all references, and knows no properties of Unicode.
        except (re.error, referencing.exceptions.Unresolvable, RecursionError):
            pass
        try:
            if self._second is not None and not _has_infinity(value) and not self._second.is_valid(value):
                return "jsonschema-rs"
        # It cannot read all integers.
        except ValueError:
            pass
        return ""


def _has_infinity(value: Any) -> bool:
    """True for numbers that no double has, such as 1e999."""
    if isinstance(value, dict | list):
        return any(map(_has_infinity, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isinf(value)


def _pattern(validator: Any, pattern: str, instance: object, schema: object) -> Iterator[Any]:
    """`pattern` as ECMA-262 reads it."""
    if isinstance(instance, str) and not of_python(pattern).search(instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: object, schema: object) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for name in filter(of_python(pattern).search, instance):
                yield from validator.descend(instance[name], inner)


def _additional_properties(validator: Any, inner: Any, instance: object, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        patterns = [of_python(pattern) for pattern in schema.get("patternProperties", {})]
        for name in instance.keys() - schema.get("properties", {}).keys():
            if not any(pattern.search(name) for pattern in patterns):
                yield from validator.descend(instance[name], inner)


@cache
def of_python(pattern: str) -> re.Pattern[str]:
    """An expression of ECMA-262 for Python's `re`, which has no properties of Unicode.

    Raises:
        re.error: it is no expression.
    """
    made, in_set = [], False
    for piece in _PIECES.findall(pattern):
        if in_set:
            in_set = piece != "]"
            made.append(_IN_SET.get(piece) or _character(piece))
        else:
            in_set = piece in ("[", "[^")
            made.append(_ALONE.get(piece) or _character(piece))
    with warnings.catch_warnings():
        # Python announces set operations, which it does not have yet.
        warnings.simplefilter("ignore", FutureWarning)
        return re.compile("".join(made))


def _character(piece: str) -> str:
    """A piece of an expression, with the character that it spells out."""
    digits = re.findall(r"[0-9A-Fa-f]+", piece) if re.match(r"\\[ux]", piece) else []
    if len(digits) == 2:
        high, low = (int(half, 16) for half in digits)
        return re.escape(chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)))
    if digits:
        return re.escape(chr(int(digits[0], 16)))
    if piece.startswith("\\c"):
        return re.escape(chr(ord(piece[2]) % 32))
    return f"\\{piece[1]}" if piece in (r"\-", r"\_", r"\/") else piece


def _multiple_of(validator: Any, step: Any, instance: object, schema: object) -> Iterator[Any]:
    is_number = isinstance(instance, int | float) and not isinstance(instance, bool)
    if is_number and (_has_infinity(instance) or Fraction(str(instance)) % Fraction(str(step))):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {step!r}")


_OWN: Final = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
}


def _exclusive(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        yield from (value for name, value in schema.items() if name in ("exclusiveMinimum", "exclusiveMaximum"))
        for value in schema.values():
            yield from _exclusive(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _exclusive(value)


def _without_dialect(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            name: _without_dialect(value)
            for name, value in schema.items()
            if not (name == "$schema" and isinstance(value, str))
        }
    return [_without_dialect(value) for value in schema] if isinstance(schema, list) else schema
