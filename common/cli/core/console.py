"""The terminal of a supervisor: lines of several processes, an answer that streams, and a spinner, without mixing them.

Lines and the spinner go to standard error, the answer goes to standard output.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from common.cli.core.client import printable
from common.telemetry.output import in_order

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass(slots=True)
class TextStream:
    """An answer on standard output, each piece at once."""

    quiet: bool = False
    _open_line: bool = False
    _is_thinking: bool = False

    def think(self, text: str) -> None:
        """Prints the next piece of reasoning, dim, on a terminal alone: it is no part of the answer."""
        if text and not self.quiet and sys.stdout.isatty():
            in_order(sys.stderr)
            sys.stdout.write(_DIM + printable(text, terminal=True) + _NOT_DIM)
            sys.stdout.flush()
            self._open_line = self._is_thinking = True

    def write(self, text: str) -> None:
        """Prints the next piece."""
        if text and self._is_thinking:
            self._is_thinking = False
            self.end_line()
        if text and not self.quiet:
            in_order(sys.stderr)
            sys.stdout.write(printable(text, terminal=sys.stdout.isatty()))
            sys.stdout.flush()
            self._open_line = True

    def end_line(self) -> None:
        """Ends the last line when anything was printed, whether or not the answer is complete."""
        if self._open_line:
            self._open_line = False
            sys.stdout.write("\n")
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
        """Shows that something goes on. Nothing when standard error is no terminal."""
        if not self.terminal or self._kept is not None:
            return
        self._frame += 1
        sys.stderr.write(f"\r\x1b[K{_SPINNER[self._frame % len(_SPINNER)]} {text}")
        sys.stderr.flush()
        self._spinning = True

    def clear(self) -> None:
        """Takes the spinner away."""
        if self._spinning:
            sys.stderr.write("\r\x1b[K")
            self._spinning = False

    def begin_answer(self) -> None:
        """From here on lines are kept back."""
        self.clear()
        self._kept = []

    def answer(self, text: str) -> None:
        """Writes the next piece of an answer."""
        self._answer.write(text)

    def end_answer(self, figures: str = "") -> None:
        """Ends the answer's last line, writes its figures, then what was kept back."""
        self._answer.end_line()
        kept, self._kept = self._kept or [], None
        for text in [figures, *kept] if figures else kept:
            self.line(text)
