"""A program in a pseudoterminal, and the screen that it draws with the control sequences of prompt_toolkit."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_CONTROL = re.compile(r"\x1b\[(?P<args>[?0-9;]*)(?P<kind>[A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07")


class Screen:
    """The characters of a terminal of fixed size."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._rest = ""
        self.is_alternate = False

    def text(self) -> str:
        """All lines without trailing blanks."""
        return "\n".join("".join(line).rstrip() for line in self._cells)

    def feed(self, text: str) -> None:
        """Draws what a program wrote."""
        text = self._rest + text
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _CONTROL.match(text, at)
                if found is None:
                    break
                self._obey(found["kind"] or "", found["args"] or "")
                at = found.end()
            else:
                self._put(text[at])
                at += 1
        self._rest = text[at:]

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row = min(self._rows - 1, self._row + 1)
        elif char == "\b":
            self._column = max(0, self._column - 1)
        elif char.isprintable():
            self._cells[self._row][min(self._column, self._columns - 1)] = char
            self._column += 1

    def _obey(self, kind: str, args: str) -> None:
        if kind in "hl" and args == "?1049":
            self.is_alternate = kind == "h"
        numbers = [int(part) for part in re.findall(r"\d+", args)]
        count = numbers[0] if numbers else 1
        if kind == "H":
            self._row, self._column = (numbers[0] - 1, numbers[1] - 1) if len(numbers) == 2 else (0, 0)
        elif kind in ("A", "B"):
            self._row = min(self._rows - 1, max(0, self._row + (count if kind == "B" else -count)))
        elif kind in ("C", "D"):
            self._column = min(self._columns, max(0, self._column + (count if kind == "C" else -count)))
        elif kind == "K":
            self._cells[self._row][self._column :] = [" "] * (self._columns - self._column)
        elif kind == "J":
            whole = numbers[:1] == [2]
            if not whole:
                self._obey("K", "")
            for row in range(0 if whole else self._row + 1, self._rows):
                self._cells[row] = [" "] * self._columns


class TerminalProgram:
    """A child process whose terminal is a pseudoterminal of 80 columns."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80, rows: int = 30
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.screen = Screen(columns, rows)
        self.child = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm"},
            start_new_session=True,
        )

    def press(self, keys: str) -> None:
        """Types keys."""
        os.write(self._master, keys.encode())

    def wait(self, condition: Callable[[str], object], within_s: float = 60.0) -> str:
        """Draws until the condition holds of the screen's text; returns that text."""
        end = time.monotonic() + within_s
        while not condition(self.screen.text()):
            assert time.monotonic() < end, self.screen.text()
            self._read()
        return self.screen.text()

    def ended(self, within_s: float = 60.0) -> int:
        """Waits for the end of the program; returns its exit code."""
        end = time.monotonic() + within_s
        while self.child.poll() is None:
            assert time.monotonic() < end, self.screen.text()
            self._read()
        self._read()
        return self.child.returncode

    def is_restored(self) -> bool:
        """True if the terminal has the modes and the screen that it had before the program."""
        return termios.tcgetattr(self._slave) == self.before and not self.screen.is_alternate

    def close(self) -> None:
        """Ends the program if it still runs."""
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self._slave)
        os.close(self._master)

    def _read(self) -> None:
        if select.select([self._master], [], [], 0.05)[0]:
            self.screen.feed(os.read(self._master, 65_536).decode(errors="replace"))
