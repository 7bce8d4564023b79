"""Breaks streamed text between words, for a terminal. Pure.

Invariants: printed text never changes, and no line is wider than `width`. A word within a line is held back until it is
complete, or too long for the line. A word at the beginning of a line is printed character by character.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_TAB = 8


def _one_column(_: str) -> int:
    return 1


@dataclass(slots=True)
class WordWrap:
    """Breaks lines at blanks and next to characters of two columns: Chinese, for example, has no blanks.

    Attributes:
        width: columns of a line.
        columns_of: number of columns that a character takes.
    """

    width: int
    columns_of: Callable[[str], int] = _one_column
    _column: int = 0
    # Text held back: blanks, and the word after them.
    _blanks: str = ""
    _word: str = ""
    _word_columns: int = 0
    # True if the current word began a line, so that each of its characters is printed at once.
    _is_begun: bool = False

    def feed(self, text: str) -> str:
        """Adds the next piece of text; returns the text to print now."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """Ends the text; returns the rest to print, after which the caller starts a new line."""
        rest = self._end_word() + self._blanks
        self._blanks, self._column = "", 0
        return rest

    def _take(self, char: str) -> str:
        if char == "\n":
            printed = self._end_word() + "\n"
            self._blanks, self._column = "", 0
            return printed
        if char in " \t":
            printed = self._end_word()
            self._blanks += char
            return printed
        columns = self.columns_of(char)
        if columns > 1:
            return self._end_word() + self._add(char, columns) + self._end_word()
        return self._add(char, columns)

    def _add(self, char: str, columns: int) -> str:
        """Adds a character to the current word; returns the text to print now."""
        if self._is_begun or not (self._column or self._blanks or self._word):
            self._is_begun = True
            return self._put(char, columns)
        self._word += char
        self._word_columns += columns
        if self._room() >= self._word_columns:
            return ""
        # The line is broken here, and its trailing blanks are dropped.
        self._column, self._is_begun = 0, True
        return "\n" + self._put_word()

    def _end_word(self) -> str:
        """Ends the current word; returns its held-back text, which fits into the line."""
        printed = ""
        if self._word:
            self._column = self.width - self._room()
            printed = self._blanks + self._put_word()
        self._is_begun = False
        return printed

    def _put_word(self) -> str:
        word, self._word, self._blanks, self._word_columns = self._word, "", "", 0
        return "".join(self._put(char, self.columns_of(char)) for char in word)

    def _put(self, char: str, columns: int) -> str:
        """Returns a character to print, after a line break if the line is full."""
        before = "\n" if self._column + columns > self.width and self._column else ""
        self._column = columns if before else self._column + columns
        return before + char

    def _room(self) -> int:
        """Columns left in the line after the held-back blanks."""
        column = self._column
        for blank in self._blanks:
            column += _TAB - column % _TAB if blank == "\t" else 1
        return self.width - column
