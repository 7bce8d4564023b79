"""A model on two machines: network namespaces with a cable between them, each with its own `fissile worker`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from tests.checkpoints import make_checkpoint
from tests.e2e.service import REPOSITORY, Process, free_port
from tests.processes import is_alive
from worker.llm_engine import LLMEngine, default_config

pytestmark = pytest.mark.slow

PROMPT = [7, 8, 9, 10] * 9
COMMON = ["worker", "--tp-size", "2", "--nnodes", "2"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Cable:
    """A network namespace beside this process's own, and the addresses of both ends."""

    namespace: str
    here: str
    there: str


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian package iproute2)")
    name = f"fsl{os.getpid() % 100_000}"
    # A network of this process's own out of 198.18.0.0/15, which is for tests between networks (RFC 2544).
    net = f"198.18.{os.getpid() % 250}"
    made = Cable(name, f"{net}.1", f"{net}.2")
    done = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine lets no network namespace be made: {done.stderr.strip()}")
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{made.here}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{made.there}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        ip("netns", "del", name)


@dataclass
class Machines:
    """Machine 0, which serves, and machine 1, which has the other rank."""

    first: Process
    second: subprocess.Popen[bytes]
    second_log: Path

    def generate(self) -> list[int]:
        request = wpb.GenerateRequest(token_ids=PROMPT, request_id="r")
        request.params.CopyFrom(
            wpb.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=64, ignore_eos=True)
        )
        tokens: list[int] = []
        with grpc.insecure_channel(self.first.address) as channel:
            for part in WorkerServiceStub(channel).Generate(request, timeout=60):
                tokens += part.token_ids
        return tokens

    def description(self) -> wpb.GetWorkerResponse:
        with grpc.insecure_channel(self.first.address) as channel:
            return WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_key_value_heads=1)


@pytest.fixture(scope="module")
def machines(cable: Cable, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    port = free_port()
    environment = {"OMP_NUM_THREADS": "1"}
    meeting = ["--dist-init", f"tcp://{cable.here}:{free_port()}", "--model", str(model)]
    options = ["--port", str(port), "--kv-cache-memory", "16MiB", "--dtype", "float32", "--max-model-len", "512"]
    first = Process("machine-0", [*COMMON, *meeting, *options], port, folder / "machine-0.log", environment)
    log = folder / "machine-1.log"
    first.start()
    with log.open("ab") as output:
        second = subprocess.Popen(
            ["ip", "netns", "exec", cable.namespace, sys.executable, "-m", *COMMON, *meeting, "--node-rank", "1"],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
        )
    try:
        first.wait_serving()
        yield Machines(first, second, log)
    finally:
        first.stop(signal.SIGKILL)
        second.kill()
        second.wait()


def test_two_machines_give_same_tokens_as_one(machines: Machines, model: Path) -> None:
    alone = LLMEngine(default_config(model)).generate(
        [PROMPT], {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    )
    assert machines.generate() == alone[0]["token_ids"]


def test_recovered_machine_is_used_again(machines: Machines) -> None:
    before, expected = machines.description(), machines.generate()
    (remote,) = ranks_of(machines.second.pid)
    os.kill(remote, signal.SIGKILL)
    end = time.monotonic() + 60
    while machines.first.is_serving():
        assert time.monotonic() < end, "the loss was not noticed"
        time.sleep(0.05)
    machines.first.wait_serving()
    assert machines.description().instance_id != before.instance_id
    assert machines.generate() == expected
    assert "rank 1 on another machine has closed its connection" in machines.first.log.read_text()


def test_logs_of_both_machines_are_json_lines(machines: Machines) -> None:
    """Former fault: PyTorch wrote plain-text warnings that the other machine's address has no name."""
    for log in (machines.first.log, machines.second_log):
        lines = log.read_text().splitlines()
        assert lines
        assert [line for line in lines if not line.startswith("{")] == []


def test_both_end_on_sigterm(machines: Machines) -> None:
    pids = ranks_of(machines.second.pid) + ranks_of(machines.first.running.pid)
    assert len(pids) == 2
    assert machines.first.stop(signal.SIGTERM) == 0
    machines.second.send_signal(signal.SIGTERM)
    assert machines.second.wait(60) == 0
    assert not any(map(is_alive, pids))


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks that a `fissile worker` has started; `ip netns exec` becomes it."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in children for child in task.read_text().split()]
