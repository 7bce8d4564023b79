"""Distinguishes tokens that stand for delimiters from the same text spelled with other tokens.

A model that quotes `<tool_call>` writes it with several tokens; a model that begins a call writes the one token.
Response templates see text alone. So a spelled delimiter gets a mark inside, which no delimiter matches. The mark is
removed later.
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
    """Marks the delimiters in one text that are spelled instead of written as their token.

    Args:
        markers: texts of the tokens; without any, all text passes.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = regex.compile("|".join(map(regex.escape, longest_first)) or "(?!)")
        self._reach = max(map(len, longest_first), default=1) - 1
        # Places of announced tokens that are still ahead, and the lengths of announced text and of text read so far.
        self._tokens: deque[int] = deque()
        self._announced = 0
        self._passed = 0
        self._tail = ""

    def announce(self, text: str, *, marker: str = "") -> None:
        """Announces text that `mark` will get; `marker` is the text at its end that one token stands for."""
        self._announced += len(text)
        if marker:
            self._tokens.append(self._announced - len(marker))

    def mark(self, text: str) -> str:
        """Returns the next piece of announced text, with a mark in each spelled delimiter that ends in it."""
        seen = self._tail + text
        start = self._passed - len(self._tail)
        self._passed += len(text)
        marked, at = [], len(self._tail)
        for match in self._pattern.finditer(seen, overlapped=True):
            if match.end() <= len(self._tail):
                continue
            if self._is_token(start + match.start()):
                continue
            # In front of the last character: earlier text was returned already.
            place = max(match.end() - 1, at)
            marked += [seen[at:place], MARK]
            at = place
        self._tail = seen[max(0, len(seen) - self._reach) :] if self._reach else ""
        return "".join([*marked, seen[at:]])

    def _is_token(self, place: int) -> bool:
        while self._tokens and self._tokens[0] < place:
            self._tokens.popleft()
        return bool(self._tokens) and self._tokens[0] == place
