"""`fissile top` at a real router with two simulated workers: in a pipe, and in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service import REPOSITORY, Service, free_port, generate, running_service
from tests.e2e.simulated import request, simulated_model, wait_workers
from tests.e2e.terminal import TerminalProgram

PROGRAM = [sys.executable, "-c", "from common.cli.main import main; main()", "top"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}"}


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(admin_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("top")
    model = simulated_model(tmp_path_factory.mktemp("model"))
    options = ["--admin-port", str(admin_port), "--tenant-weight", "gold=4", "--placement", "round_robin"]
    # A long answer takes longer than any step of a test on a busy machine.
    steps = ["--simulate", "fixed:50ms"]
    with running_service(folder, model, workers=2, worker_options=steps, router_options=options) as running:
        wait_workers(running, 2)
        yield running


@pytest.fixture
def screen(service: Service, admin_port: int) -> Iterator[TerminalProgram]:
    arguments = ["--admin-address", f"127.0.0.1:{admin_port}", "--interval", "100ms"]
    program = TerminalProgram([*PROGRAM, *arguments], ENVIRONMENT)
    yield program
    program.close()


def test_once_prints_frame_of_fleet_as_text(service: Service, admin_port: int) -> None:
    answers = [generate(service.stub, request(i, 5)) for i in range(4)]
    assert sum(len(answer.token_ids) for answer in answers) == 20
    arguments = ["--admin-address", f"127.0.0.1:{admin_port}", "--interval", "100ms", "--once"]
    found = subprocess.run(
        [*PROGRAM, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "\x1b" not in found.stdout
    rows = [line.split() for line in found.stdout.splitlines()]
    workers = {row[0]: row for row in rows if row and row[0].startswith("worker-")}
    assert {name: row[1] for name, row in workers.items()} == {"worker-0": "serving", "worker-1": "serving"}
    # Each worker answered two of the four requests.
    assert all(row[7].startswith("(") and row[8].startswith("(") for row in workers.values()), found.stdout
    assert ["gold", "0", "0", "0", "4", "-"] in rows
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_without_terminal_the_command_names_once(service: Service, admin_port: int) -> None:
    arguments = ["--admin-address", f"127.0.0.1:{admin_port}"]
    found = subprocess.run(
        [*PROGRAM, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert found.returncode == 2
    assert "--once" in found.stderr


def test_keys_sort_and_look_into_worker_and_request_and_q_restores_terminal(
    service: Service, screen: TerminalProgram
) -> None:
    screen.wait(lambda text: "worker-1" in text and "WORKER*" in text)
    screen.press("s")
    screen.wait(lambda text: "STATE*" in text)
    screen.press("\r")
    shown = screen.wait(lambda text: "KV blocks" in text)
    assert f"127.0.0.1:{service.workers[0].port}" in shown
    screen.press("\x1b")
    screen.wait(lambda text: "STATE*" in text)
    call = service.stub.Generate(request(7, 1900), timeout=600)
    next(iter(call))
    screen.wait(lambda text: "streaming" in text and "1 in flight" in text)
    assert screen.screen.is_alternate
    screen.press("r")
    screen.wait(lambda text: "REQUEST*" in text)
    screen.press("\r")
    shown = screen.wait(lambda text: "priority" in text)
    assert "request" in shown
    assert "r7" in shown
    screen.press("\x1b")
    screen.wait(lambda text: "REQUEST*" in text)
    call.cancel()
    screen.wait(lambda text: "0 in flight" in text)
    screen.press("q")
    assert screen.ended() == 0
    assert screen.is_restored()


@pytest.mark.parametrize("end", ["\x03", "SIGTERM"])
def test_interrupt_ends_cleanly(screen: TerminalProgram, end: str) -> None:
    screen.wait(lambda text: "worker-1" in text)
    if end == "SIGTERM":
        screen.child.send_signal(signal.SIGTERM)
    else:
        screen.press(end)
    assert screen.ended() == 0
    assert screen.is_restored()


@pytest.mark.slow
def test_router_gone_is_said_and_its_return_is_seen(
    screen: TerminalProgram, service: Service, admin_port: int, tmp_path: Path
) -> None:
    screen.wait(lambda text: "worker-1" in text)
    service.router.stop()
    shown = screen.wait(lambda text: "router gone for" in text)
    assert "worker-1" in shown
    service.router.start()
    screen.wait(lambda text: "router gone" not in text and text.count("serving") == 2)
    screen.press("q")
    assert screen.ended() == 0
