"""3,000 random requests over files and over a real Redis server that hangs, dies and returns: no token changes."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.checkpoints import make_checkpoint
from tests.e2e.service import running_service
from tests.e2e.tier_storm import OPTIONS, REQUESTS, ROUTER_OPTIONS, check_counts, storm
from tests.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


class Files:
    """The folder of a file tier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, name: bytes) -> Path:
        return self.folder / name.hex()[:2] / f"{name.hex()}.kv"

    def names(self) -> set[bytes]:
        return {bytes.fromhex(path.stem) for path in self.folder.glob("*/*.kv")}

    def read(self, name: bytes) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._path(name).read_bytes()
        return None

    def replace(self, name: bytes, value: bytes) -> None:
        part = self._path(name).with_suffix(".test")
        part.write_bytes(value)
        part.replace(self._path(name))


class Redis:
    """The database of a Redis tier."""

    def __init__(self, port: int) -> None:
        self.client: Any = redis.Redis(port=port, socket_timeout=5, socket_connect_timeout=5)
        self.prefix = b"fissile:kv:"

    def names(self) -> set[bytes]:
        return {key.removeprefix(self.prefix) for key in self.client.keys(self.prefix + b"*")}

    def read(self, name: bytes) -> bytes | None:
        value: bytes | None = self.client.get(self.prefix + name)
        return value

    def replace(self, name: bytes, value: bytes) -> None:
        self.client.set(self.prefix + name, value)


def test_storm_over_files_changes_no_token(model: Path, tmp_path: Path) -> None:
    # Room for part of the blocks, so that files are removed all the time.
    tiers = ["--kv-tiers", f"memory:256KiB,files:{tmp_path / 'kv'}:4MiB"]
    options = [*OPTIONS, *tiers]
    with running_service(tmp_path, model, workers=2, worker_options=options, router_options=ROUTER_OPTIONS) as service:
        counts = storm(service, model, Files(tmp_path / "kv"), {})
    check_counts(counts, has_failures=False)


def test_storm_over_redis_that_hangs_and_dies_changes_no_token(model: Path, tmp_path: Path) -> None:
    with running_redis(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        options = [*OPTIONS, "--kv-tiers", f"memory:256KiB,{server.url}"]
        with running_service(
            tmp_path, model, workers=2, worker_options=options, router_options=ROUTER_OPTIONS
        ) as service:
            counts = storm(service, model, Redis(server.port), faults(server))
    check_counts(counts, has_failures=True)


def faults(server: RedisServer) -> dict[int, Any]:
    """A hang, a death and a new start."""
    return {
        REQUESTS // 4: lambda: server.send(signal.SIGSTOP),
        REQUESTS // 3: lambda: server.send(signal.SIGCONT),
        REQUESTS // 2: lambda: server.send(signal.SIGKILL),
        REQUESTS * 2 // 3: server.start,
    }
