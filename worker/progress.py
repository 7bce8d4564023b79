"""Progress until the worker serves: one updating line on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

import structlog

log = structlog.get_logger(__name__)

_LINE_INTERVAL_S: Final = 0.1
_LOG_INTERVAL_S: Final = 2.0
_MIB: Final = 1 << 20


class StartProgress:
    """Reports the progress of the start. Called on the engine thread only.

    Args:
        stream: where the updating line goes if it is a terminal; default stderr.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._interval_s = _LINE_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S
        self._shown = clock()
        self._has_line = False

    def stage(self, name: str) -> None:
        """Begins a stage."""
        self._clear()
        log.info("starting", stage=name)
        self._shown = self._clock()

    def bytes(self, done: int, total: int) -> None:
        """Reports bytes of the stage: `done` of `total`."""
        percent = 100 * done // max(1, total)
        if self._is_due():
            self._show(f"{percent:3} % of {total // _MIB} MiB", "loading", percent=percent, total_mib=total // _MIB)

    def count(self, done: int, total: int) -> None:
        """Reports items of the stage: `done` of `total`."""
        if self._is_due():
            self._show(f"{done} of {total}", "progress", done=done, total=total)

    def _is_due(self) -> bool:
        now = self._clock()
        if now - self._shown < self._interval_s:
            return False
        self._shown = now
        return True

    def _show(self, line: str, event: str, **facts: int) -> None:
        if self._is_terminal:
            self._has_line = True
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
        else:
            log.info(event, **facts)

    def done(self) -> None:
        """Ends the last stage, successful or not."""
        self._clear()

    def _clear(self) -> None:
        if self._has_line:
            self._has_line = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class Silence(StartProgress):
    """Reports nothing, for an engine in a user's own program."""

    def stage(self, name: str) -> None:
        """Does nothing."""

    def bytes(self, done: int, total: int) -> None:
        """Does nothing."""

    def count(self, done: int, total: int) -> None:
        """Does nothing."""
