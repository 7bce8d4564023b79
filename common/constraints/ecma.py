r"""Rewrites ECMA-262 regular expressions (flag `u`) for llguidance, whose expressions are those of Rust's `regex`.

`pattern` and `patternProperties` of JSON Schema are ECMA-262. The two dialects read the same text differently: `.`,
`\s`, and `&&`, `--`, `~~` or `[` in a class. A rewritten expression has neither shorthand classes nor set operators,
so both dialects agree about it. A text that is not an ECMA-262 expression, or that cannot be rewritten, is refused by
name.

Identity escapes of ASCII punctuation (`\-`, `\_`) are taken as the character. Flag `u` forbids them, but many published
schemas have them, and every validator that takes them agrees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NoReturn

Ranges = list[tuple[int, int]]

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
_SYNTAX: Final = frozenset("^$\\.*+?()[]{}|/")
_DIGITS: Final[Ranges] = [(0x30, 0x39)]
_WORD: Final[Ranges] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_LINE_ENDS: Final[Ranges] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_SPACES: Final[Ranges] = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_SHORTHANDS: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACES}
_CONTROLS: Final = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_HEX: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,8})\}")
_LOW_HALF: Final = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_LETTER: Final = re.compile("[A-Za-z]")
_QUANTIFIER: Final = re.compile(r"[*+?]|\{([0-9]{1,9})(,([0-9]{0,9}))?\}")
_GROUP: Final = re.compile(r"\(\?:|\(\?<(?![=!])([^>]*)>|\((?!\?)")
_GROUP_NAME: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_PROPERTY: Final = re.compile(r"([pP])\{([A-Za-z0-9_=]*)\}")
# Names of Unicode properties that both dialects have. Rust matches names loosely, ECMA-262 does not.
_CATEGORIES: Final = frozenset(
    {
        "C", "Other", "Cc", "Control", "Cf", "Format", "Co", "Private_Use", "L", "Letter", "LC", "Cased_Letter",
        "Lu", "Uppercase_Letter", "Ll", "Lowercase_Letter", "Lt", "Titlecase_Letter", "Lm", "Modifier_Letter",
        "Lo", "Other_Letter", "M", "Mark", "Mn", "Nonspacing_Mark", "Mc", "Spacing_Mark", "Me",
        "Enclosing_Mark", "N", "Number", "Nd", "Decimal_Number", "Nl", "Letter_Number", "No", "Other_Number",
        "P", "Punctuation", "Pc", "Connector_Punctuation", "Pd", "Dash_Punctuation", "Ps", "Open_Punctuation",
        "Pe", "Close_Punctuation", "Pi", "Initial_Punctuation", "Pf", "Final_Punctuation", "Po",
        "Other_Punctuation", "S", "Symbol", "Sm", "Math_Symbol", "Sc", "Currency_Symbol", "Sk",
        "Modifier_Symbol", "So", "Other_Symbol", "Z", "Separator", "Zs", "Space_Separator", "Zl",
        "Line_Separator", "Zp", "Paragraph_Separator",
    }
)  # fmt: skip
_BINARY: Final = frozenset(["Alphabetic", "ASCII", "Any", "Lowercase", "Uppercase", "White_Space"])
_SCRIPT: Final = re.compile(r"(?:Script|sc|Script_Extensions|scx)=([A-Z][a-z]+(?:_[A-Z][a-z]+)*)")
_MOST_GROUPS: Final = 100
# Part of the rewritten form of a negated property.
UNASSIGNED: Final = r"\p{Cn}"

# If a class has all control characters, the library (llguidance 1.9.1) quotes it for JSON as if it also had the quote
# and the backslash. Without U+0000 it quotes every class exactly.
NUL: Final[Ranges] = [(0, 0)]
# Characters that JSON can only write as `\u` escapes.
UNSPELLABLE: Final[Ranges] = [(0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F)]


class ExpressionError(ValueError):
    """An expression cannot be rewritten; the message says why, and at which character."""


def rewritten(expression: str, without: Ranges = NUL) -> str:
    """Rewrites an ECMA-262 expression (flag `u`) for llguidance.

    Args:
        expression: as a schema has it.
        without: characters that no match may have. Classes lose them; a literal one is refused.

    Raises:
        ExpressionError: it is not an ECMA-262 expression, or has look-around, a back reference or a word boundary.
    """
    return _Rewriter(expression, without).rewritten()


class _Rewriter:
    def __init__(self, text: str, without: Ranges) -> None:
        self._text = text
        self._at = 0
        self._without = without
        self._out: list[str] = []
        self._names: set[str] = set()

    def rewritten(self) -> str:
        groups, repeatable = 0, False
        while self._at < len(self._text):
            sign = self._text[self._at]
            if sign in "*+?{":
                self._quantifier(repeatable)
                repeatable = False
                continue
            repeatable = sign not in "(|^$"
            if sign == "(":
                groups += 1
                self._group(groups)
            elif sign == ")":
                groups -= 1
                if groups < 0:
                    self._refuse("')' without '('")
                self._emit(1, ")")
            elif sign in "|^$":
                self._emit(1, sign)
            elif sign == ".":
                self._emit(1, self._class(_negated(_LINE_ENDS)))
            elif sign == "[":
                self._out.append(self._set())
            elif sign in "]}":
                self._refuse(f"{sign!r} without its beginning, which ECMA-262 wants as '\\{sign}'")
            elif sign == "\\":
                self._escape()
            else:
                self._emit(1, self._literal(ord(sign)))
        if groups:
            self._refuse("'(' without ')'")
        return "".join(self._out)

    def _emit(self, length: int, made: str) -> None:
        self._at += length
        self._out.append(made)

    def _refuse(self, what: str) -> NoReturn:
        raise ExpressionError(f"{what} (character {self._at + 1} of {self._text!r})"[:300])

    def _quantifier(self, repeatable: bool) -> None:
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            self._refuse("'{' that begins no quantifier, which ECMA-262 wants as '\\{'")
        if not repeatable:
            self._refuse(f"{found[0]!r} repeats nothing, or what is repeated already")
        if found[3] and int(found[1]) > int(found[3]):
            self._refuse(f"{found[0]!r} has its bounds in the wrong order")
        # Lazy quantifiers match the same texts.
        lazy = self._text[found.end() : found.end() + 1] == "?"
        self._emit(len(found[0]) + lazy, found[0])

    def _group(self, groups: int) -> None:
        found = _GROUP.match(self._text, self._at)
        if found is None:
            begun = self._text[self._at : self._at + 4]
            if begun[2:3] in ("=", "!") or begun[2:] in ("<=", "<!"):
                self._refuse("look-around is not supported")
            self._refuse(f"{begun!r} is no group of ECMA-262 that is supported: '(', '(?:' and '(?<name>' are")
        name = found[1]
        if name is not None and (_GROUP_NAME.fullmatch(name) is None or name in self._names):
            self._refuse(f"{name!r} is no name of a group, or has been used")
        if groups > _MOST_GROUPS:
            self._refuse(f"groups are nested too deeply: at most {_MOST_GROUPS} levels")
        self._names |= {name} if name is not None else set()
        self._emit(len(found[0]), "(?:")

    def _escape(self) -> None:
        sign = self._text[self._at + 1 : self._at + 2]
        if sign and sign in "bB":
            self._refuse(f"the word boundary '\\{sign}' is not supported")
        if sign == "k" or sign in tuple("123456789"):
            self._refuse("a back reference is not supported")
        if sign in ("p", "P"):
            self._out.append(self._of_items([], [self._property()], negated=False))
        elif sign and sign.lower() in _SHORTHANDS:
            self._emit(2, self._class(_shorthand(sign)))
        else:
            self._out.append(self._literal(self._escaped()))

    def _escaped(self, *, within: bool = False) -> int:
        """Reads the escape of one character."""
        sign = self._text[self._at + 1 : self._at + 2]
        if found := _HEX.match(self._text, self._at + 1):
            code = int(next(digits for digits in found.groups() if digits), 16)
            length = 1 + len(found[0])
            if found[2] and 0xD800 <= code <= 0xDBFF and (low := _LOW_HALF.match(self._text, found.end())):
                code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
                length += len(low[0])
            if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
                self._refuse(f"'\\{found[0]}' is no character")
        elif sign == "c" and _LETTER.match(self._text, self._at + 2):
            code, length = ord(self._text[self._at + 2]) % 32, 3
        elif sign == "0" and not self._text[self._at + 2 : self._at + 3].isdecimal():
            code, length = 0, 2
        elif sign in _CONTROLS:
            code, length = _CONTROLS[sign], 2
        elif within and sign == "b":
            code, length = 0x08, 2
        elif sign and sign.isascii() and not sign.isalnum() and sign.isprintable():
            code, length = ord(sign), 2
        else:
            self._refuse(f"'\\{sign}' is no escape of ECMA-262")
        self._at += length
        return code

    def _property(self) -> str:
        found = _PROPERTY.match(self._text, self._at + 1)
        name = found[2].removeprefix("General_Category=").removeprefix("gc=") if found else ""
        script = _SCRIPT.fullmatch(name)
        is_known = name in _CATEGORIES or script or (found and found[2] in _BINARY)
        if found is None or not is_known:
            self._refuse("this Unicode property is not supported")
        self._at += 1 + len(found[0])
        return f"\\{found[1]}{{{name}}}"

    def _set(self) -> str:
        """Reads a class in brackets."""
        start, self._at = self._at, self._at + 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: Ranges = []
        properties: list[str] = []
        while True:
            if self._at >= len(self._text):
                self._at = start
                self._refuse("'[' without ']'")
            if self._text[self._at] == "]":
                break
            first = self._item()
            is_range = self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("", "]")
            if is_range:
                self._at += 1
                first = self._range(first, self._item())
            if isinstance(first, str):
                properties.append(first)
            else:
                ranges += first
        self._at += 1
        return self._of_items(ranges, properties, negated=negated)

    def _item(self) -> Ranges | str:
        """Reads a character, a shorthand or a property in a class."""
        sign = self._text[self._at]
        if sign != "\\":
            self._at += 1
            return [(ord(sign), ord(sign))]
        kind = self._text[self._at + 1 : self._at + 2]
        if kind in ("p", "P"):
            return self._property()
        if kind and kind.lower() in _SHORTHANDS:
            self._at += 2
            return _shorthand(kind)
        code = self._escaped(within=True)
        return [(code, code)]

    def _range(self, first: Ranges | str, last: Ranges | str) -> Ranges:
        if not all(isinstance(end, list) and len(end) == 1 and end[0][0] == end[0][1] for end in (first, last)):
            self._refuse("a range of a class ends with more than a character")
        low, high = first[0][0], last[0][0]
        if not isinstance(low, int) or not isinstance(high, int) or low > high:
            self._refuse("a range of a class is in the wrong order")
        return [(low, high)]

    def _of_items(self, ranges: Ranges, properties: list[str], *, negated: bool) -> str:
        if not properties:
            return self._class(_negated(ranges) if negated else ranges)
        items = "".join(map(_written, _united(ranges))) + "".join(properties)
        without = "".join(map(_written, self._without))
        made = f"[{'^' * negated}{items}]"
        if negated or any(name.startswith("\\P") for name in properties):
            # Unassigned characters are left out: other versions of Unicode give them other properties.
            made = f"[{made}&&[^{UNASSIGNED}{without}]]"
        elif without:
            made = f"[{made}--[{without}]]"
        return made

    def _class(self, ranges: Iterable[tuple[int, int]]) -> str:
        kept = _less(_united(ranges), self._without)
        if not kept:
            self._refuse("a class without a character that JSON can have here")
        positive, negative = (
            f"[{mark}{''.join(map(_written, each))}]" for mark, each in (("", kept), ("^", _negated(kept)))
        )
        return min(positive, negative, key=len)

    def _literal(self, code: int) -> str:
        if any(low <= code <= high for low, high in self._without):
            self._refuse(f"U+{code:04X} cannot be generated here")
        sign = chr(code)
        if sign in _SYNTAX:
            return f"\\{sign}"
        return sign if sign.isprintable() else f"\\x{{{code:X}}}"


def _shorthand(sign: str) -> Ranges:
    known = _SHORTHANDS[sign.lower()]
    return known if sign.islower() else _negated(known)


def _united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order that neither overlap nor touch."""
    made: Ranges = []
    for low, high in sorted(ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return made


def _negated(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Characters outside the ranges, without halves of surrogate pairs."""
    taken = _united([*ranges, _SURROGATES])
    edges = [-1, *(edge for low, high in taken for edge in (low, high)), _LAST + 1]
    return [(a + 1, b - 1) for i, (a, b) in enumerate(pairwise(edges)) if i % 2 == 0 and a + 1 <= b - 1]


def _less(ranges: Ranges, without: Ranges) -> Ranges:
    return _negated([*_negated(ranges), *without])


def _written(part: tuple[int, int]) -> str:
    low, high = map(_in_class, part)
    return low if part[0] == part[1] else f"{low}-{high}"


def _in_class(code: int) -> str:
    sign = chr(code)
    return sign if sign.isalnum() and sign.isascii() else f"\\x{{{code:X}}}"
