"""The terminal of a supervisor: lines of several processes, an answer that streams, and a spinner, without mixing them.

Lines and the spinner go to standard error, the answer goes to standard output.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from dataclasses import dataclass, field

from common.cli.core.client import printable
from common.cli.core.word_wrap import WordWrap
from common.telemetry.output import in_order

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
# Least columns of a line: a terminal may report fewer.
_LEAST_WIDTH = 20
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def fitted(text: str) -> str:
    """Breaks a line of figures to the width of the terminal on standard error; unchanged without a terminal."""
    if not sys.stderr.isatty():
        return text
    width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in text.splitlines())


@dataclass(slots=True)
class TextStream:
    """Prints an answer to standard output piece by piece, as it arrives.

    Attributes:
        quiet: True suppresses all output.
        wrap: breaks lines between words on a terminal; with None the terminal breaks lines, also within words.
    """

    quiet: bool = False
    wrap: WordWrap | None = None
    _open_line: bool = False
    _is_thinking: bool = False

    def think(self, text: str) -> None:
        """Prints the next piece of reasoning, dim, on a terminal alone: it is no part of the answer."""
        if text and not self.quiet and sys.stdout.isatty():
            self._open_line = self._is_thinking = True
            self._print(self._wrapped(printable(text, terminal=True)))

    def write(self, text: str) -> None:
        """Prints the next piece."""
        if text and self._is_thinking:
            self.end_line()
        if text and not self.quiet:
            self._open_line = True
            self._print(self._wrapped(printable(text, terminal=sys.stdout.isatty())))

    def end_line(self) -> None:
        """Ends the last line when anything was printed, whether or not the answer is complete."""
        if self._open_line:
            self._print(self.wrap.end() if self.wrap else "")
            self._open_line = self._is_thinking = False
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _wrapped(self, text: str) -> str:
        if self.wrap is None or not sys.stdout.isatty():
            return text
        # Asked for each piece: a window may be resized. A terminal that reports no width breaks lines itself.
        columns = os.get_terminal_size(sys.stdout.fileno()).columns
        self.wrap.width = columns or sys.maxsize
        return self.wrap.feed(text)

    def _print(self, text: str) -> None:
        if text:
            in_order(sys.stderr)
            sys.stdout.write(_DIM + text + _NOT_DIM if self._is_thinking else text)
            sys.stdout.flush()


@dataclass(slots=True)
class Console:
    """Writes lines, an answer, and a spinner on a terminal.

    Invariant: while an answer is open, lines are kept back; they follow when it is closed.
    """

    terminal: bool = field(default_factory=sys.stderr.isatty)
    _spinning: bool = False
    _frame: int = 0
    _kept: list[str] | None = None
    _answer: TextStream = field(default_factory=TextStream)

    def line(self, text: str) -> None:
        """Writes a line, or keeps it until the answer is complete."""
        if self._kept is not None:
            self._kept.append(text)
            return
        self.clear()
        in_order(sys.stdout)
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def spin(self, text: str) -> None:
        """Shows a spinner if standard error is a terminal."""
        if not self.terminal or self._kept is not None:
            return
        self._frame += 1
        sys.stderr.write(f"\r\x1b[K{_SPINNER[self._frame % len(_SPINNER)]} {text}")
        sys.stderr.flush()
        self._spinning = True

    def clear(self) -> None:
        """Removes the spinner."""
        if self._spinning:
            sys.stderr.write("\r\x1b[K")
            self._spinning = False

    def begin_answer(self) -> None:
        """Begins an answer; lines are kept until it ends."""
        self.clear()
        self._kept = []

    def answer(self, text: str) -> None:
        """Writes the next piece of an answer."""
        self._answer.write(text)

    def end_answer(self, figures: str = "") -> None:
        """Ends the answer's last line, writes its figures, then what was kept back."""
        self._answer.end_line()
        kept, self._kept = self._kept or [], None
        for text in [fitted(figures), *kept] if figures else kept:
            self.line(text)
