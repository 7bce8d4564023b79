"""Reads files that others provide: refuses devices and named pipes, and bounds size and nesting."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

_PIECE: Final = 1 << 20


class UnreadableFileError(Exception):
    """A file cannot be read; one line with its path that says why."""


def read_file(path: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file, or of a pipe that the shell has made (`<(command)`).

    A device has no end, and a named pipe waits for a writer for ever.

    Raises:
        UnreadableFileError: it is absent or of another kind, or has more than `max_bytes`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        _check_kind(path, descriptor)
        os.set_blocking(descriptor, True)
        return _read(path, descriptor, max_bytes)
    except OSError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def read_json_file(path: str | Path, max_bytes: int) -> Any:
    """The value of a JSON file.

    Raises:
        UnreadableFileError: see read_file; or it is not JSON, or nested too deeply.
    """
    try:
        return parse_json(read_file(path, max_bytes))
    except ValueError as error:
        raise UnreadableFileError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from None


def parse_json(data: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_regular(path: str | Path) -> bool:
    """True if the path is a regular file or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _check_kind(path: str | Path, descriptor: int) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return
    # A pipe without a name was made by the shell, which writes to it.
    if stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path)):
        return
    if stat.S_ISDIR(mode):
        raise UnreadableFileError(f"{path} cannot be read: Is a directory")
    raise UnreadableFileError(f"{path} cannot be read: it is not a regular file")


def _read(path: str | Path, descriptor: int, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    left = max_bytes + 1
    while left and (piece := os.read(descriptor, min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise UnreadableFileError(f"{path} cannot be read: it has more than {max_bytes} bytes")
    return b"".join(pieces)
