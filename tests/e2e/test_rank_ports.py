"""Ports of ranks: closed to clients without the secret while ranks join, and gone once all have joined."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.service import Process, free_port
from tests.sockets import descendants, listening
from tests.unit.worker.ranks.test_door import FUZZED, stranger_bytes
from worker.ranks.door import SECRET_VARIABLE

OPTIONS = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory", "16MiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe", num_hidden_layers=2)


def made(name: str, model: Path, folder: Path, *options: str, secret: str = "") -> Process:
    port = free_port()
    # A machine that runs only ranks refuses the options of a worker's service and engine.
    served = [] if "--node-rank" in options else ["--port", str(port), *OPTIONS]
    arguments = ["worker", "--model", str(model), *served, *options]
    environment = {"OMP_NUM_THREADS": "1", **({SECRET_VARIABLE: secret} if secret else {})}
    return Process(name, arguments, port, folder / f"{name}.log", environment)


def stop(*processes: Process) -> None:
    for process in processes:
        if process.child is not None:
            process.child.kill()
            process.child.wait()


def assert_no_port_of_ranks(*workers: Process) -> None:
    """Checks that the workers and their ranks listen on the workers' own ports alone, on loopback."""
    found = listening([pid for worker in workers for pid in descendants(worker.running.pid)])
    assert {port for _, port in found} == {worker.port for worker in workers}
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found


def wait_for(text: str, process: Process) -> None:
    end = time.monotonic() + 90
    while text not in process.log.read_text():
        assert process.running.poll() is None, process.log.read_text()[-3000:]
        assert time.monotonic() < end, process.log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.slow
def test_joined_ranks_of_one_machine_have_no_ports(model: Path, tmp_path: Path) -> None:
    """Former fault: the store of the ranks listened on all interfaces, and read from whoever connected."""
    worker = made("worker", model, tmp_path, "--tp-size", "2")
    worker.start()
    try:
        worker.wait_serving()
        assert_no_port_of_ranks(worker)
    finally:
        stop(worker)


@pytest.mark.slow
def test_joined_lockstep_engines_have_no_ports(experts: Path, tmp_path: Path) -> None:
    """Former fault: the store of engines listened on all interfaces, at the known port of --dist-init."""
    port = free_port()
    common = ["--enable-expert-parallel", "--dp-size", "2", "--dist-init", f"tcp://127.0.0.1:{port}"]
    first, second = (
        made(f"dp-{i}", experts, tmp_path, *common, "--dp-rank", str(i), secret="a secret") for i in range(2)
    )
    first.start()
    try:
        wait_for("waiting for the other engines", first)
        fuzz(port, 100)
        second.start()
        first.wait_serving()
        second.wait_serving()
        assert_no_port_of_ranks(first, second)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 20)
    finally:
        stop(first, second)


@pytest.mark.slow
def test_fuzzed_frames_at_dist_init_end_no_process(model: Path, tmp_path: Path) -> None:
    """Former fault: one frame ended the worker that waited for ranks of other machines."""
    port, secret = free_port(), tmp_path / "secret"
    secret.write_text("the secret of both machines\n")
    common = ["--tp-size", "2", "--nnodes", "2", "--dist-init", f"tcp://127.0.0.1:{port}"]
    first = made("first", model, tmp_path, *common, "--dist-secret", str(secret))
    stranger = made("stranger", model, tmp_path, *common, "--node-rank", "1", secret="another")
    second = made("second", model, tmp_path, *common, "--node-rank", "1", secret="the secret of both machines")
    first.start()
    try:
        wait_for("waiting for ranks of other machines", first)
        fuzz(port, FUZZED)
        stranger.start()
        wait_for("its --dist-secret is another one", first)
        wait_for("not admitted among the ranks", stranger)
        second.start()
        first.wait_serving()
        assert_no_port_of_ranks(first)
    finally:
        stop(first, stranger, second)
    log = first.log.read_text()
    assert "Traceback" not in log
    assert 0 < log.count("connection refused: not one of the missing ranks") <= FUZZED + 100
    assert "the secret of both machines" not in log


def fuzz(port: int, count: int) -> None:
    rnd = random.Random(7)

    def send(data: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 20) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1 << 16)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, [stranger_bytes(rnd) for _ in range(count)]))
