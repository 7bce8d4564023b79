"""Health probes of a machine that runs only ranks: `fissile worker --node-rank 1 --health-port`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cli.client.health import serving_status
from common.cli.core.errors import CommandError
from tests.e2e.service import REPOSITORY, free_port
from tests.e2e.simulated import simulated_model

WITHIN_S = 90.0


def status(port: int, service: str) -> str:
    """The health status of a service; "" without an answer."""
    try:
        return asyncio.run(serving_status(f"127.0.0.1:{port}", service, 5.0))
    except CommandError:
        return ""


def wait_for(port: int, service: str, wanted: str, log: Path) -> None:
    end = time.monotonic() + WITHIN_S
    while status(port, service) != wanted:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command(folder: Path, *options: str) -> list[str]:
    meeting = ["--tp-size", "2", "--nnodes", "2", "--dist-init", f"tcp://127.0.0.1:{free_port()}"]
    return [
        sys.executable, "-m", "common.cli.main", "worker", "--model", str(folder), *meeting, "--node-rank", "1",
        *options,
    ]  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """The process of a machine that runs only ranks, its health port and its log."""
    port, log = free_port(), tmp_path / "node.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(simulated_model(tmp_path / "m"), "--health-port", str(port)),
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
        )
    try:
        yield process, port, log
    finally:
        process.kill()
        process.wait()


def test_rank_machine_readiness_follows_its_ranks(node: tuple[subprocess.Popen[bytes], int, Path]) -> None:
    process, port, log = node
    wait_for(port, "liveness", "SERVING", log)
    wait_for(port, "readiness", "SERVING", log)
    (rank,) = children(process.pid)
    # Polling sees the loss, because the rank restarts only after a second.
    os.kill(rank, signal.SIGKILL)
    wait_for(port, "readiness", "NOT_SERVING", log)
    assert status(port, "liveness") == "SERVING"
    wait_for(port, "readiness", "SERVING", log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == 0
    assert status(port, "liveness") == ""


@pytest.mark.slow
def test_rank_machine_with_taken_health_port_is_refused(
    node: tuple[subprocess.Popen[bytes], int, Path], tmp_path: Path
) -> None:
    _, port, log = node
    wait_for(port, "liveness", "SERVING", log)
    refused = subprocess.run(
        command(simulated_model(tmp_path / "n"), "--health-port", str(port)),
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in refused.stderr
    assert "choose another --health-port" in refused.stderr
