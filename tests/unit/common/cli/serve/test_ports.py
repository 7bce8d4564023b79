"""Ports for child processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli.core.errors import CommandError
from common.cli.serve import ports
from common.cli.serve.ports import free_ports

CHOOSE_ALL = """
import sys
from common.cli.serve import ports
ports._PORTS = range(int(sys.argv[1]), int(sys.argv[2]))
chosen = []
try:
    while True:
        chosen += ports.free_ports(1)
except ports.CommandError:
    print(*chosen, flush=True)
sys.stdin.read()
"""


def only(monkeypatch: pytest.MonkeyPatch, first: int, count: int = 1) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(first, first + count))


def test_ports_are_free_and_distinct() -> None:
    chosen = free_ports(20)
    assert len(set(chosen)) == 20
    # Linux gives connections ports from 32768 on.
    assert all(1024 < port < 32768 for port in chosen)
    assert not set(chosen) & set(free_ports(20))


def test_taken_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        only(monkeypatch, taken)
        with pytest.raises(CommandError, match=f"fewer than 1 ports of {taken} to {taken} are free"):
            free_ports(1)


def test_two_processes_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: two test runs or services chose the same random ports before their processes listened."""
    [first] = free_ports(1)
    ports._chosen.discard(first)
    range_of = [str(first + 1), str(first + 41)]
    command = [sys.executable, "-c", CHOOSE_ALL, *range_of]
    cwd = Path(__file__).resolve().parents[5]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        only(monkeypatch, first + 1, 40)
        with pytest.raises(CommandError):
            free_ports(40 - len(theirs) + 1)
        other.stdin.close()
    assert len(theirs) > 30
    # A process's claims end with it, so its ports are free again.
    assert theirs.intersection(free_ports(40 - len(theirs) + 1))


def test_ports_are_chosen_without_lock_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_locks", lambda: None)
    assert len(free_ports(3)) == 3
