"""Six connections without a key begin calls by the thousand: memory of the process that is flooded stays bounded.

Each docstring begins with the code of its fault.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.chaos.conftest import Report
from tests.chaos.scale import FULL, SCALE
from tests.chaos.support import code_of, rss_mib
from tests.deploy.manifests import container
from tests.e2e.service import REPOSITORY, Process, Service, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, request, wait_workers

_CHECK: Final = "/grpc.health.v1.Health/Check"
_PATHS: Final = (
    _CHECK,
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/fissile.worker.v1.WorkerService/Session",
)
_KINDS: Final = ("reset", "close", "hold")
_CONNECTIONS: Final = 6
_PORTS: Final = ("router", "router admin", "router health", "worker", "worker health")
# Most memory in MiB that a flood of a side port adds to a process.
_SIDE_MIB: Final = 256


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    """Side ports: those for admin calls and health."""
    return {name: free_port() for name in _PORTS if " " in name}


@pytest.fixture(scope="module")
def service(model: Path, ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    router = ["--admin-port", str(ports["router admin"]), "--health-port", str(ports["router health"])]
    worker = [*OPTIONS, "--health-port", str(ports["worker health"])]
    folder = tmp_path_factory.mktemp("floods")
    # Not forked from a process with PyTorch, whose memory would count as theirs (tests/e2e/forked.py).
    threads = {"OMP_NUM_THREADS": "2"}
    with running_service(folder, model, worker_options=worker, router_options=router, environment=threads) as running:
        wait_workers(running, 1)
        yield running


def memory_limit_mib(component: str) -> float:
    """The limit of memory that the manifest gives a component."""
    limit: str = container("base", component)["resources"]["limits"]["memory"]
    return float(limit.removesuffix("Gi")) * 1024


@contextmanager
def flood(port: int, kind: str, path: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.chaos.http2_flood", f"127.0.0.1:{port}", kind, str(_CONNECTIONS), path]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield
        finally:
            told, _ = process.communicate(b"", timeout=60)
    assert int(told.split()[0]) > 0


class Honest:
    """A client that keeps asking a port for its health, and counts the answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_always)
        self.codes: Counter[str] = Counter()
        self.longest_s = 0.0

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask_always(self) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._stop.is_set():
                begin = time.monotonic()
                self.codes[_check(stub)] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - begin)
                self._stop.wait(0.02)


def _check(stub: health_pb2_grpc.HealthStub) -> str:
    try:
        stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)
    except grpc.RpcError as error:
        return code_of(error).name
    return "OK"


def highest_rss_mib(process: Process, seconds: float) -> float:
    """Highest resident memory of a process within some seconds."""
    end, highest = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        highest = max(highest, rss_mib(process))
        time.sleep(0.05)
    return highest


def attacks() -> list[tuple[str, str, str]]:
    """Port, kind and method of each flood: all of them, or each port, kind and method at least once."""
    if FULL:
        return [(port, kind, path) for port in _PORTS for kind in _KINDS for path in _PATHS]
    kinds, paths = itertools.cycle(_KINDS), itertools.cycle(_PATHS)
    return [(port, next(kinds), next(paths)) for port in _PORTS]


@pytest.mark.slow
def test_call_floods_stay_within_manifest_memory(service: Service, ports: dict[str, int], report: Report) -> None:
    """H1: 100,000 calls could wait for a port's event loop, 28 KB each: 2.9 GB, where the manifest allows 1 GiB."""
    processes = {"router": service.router, "worker": service.workers[0]}
    limits = {name: memory_limit_mib(name) for name in processes}
    answer = generate(service.stub, request(1, 24))
    for name, kind, path in attacks():
        component = name.split()[0]
        process = processes[component]
        port = ports.get(name, process.port)
        before = rss_mib(process)
        with Honest(port) as honest, flood(port, kind, path):
            highest = highest_rss_mib(process, SCALE.flood_s)
        method, answers = path.rsplit("/", 1)[1], str(dict(honest.codes))
        figures = {"before_mib": before, "highest_mib": highest, "longest_s": honest.longest_s}
        report("H1", port=name, kind=kind, method=method, answers=answers, **figures)
        assert highest < limits[component]
        assert " " not in name or highest - before < _SIDE_MIB
        assert honest.codes["OK"] > 0
    # The service still gives the same answer.
    assert generate(service.stub, request(1, 24)).token_ids == answer.token_ids
    assert "Traceback" not in service.router.log.read_text() + service.workers[0].log.read_text()
