"""A real Redis server, which tests stop, kill and start again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.service import free_port


@dataclass
class RedisServer:
    """A server's process, whose values are gone when it ends.

    Attributes:
        program: path of `redis-server`.
        folder: where it may write.
        options: further arguments.
    """

    program: str
    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Database 0 as a KV tier."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts the process and waits until it listens."""
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command = [self.program, *place, "--save", "", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not self.listens():
            assert time.monotonic() < end
            time.sleep(0.02)

    def send(self, sent: signal.Signals) -> None:
        """Sends a signal to the process."""
        assert self.process is not None
        self.process.send_signal(sent)
        if sent is signal.SIGKILL:
            self.process.wait()

    def listens(self) -> bool:
        """True if the port accepts connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    """Starts a server; skips the test where it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(program, folder, options)
    server.start()
    try:
        yield server
    finally:
        server.send(signal.SIGKILL)
