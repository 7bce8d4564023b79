"""A real Mooncake master, and where workers find the client library."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.service import free_port
from tests.peers.environment import peer_environment, peer_variables

LIMIT_S: Final = 60.0
PACKAGE: Final = "mooncake-transfer-engine-non-cuda==0.3.13.post1"


@dataclass
class MooncakeMaster:
    """A master's process, which can be killed and started again.

    Attributes:
        packages: folder where the client library is found.
        log: where the process writes.
    """

    packages: Path
    log: Path
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def tier(self) -> str:
        """The store as a KV tier, without memory of the worker's own."""
        return f"mooncake://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which a process finds the client library."""
        return {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(self.packages)])}

    def start(self) -> None:
        """Starts the process and waits until it listens."""
        command = [str(self.packages / "mooncake" / "mooncake_master"), "--rpc_address", "127.0.0.1"]
        command += ["--rpc_port", str(self.port), "--metrics_host", "127.0.0.1"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--metrics_port", str(self.metrics_port)], stdout=out, stderr=out, env=peer_variables()
            )
        wait_until(lambda: listens(self.port) and listens(self.metrics_port))

    def send(self, sent: signal.Signals) -> None:
        """Sends a signal to the process."""
        assert self.process is not None
        self.process.send_signal(sent)
        if sent is signal.SIGKILL:
            self.process.wait()

    def num_values(self) -> int:
        """Values that the store has."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=LIMIT_S) as answer:
            [count] = re.findall(r"^master_key_count (\d+)$", answer.read().decode(), re.M)
        return int(count)

    def stored_keys(self) -> list[str]:
        """Keys of the values that the store has. Fails after a second, because the master may hang."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/get_all_keys", timeout=1) as answer:
            text: str = answer.read().decode()
        return text.split()


def mooncake_packages() -> Path:
    """Folder with the client library; skips the test where the library cannot be loaded."""
    binaries = peer_environment("mooncake", (), (PACKAGE,))
    [packages] = (binaries.parent / "lib").glob("python*/site-packages")
    loaded = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"],
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        check=False,
    )
    if loaded.returncode:
        pytest.skip(f"Mooncake's library cannot be loaded: {loaded.stderr.decode().strip().splitlines()[-1]}")
    return packages


@contextlib.contextmanager
def running_master(folder: Path) -> Iterator[MooncakeMaster]:
    """Starts a master, which keeps nothing itself: values are in the memory of its clients."""
    master = MooncakeMaster(mooncake_packages(), folder / "mooncake.log")
    master.start()
    try:
        yield master
    finally:
        master.send(signal.SIGKILL)


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def listens(port: int) -> bool:
    """True if a port of this machine accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
