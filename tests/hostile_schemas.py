r"""Random JSON Schemas from keywords that libraries interpret in different ways.

Escaped and odd names, expressions in which ECMA-262 and Rust differ, numbers that a double rounds, narrow bounds,
counts of properties, recursion and dead ends. Many are refused; for all others every answer must be valid.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

NAMES: Final = (
    "a", "b", "größe",
    'q"', "back\\slash", "x-a", "x y", "名前", "😀", "a/b", "a~b", "%41", "\x7f", "tab\t", "", "__proto__",
    "\x01", "é", "e\u0301",
)  # fmt: skip
PATTERNS: Final = (
    r'^[^"]{1,4}$', r"^[^\\]{1,4}$", r"^[^/\\]+$", r'^[^<>"]+$',
    r'[^ "]', r"^[a-z\x00-\x1f]{1,3}$", r'^[^"\t]+$', r"^.$",
    r"^.+$", r"^\s$", r"^\S{1,3}$", r"^[^\s]$", r"^[a-z&&[^b]$", r"^[^a&&b]$", r"^[^+--]$", r"^[!--]$", r"^[a~~b]$",
    r"^[[ab]$", r"^[\w&&\d]$", r"^\d+$", r"^\w{1,3}$", r"^\D$", r"^\W$", r"^[\D1]{2}$", r"^[^\d]$", r"^#.+$",
    r"^\/.*$",
    r"^(npm|pip)/.+$", r"^x-", r"^(a|b)$", r"^a$|^b$", r"", r"^$", r".*", r"^.*$", r"^\u{1F600}$", r"^\uD83D\uDE00?$",
    r"^[\u00e0-\u00ff]+$", r"^\p{L}{1,2}$", r"^\P{L}$", r"^[^\p{Lu}]$", r"^[\P{L}]{1,2}$", r"^a??b*?$",
    r"^(?<n>a|b){1,2}$", r"^[^]$",
    r"^[\b]$", r"^\cJ$", r"^\x41\u0042$", r"^\-\_$", r"^[\-a\]]$", r"^\t?\n?$", r"^\x01?$",
    r"^[\x00-\x7f]{1,2}$", r"^(?:a|)$", r"x{2,3}",
    # No expressions of ECMA-262, or none that is supported.
    "(?i)abc", "(?x)a b", "(?s).", "[[:alpha:]]", r"\Aa\z", "(?P<n>a)", "a++", "^}$", "a{,2}", "a(?=b)",
    r"(a)\1", r"\bx",
)  # fmt: skip
NUMBERS: Final = (
    0, 1, -1, 2, 5, 0.5, 0.25, 5.5, -0.47, 0.00001, 5.0000001, 1e-9, 2**53, 2**53 + 1, -(2**53) - 1, 2**60,
    2**63 - 1, -(2**63), 2**64,
    1234567890123456789, 1e22, 1e300, 0.1, 1.0, 0.12345678901234567, 16777217,
)  # fmt: skip
FORMATS: Final = ("email", "uri", "date", "time", "date-time", "hostname", "ipv4", "ipv6", "uuid", "duration")
DRAFTS: Final = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)

Make = Callable[[random.Random, int], dict[str, Any]]


def hostile_schema(rnd: random.Random) -> dict[str, Any]:
    made = _schema(rnd, 3)
    # Definitions that references name; they may refer back.
    made = {"$defs": {"p": _schema(rnd, 2), "q": _schema(rnd, 1)}, **made} if "$ref" in repr(made) else made
    if rnd.random() < 0.1:
        made = {"$schema": rnd.choice(DRAFTS), **made}
    if rnd.random() < 0.7:
        made["x-guidance"] = {"whitespace_flexible": False}
    return made


def _schema(rnd: random.Random, depth: int) -> dict[str, Any]:
    makes: list[Make] = [_text, _text, _number, _constant, _constant, _plain]
    if depth > 0:
        makes += [_object, _object, _object, _array, _combined, _combined, _reference]
    return rnd.choice(makes)(rnd, depth)


def _plain(rnd: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rnd.choice(("string", "integer", "boolean", "null"))}


def _text(rnd: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    if rnd.random() < 0.75:
        made["pattern"] = rnd.choice(PATTERNS)
    else:
        made["format"] = rnd.choice(FORMATS)
    if rnd.random() < 0.3:
        made["maxLength"] = rnd.randint(1, 30)
    return made


def _number(rnd: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": rnd.choice(("integer", "number"))}
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if rnd.random() < 0.4:
            made[name] = rnd.choice(NUMBERS)
    if rnd.random() < 0.2:
        made["multipleOf"] = rnd.choice((2, 3, 0.5, 0.01, 65537, 65539, 10**6))
    return made


def _constant(rnd: random.Random, depth: int) -> dict[str, Any]:
    values: tuple[Any, ...] = (*NUMBERS, *NAMES, None, True, [2**53 + 1], {"k": 2**60}, {"größe": 1})
    return {"const": rnd.choice(values)} if rnd.random() < 0.5 else {"enum": rnd.sample(values, rnd.randint(1, 4))}


def _object(rnd: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"} if rnd.random() < 0.9 else {}
    names = rnd.sample(NAMES, rnd.randint(0, 3))
    if names:
        made["properties"] = {name: rnd.choice((_schema(rnd, depth - 1), False, True)) for name in names}
        made["required"] = rnd.sample(names, rnd.randint(0, len(names)))
    if rnd.random() < 0.45:
        patterns = rnd.sample(PATTERNS, rnd.randint(1, 2))
        if rnd.random() < 0.3:
            patterns = ["^(?:" + "|".join(_spelled(name) for name in names or ["a"]) + ")$"]
        made["patternProperties"] = {each: rnd.choice((_schema(rnd, depth - 1), False)) for each in patterns}
    if rnd.random() < 0.6:
        made["additionalProperties"] = rnd.choice((False, False, True, {"type": "integer"}, _schema(rnd, depth - 1)))
    if rnd.random() < 0.2:
        made["minProperties"] = rnd.randint(0, 3)
    if rnd.random() < 0.2:
        made["maxProperties"] = rnd.randint(0, 3)
    return made


def _spelled(text: str) -> str:
    """A text as an expression."""
    return "".join(f"\\u{{{ord(sign):x}}}" for sign in text)


def _array(rnd: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "maxItems": rnd.randint(0, 3)}
    if rnd.random() < 0.7:
        made["items"] = rnd.choice((_schema(rnd, depth - 1), False))
    if rnd.random() < 0.3:
        made["prefixItems"] = [_schema(rnd, depth - 1)]
    if rnd.random() < 0.3:
        made["minItems"] = rnd.randint(0, 2)
    return made


def _combined(rnd: random.Random, depth: int) -> dict[str, Any]:
    how = rnd.choice(("allOf", "allOf", "anyOf", "oneOf"))
    if how == "allOf" and rnd.random() < 0.7:
        kind = rnd.choice((_object, _text, _number))
        made: dict[str, Any] = {how: [kind(rnd, depth - 1), kind(rnd, depth - 1)]}
        return {**kind(rnd, depth - 1), **made} if rnd.random() < 0.4 else made
    return {how: [_schema(rnd, depth - 1) for _ in range(rnd.randint(1, 3))]}


def _reference(rnd: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"$ref": rnd.choice(("#/$defs/p", "#/$defs/q", "#", "#/$defs/p"))}
    return {**_object(rnd, 0), **made} if rnd.random() < 0.2 else made
