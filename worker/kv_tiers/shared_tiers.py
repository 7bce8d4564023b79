"""Tiers that workers share: files in a folder, and a Redis server."""

from __future__ import annotations

import contextlib
import os
import secrets
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from common.errors import InvalidFieldError

# Part of the room that is left free when files are removed, so that it does not happen with each block.
_FREED_SHARE: Final = 8
_SUFFIX: Final = ".kv"
# A block that takes longer than this is computed sooner.
_TIMEOUT_S: Final = 1.0
_PREFIX: Final = b"fissile:kv:"


class FileTier:
    """One file for each value, least recently used first. Files appear whole: they are renamed into place.

    Args:
        folder: made with mode 0700 if it is missing.
        num_bytes: most bytes of all files together. Each worker that shares the folder may be beyond it by an eighth.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._most = num_bytes
        self._bytes = sum(size for _, size, _ in self._files())
        # Written since the files were counted: other workers write too.
        self._own = 0

    def get(self, name: bytes) -> bytes | None:
        """The value, None without one."""
        path = self._path(name)
        try:
            value = path.read_bytes()
        except FileNotFoundError:
            return None
        # A file of a read-only folder, or one that is removed just now, keeps its time.
        with contextlib.suppress(OSError):
            os.utime(path)
        return value

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        """Keeps a value, unless the name has one. Returns True.

        Raises:
            OSError: there is no room or no permission.
        """
        del parent
        path = self._path(name)
        if path.exists():
            return True
        if self._bytes + len(value) > self._most or self._own > self._most // _FREED_SHARE:
            self._make_room(len(value))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            part.write_bytes(value)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._bytes += len(value)
        self._own += len(value)
        return True

    def drop(self, name: bytes) -> None:
        """Forgets a value. Raises OSError."""
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Keeps the files for other workers."""

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / f"{text}{_SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of use, size and path of each file."""
        found = []
        for path in self._folder.glob(f"*/*{_SUFFIX}"):
            # Another worker may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _make_room(self, wanted: int) -> None:
        files = sorted(self._files())
        self._bytes, self._own = sum(size for _, size, _ in files), 0
        if self._bytes + wanted <= self._most:
            return
        for _, size, path in files:
            if self._bytes + wanted <= self._most - self._most // _FREED_SHARE:
                break
            path.unlink(missing_ok=True)
            self._bytes -= size


class RedisTier:
    """Values by name on a server, which alone decides how much it keeps (`maxmemory`, `maxmemory-policy`).

    Args:
        url: `redis://[user:password@]host:port/database`, or `rediss://` for TLS.

    Raises:
        InvalidFieldError: the URL names no host, or the package `redis` is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise InvalidFieldError("kv_tiers", "names a Redis without a host", "redis://HOST:PORT/DATABASE")
        if find_spec("redis") is None:
            raise InvalidFieldError("kv_tiers", "names a Redis", "other tiers: the package redis is not installed")
        self._client: Any = import_module("redis").Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, health_check_interval=0
        )

    def get(self, name: bytes) -> bytes | None:
        """The value, None without one. Raises the client's errors."""
        value = self._client.get(_PREFIX + name)
        return value if isinstance(value, bytes) else None

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        """Keeps a value; True. Raises the client's errors."""
        del parent
        self._client.set(_PREFIX + name, value)
        return True

    def drop(self, name: bytes) -> None:
        """Forgets a value. Raises the client's errors."""
        self._client.delete(_PREFIX + name)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()
