"""Translates string schemas to grammar terminals for raw text, outside of JSON.

Grammars support schemas for JSON only. For a string between tags, each keyword of its schema becomes a terminal of
llguidance's Lark, and all of them are combined with `&`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import regex

from common.constraints import ecma
from common.constraints.formats import INSTEAD
from common.constraints.library import lark_of_regex

ANY: Final = r"/(.|\n)*/"
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE: Final = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_COUNT: Final = "[0-9]{1,9}"
_OF_DAY: Final = f"({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DAYS: Final = f"({_COUNT}Y({_COUNT}M({_COUNT}D)?)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
# At most 60 characters (host names 243) without two hyphens in a row. Exact bounds would make the automaton too large.
_LABEL: Final = "[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,19}){0,2}"
_HOST: Final = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_IPV6: Final = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        *(f"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7)),
        f"({_GROUP}:){{1,7}}:",
        f":((:{_GROUP}){{1,7}}|:)",
    ]
)
_OF_PATH: Final = f"([A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_BEHIND_PATH: Final = rf"(\?{_OF_PATH}*)?(#{_OF_PATH}*)?"
_OF_HOST: Final = rf"\/\/{_HOST}(:[0-9]{{1,4}})?"
_NO_YEAR: Final = "~/0000(.|\\n)*/"
# The formats of `common.constraints.formats`; as there, some valid texts are not allowed.
FORMATS: Final[Mapping[str, str]] = {
    "date": f"/{_DATE}/ & {_NO_YEAR}",
    "time": f"/{_TIME}/",
    "date-time": f"/{_DATE}T{_TIME}/ & {_NO_YEAR}",
    "duration": f"/P({_DAYS}(T{_OF_DAY})?|T{_OF_DAY}|{_COUNT}W)/",
    "email": f"/{lark_of_regex(INSTEAD['email'].strip('^$'))}/",
    "hostname": f"/{_HOST}/",
    "ipv4": rf"/{_OCTET}(\.{_OCTET}){{3}}/",
    "ipv6": f"/{_IPV6}/",
    "uri": rf"/[A-Za-z][A-Za-z0-9+.-]*:({_OF_HOST}|({_OF_HOST})?((\/{_OF_PATH}+)+\/?|\/)){_BEHIND_PATH}/",
    "uuid": f"/{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}/",
}
# Raw texts of values that are not strings.
SCALARS: Final[Mapping[str, str]] = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
}
# Pieces of a pattern: escapes and sets, which contain no anchor, and signs, which may be one.
_PIECES: Final = regex.compile(
    r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<sign>[()|^$])|(?P<other>.)", regex.DOTALL
)


class TextError(ValueError):
    """A keyword cannot be held for raw text; the message says which and why."""


def expression(keywords: Mapping[str, Any]) -> list[str]:
    """Returns the terminals that a string has to match, one for each keyword of a schema."""
    return [*_expressions(keywords)]


def _expressions(keywords: Mapping[str, Any]) -> Iterator[str]:
    least, most = (_length(keywords, name) for name in ("minLength", "maxLength"))
    if least is not None or most is not None:
        yield rf"/(.|\n){{{least or 0},{'' if most is None else most}}}/"
    if "pattern" in keywords:
        yield found(str(keywords["pattern"]))
    if "format" in keywords:
        if keywords["format"] not in FORMATS:
            raise TextError(f"format {keywords['format']!r} is not supported between tags")
        yield f"({FORMATS[keywords['format']]})"


def _length(keywords: Mapping[str, Any], name: str) -> int | None:
    value = keywords.get(name)
    if value is not None and (not isinstance(value, int | float) or value < 0 or value != int(value)):
        raise TextError(f"{name!r} is not a length")
    return None if value is None else int(value)


def one_of(texts: Sequence[str]) -> str:
    """Returns a terminal that matches one of `texts`."""
    return f"({' | '.join(map(quoted, texts))})"


def quoted(text: str) -> str:
    """Returns a terminal that matches `text`."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def without(text: str) -> str:
    """Returns a terminal of all texts that do not contain `text`."""
    return rf"~/(.|\n)*{_escaped(text)}(.|\n)*/"


def _escaped(text: str) -> str:
    return str(regex.escape(text, special_only=True)).replace("/", r"\/").replace("\n", r"\n")


def found(pattern: str) -> str:
    """Returns a terminal of all texts in which JSON Schema finds `pattern`.

    Raises:
        TextError: the pattern has an anchor where a terminal cannot have one, or cannot be rewritten.
    """
    try:
        rewritten = ecma.rewritten(pattern, without=[])
    except ecma.ExpressionError as error:
        raise TextError(f"of its 'pattern', {error}") from None
    return f"({' | '.join(map(_alternative, _alternatives(rewritten)))})"


def _alternatives(pattern: str) -> Iterator[str]:
    depth, start = 0, 0
    for piece in _PIECES.finditer(pattern):
        sign = piece["sign"]
        depth += {"(": 1, ")": -1}.get(sign or "", 0)
        if sign == "|" and not depth:
            yield pattern[start : piece.start()]
            start = piece.end()
    yield pattern[start:]


def _alternative(pattern: str) -> str:
    pieces = [*_PIECES.finditer(pattern)]
    begins = bool(pieces) and pieces[0]["sign"] == "^"
    ends = len(pieces) > int(begins) and pieces[-1]["sign"] == "$"
    inner = pieces[int(begins) : len(pieces) - int(ends)]
    if any(piece["sign"] in ("^", "$") for piece in inner):
        raise TextError("'pattern' has an anchor within")
    body = "".join(piece[0] for piece in inner)
    around = [r"(.|\n)*" * (not begins), f"({lark_of_regex(body)})" if body else "", r"(.|\n)*" * (not ends)]
    return f"/{''.join(around)}/" if any(around) else '""'
