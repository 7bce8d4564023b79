"""Texts that a pattern of a response template matches, as grammars write them.

A pattern says what is read as a delimiter; a grammar writes some of these texts. Alternatives and optional parts are
spelled out; characters that a pattern does not name become blanks, a word or digits, as far as it takes those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import regex

# What stands for characters that are not named, in texts for grammars.
BLANKS: Final = "{blanks}"
WORD: Final = "{word}"
DIGITS: Final = "{digits}"
# The text begins, or ends, here.
FIRST: Final = "{first}"
LAST: Final = "{last}"
MOST_TEXTS: Final = 64
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_SAMPLES: Final = _LETTERS + " \n:-.,;/<>[](){}\"'"
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_CLASSES: Final = frozenset("sSdDwW")
_ASSERTIONS: Final = {"A": FIRST, "Z": LAST, "z": LAST, "b": "", "B": ""}
_COUNTS: Final[Mapping[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COUNT: Final = regex.compile(r"\{(?=,?\d)(\d*)(,?)(\d*)\}")
_NAMED: Final = regex.compile(r"\?P?<([A-Za-z_]\w*)>")
# Groups that take no text: what they look for is found, or not, when the texts are tried.
_AROUND: Final = ("?=", "?!", "?<=", "?<!")


class PatternError(ValueError):
    """Texts of a pattern cannot be spelled out; names the construct."""


class _Class:
    """A character that the pattern does not name."""

    def __init__(self, source: str) -> None:
        self._pattern = regex.compile(source, regex.DOTALL)
        self._source = source

    def _takes(self, characters: str) -> bool:
        return all(self._pattern.fullmatch(each) for each in characters)

    def texts(self, least: int, most: int | None) -> list[str]:
        """The texts of so many of it."""
        is_blank = not any(map(self._takes, _LETTERS))
        if is_blank and self._takes(" \n"):
            return [" " * least + BLANKS] if most is None else self._of(" ", least, most)
        if least and most is None and self._takes(_LETTERS):
            return [WORD]
        if least and most is None and self._takes("0123456789"):
            return [DIGITS]
        sample = next(filter(self._takes, _SAMPLES), None)
        if sample is None:
            raise PatternError(f"{self._source!r}, which takes no common character")
        return self._of(sample, least, least if not is_blank or most is None else most)

    def _of(self, sample: str, least: int, most: int) -> list[str]:
        return [sample * count for count in range(min(most, least + 1), least - 1, -1)]


class _Reader:
    """Reads one pattern."""

    def __init__(self, pattern: str, holes: Mapping[str, str]) -> None:
        self._pattern = pattern
        self._holes = holes
        self._at = 0
        self.groups: dict[str, list[str]] = {}

    def read(self) -> list[str]:
        texts = self._alternatives()
        if self._at < len(self._pattern):
            raise PatternError(f"{self._pattern[self._at :]!r}")
        return texts

    def _sees(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternatives(self) -> list[str]:
        texts = self._sequence()
        while self._sees("|"):
            texts += self._sequence()
        return _bounded(dict.fromkeys(texts))

    def _sequence(self) -> list[str]:
        texts = [""]
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            texts = _bounded(a + b for a, b in product(texts, self._repeated(self._atom())))
        return texts

    def _repeated(self, atom: list[str] | _Class) -> list[str]:
        least, most = self._count()
        if isinstance(atom, _Class):
            return atom.texts(least, most)
        if len(atom) > 1 and least > 1:
            raise PatternError("a group that is repeated")
        once = [text * max(least, 1) for text in atom]
        return once if least else [*once, ""]

    def _count(self) -> tuple[int, int | None]:
        """Times that the last atom comes, at least and at most."""
        counts = next((counts for sign, counts in _COUNTS.items() if self._sees(sign)), None)
        match = None if counts else _COUNT.match(self._pattern, self._at)
        if match is not None:
            self._at = match.end()
            least = int(match[1] or 0)
            counts = (least, (int(match[3]) if match[3] else None) if match[2] else least)
        if counts is None:
            return 1, 1
        # Lazy or possessive.
        _ = self._sees("?") or self._sees("+")
        return counts

    def _atom(self) -> list[str] | _Class:
        char = self._pattern[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return self._set()
            case "\\":
                return self._escape()
            case ".":
                return _Class(".")
            case "^":
                return [FIRST]
            case "$":
                return [LAST]
            case "*" | "+" | "?":
                raise PatternError(f"{self._pattern[self._at - 1 :]!r}")
        return [char]

    def _group(self) -> list[str]:
        name, is_around = "", any(map(self._sees, _AROUND))
        if not is_around and (match := _NAMED.match(self._pattern, self._at)):
            self._at, name = match.end(), str(match[1])
        elif not is_around and self._pattern.startswith("?", self._at) and not self._sees("?:"):
            raise PatternError(f"'({self._pattern[self._at : self._at + 3]}'")
        start = self._at
        if name not in self._holes and not is_around:
            texts = self._alternatives()
        else:
            self._skip()
            texts = [self._holes.get(name, "")]
            if name:
                self.groups.setdefault(name, []).append(self._pattern[start : self._at])
        if not self._sees(")"):
            raise PatternError(f"{self._pattern[start:]!r}, which does not end")
        return texts

    def _skip(self) -> None:
        """Passes over a group of which no text is written."""
        depth, in_set = 0, False
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char == ")" and not in_set and not depth:
                break
            if not in_set and char in "()":
                depth += 1 if char == "(" else -1
            in_set = char == "[" or (in_set and char != "]")
            self._at += 2 if char == "\\" else 1

    def _set(self) -> _Class:
        start = self._at - 1
        _ = self._sees("^")
        _ = self._sees("]")
        while self._at < len(self._pattern) and self._pattern[self._at] != "]":
            self._at += 2 if self._pattern[self._at] == "\\" else 1
        self._at += 1
        try:
            return _Class(self._pattern[start : self._at])
        except regex.error:
            raise PatternError(f"{self._pattern[start : self._at]!r}") from None

    def _escape(self) -> list[str] | _Class:
        char = self._pattern[self._at]
        self._at += 1
        if char in _CLASSES:
            return _Class(f"\\{char}")
        if char in _ASSERTIONS:
            return [_ASSERTIONS[char]]
        if char in _CONTROLS or not char.isalnum():
            return [_CONTROLS.get(char, char)]
        raise PatternError(f"'\\{char}'")


def _bounded(texts: Iterable[str]) -> list[str]:
    made = []
    for text in texts:
        made.append(text)
        if len(made) > MOST_TEXTS:
            raise PatternError(f"more than {MOST_TEXTS} alternatives")
    return made


@dataclass(frozen=True, slots=True)
class Spelled:
    """Texts that a pattern matches.

    Attributes:
        texts: the fullest of optional parts first.
        groups: patterns of the named groups for which something else stands in the texts.
    """

    texts: list[str]
    groups: Mapping[str, list[str]] = field(default_factory=dict)


def spelled(pattern: str, holes: Mapping[str, str]) -> Spelled:
    """The texts that a pattern matches.

    Args:
        pattern: of a response template, that compiles.
        holes: what to write for named groups.

    Raises:
        PatternError: it has a construct whose texts are not known.
    """
    reader = _Reader(pattern, holes)
    return Spelled(reader.read(), reader.groups)
