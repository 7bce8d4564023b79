"""Text that streams onto a terminal, broken between words. Pure.

Invariant: what is printed is only ever added to, and no line is wider than `width`. A word in the middle of a line is
held back until it is whole, or too long for the line; one at the beginning of a line is printed as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_TAB = 8


def _one_column(_: str) -> int:
    return 1


@dataclass(slots=True)
class WordWrap:
    """Breaks lines at blanks, and beside characters that take two columns, as Chinese is written without blanks.

    Attributes:
        width: columns of a line.
        columns_of: number of columns that a character takes.
    """

    width: int
    columns_of: Callable[[str], int] = _one_column
    _column: int = 0
    # What has not been printed: blanks, and the word behind them.
    _blanks: str = ""
    _word: str = ""
    _word_columns: int = 0
    # The word's beginning has been printed, at the beginning of a line.
    _is_begun: bool = False

    def feed(self, text: str) -> str:
        """Takes the next piece; returns what is to be printed now."""
        return "".join(map(self._take, text))

    def end(self) -> str:
        """Ends the text; returns what is left of it, after which a new line begins."""
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
        """Adds a character to the word."""
        if self._is_begun or not (self._column or self._blanks or self._word):
            self._is_begun = True
            return self._put(char, columns)
        self._word += char
        self._word_columns += columns
        if self._room() >= self._word_columns:
            return ""
        # Blanks where a line is broken are dropped.
        self._column, self._is_begun = 0, True
        return "\n" + self._put_word()

    def _end_word(self) -> str:
        """Prints what is left of the word, which fits into the line."""
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
        """Prints a character, in a new line where this one is full."""
        before = "\n" if self._column + columns > self.width and self._column else ""
        self._column = columns if before else self._column + columns
        return before + char

    def _room(self) -> int:
        """Columns that are left behind the blanks."""
        column = self._column
        for blank in self._blanks:
            column += _TAB - column % _TAB if blank == "\t" else 1
        return self.width - column
