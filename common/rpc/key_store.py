"""The API keys of a server, from its options and from a file that is read again when it changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from common.files import UnreadableFileError, read_file
from common.limits import KEY_FILE_LOOK_S, MAX_KEY_FILE_BYTES
from common.rpc.api_keys import ApiKey, KeyFileError, KeyRing, parse_keys

log = structlog.get_logger(__name__)

# Longest time that a call waits for a check of the file. The file is checked once in KEY_FILE_LOOK_S.
_READ_S = 0.02


class KeyStore:
    """The API keys in force. A key file that cannot be used is logged once and leaves the keys as they were.

    Args:
        file: one key a line; None without a file.
        lines: further keys.
        clock: monotonic seconds.

    Raises:
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self, file: Path | None, lines: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._lines = tuple(lines)
        self._clock = clock
        self._looked = clock()
        self._reader: threading.Thread | None = None
        self._state = self._file_state()
        self._ring = KeyRing(self._read())

    def ring(self) -> KeyRing:
        """The keys; checks the file at most every KEY_FILE_LOOK_S seconds."""
        now = self._clock()
        if now - self._looked >= KEY_FILE_LOOK_S and (self._reader is None or not self._reader.is_alive()):
            self._looked = now
            # A thread, because reading from a dead mount never returns. A live mount answers before the event loop
            # would notice.
            self._reader = threading.Thread(target=self._follow, name="API keys", daemon=True)
            self._reader.start()
            self._reader.join(_READ_S)
        return self._ring

    def _follow(self) -> None:
        state = self._file_state()
        if state == self._state:
            return
        self._state = state
        try:
            self._ring = KeyRing(self._read())
        except KeyFileError as error:
            log.warning("API keys not reloaded, the previous ones stay in use", why=str(error))
        else:
            log.info("API keys reloaded", keys=len(self._ring))

    def _file_state(self) -> tuple[int, int, int] | None:
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)

    def _read(self) -> list[ApiKey]:
        lines = list(self._lines)
        if self._file is None:
            return parse_keys(lines, "--api-key-line")
        try:
            content = read_file(self._file, MAX_KEY_FILE_BYTES).decode("utf-8")
        except UnreadableFileError as error:
            raise KeyFileError(str(error)) from None
        except UnicodeDecodeError:
            raise KeyFileError(f"{self._file} cannot be read: it is not UTF-8") from None
        # The file's keys come first, so that line numbers in errors are right.
        return parse_keys([*content.splitlines(), *lines], str(self._file))
