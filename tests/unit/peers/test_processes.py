"""Peers are paused while they are not measured, and end in any state."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench.peers.peers import Engine, Process

# A server with a child process that polls for work.
SERVER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Engine]:
    process = Process([sys.executable, "-c", SERVER], tmp_path / "log", answers=True)
    made = Engine("busy", lambda: process)
    made.processes = [process]
    process.start()
    yield made
    made.stop()


def states(peer: Engine) -> Callable[[], set[str]]:
    """The states of the peer's process and its child (proc(5): T is stopped)."""
    running = peer.processes[0].running
    assert running.stdout is not None
    pids = [running.pid, int(running.stdout.readline())]
    return lambda: {Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in pids}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_paused_peer_uses_no_cpu_until_resumed(peer: Engine) -> None:
    now = states(peer)
    peer.rest()
    wait_for(lambda: now() == {"T"})
    peer.wake()
    wait_for(lambda: "T" not in now())
    assert peer.pids


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_paused_peer_can_be_stopped(peer: Engine) -> None:
    now, child = states(peer), peer.processes[0].running
    peer.rest()
    wait_for(lambda: now() == {"T"})
    peer.stop()
    assert child.returncode == -signal.SIGTERM
    assert not peer.started
