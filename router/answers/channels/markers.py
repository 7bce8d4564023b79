"""Tokens that stand for delimiters, told from the same text spelled out of other tokens.

A model that quotes `<tool_call>` writes it as text, with several tokens; one that begins a call writes the token.
Templates see text alone, so what is only spelled gets a mark inside, with which no delimiter matches, and which is
taken out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import regex

# A noncharacter: reserved by Unicode for use inside a program.
MARK: Final = "\ufdd2"
UNMARKED: Final = {ord(MARK): None}


class SpelledMarkers:
    """Marks delimiters in one text that no token of their own stands for.

    Args:
        markers: texts of the tokens; none lets everything pass.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = regex.compile("|".join(map(regex.escape, longest_first)) or "(?!)")
        self._reach = max(map(len, longest_first), default=1) - 1
        # Places of tokens that have not come by, and how much text has been announced, and has come by.
        self._tokens: deque[int] = deque()
        self._announced = 0
        self._passed = 0
        self._tail = ""

    def announce(self, text: str, *, marker: str = "") -> None:
        """Says that `text` will come by, and that a token stands for the marker at its end."""
        self._announced += len(text)
        if marker:
            self._tokens.append(self._announced - len(marker))

    def mark(self, text: str) -> str:
        """The next piece of the text, announced before, with a mark in each spelled delimiter that ends in it."""
        seen = self._tail + text
        start = self._passed - len(self._tail)
        self._passed += len(text)
        marked, at = [], len(self._tail)
        for match in self._pattern.finditer(seen, overlapped=True):
            if match.end() <= len(self._tail):
                continue
            if self._is_token(start + match.start()):
                continue
            # Before its last character: what came by already stays as it is.
            place = max(match.end() - 1, at)
            marked += [seen[at:place], MARK]
            at = place
        self._tail = seen[max(0, len(seen) - self._reach) :] if self._reach else ""
        return "".join([*marked, seen[at:]])

    def _is_token(self, place: int) -> bool:
        while self._tokens and self._tokens[0] < place:
            self._tokens.popleft()
        return bool(self._tokens) and self._tokens[0] == place
