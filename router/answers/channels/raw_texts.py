"""Expressions of the texts that schemas of strings allow, as they stand by themselves and not in JSON.

Grammars have schemas of JSON alone. Where an argument stands between tags, what its schema says of a string becomes
terminals of llguidance's Lark: each keyword one, all of them together by `&`.
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
# At most 60 characters, of host names 243, and never two hyphens in a row: bounds of their own would be too much work.
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
# Of JSON Schema's formats those of `common.constraints.formats`; some of their texts are left out as there.
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
# Of values that are no strings, as texts.
SCALARS: Final[Mapping[str, str]] = {
    "null": '"null"',
    "boolean": '("true" | "false")',
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/",
}
# Pieces of a pattern in which nothing is an anchor, and those that are looked for.
_PIECES: Final = regex.compile(
    r"(?P<escape>\\.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<sign>[()|^$])|(?P<other>.)", regex.DOTALL
)


class TextError(ValueError):
    """A keyword of a string cannot be held outside of JSON; says which and why."""


def expression(keywords: Mapping[str, Any]) -> list[str]:
    """Terminals that a string has to match all, by the keywords of one schema."""
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
    """A terminal of some texts."""
    return f"({' | '.join(map(quoted, texts))})"


def quoted(text: str) -> str:
    """A text as a terminal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def without(text: str) -> str:
    """A terminal of what does not have a text in it."""
    return rf"~/(.|\n)*{_escaped(text)}(.|\n)*/"


def _escaped(text: str) -> str:
    return str(regex.escape(text, special_only=True)).replace("/", r"\/").replace("\n", r"\n")


def found(pattern: str) -> str:
    """A terminal of the texts in which a pattern is found, as JSON Schema looks for it.

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
