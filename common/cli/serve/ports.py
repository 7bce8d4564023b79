"""Free TCP ports on loopback for processes that get theirs before they listen.

Between the choice of a port and the moment when the process listens, nobody holds the port itself. So each chosen port
is one locked byte of a file in the temporary folder, for the life of the choosing process: no two processes of a user
on one machine choose the same port, and the locks of one that dies are gone with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from common.cli.core.errors import CommandError

_LOOPBACK: Final = "127.0.0.1"
# Below those that systems give to outgoing connections: one might have a port before the child that is told it.
_PORTS: Final = range(20_000, 32_768)
# The system lets a process lock a byte again that it holds already.
_chosen: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Chooses different TCP ports on loopback that are unused and not chosen by another process.

    Raises:
        CommandError: there are not so many (exit code 1).
    """
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(free) == count:
            break
        if port not in _chosen and _is_free(port) and _claim(port):
            free.append(port)
    if len(free) < count:
        raise CommandError(f"fewer than {count} ports of {_PORTS.start} to {_PORTS.stop - 1} are free", 1)
    return free


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as tried:
        tried.bind((_LOOPBACK, port))
        return True
    return False


def _claim(port: int) -> bool:
    """Locks the port's byte. True if it is ours, or if locks cannot be used."""
    if (file := _locks()) is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except BlockingIOError:
            return False
        except OSError:
            pass
    _chosen.add(port)
    return True


@cache
def _locks() -> int | None:
    """Opens the file of locks until the end of the process; None if that fails."""
    path = Path(tempfile.gettempdir()) / f"fissile-ports-{os.getuid()}"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
