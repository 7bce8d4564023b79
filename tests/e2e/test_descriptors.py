"""A router that runs out of connections goes on with its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.chaos.raw_http2 import PREFACE
from tests.chaos.support import client_of, open_files, until
from tests.e2e.service import REPOSITORY, Process, free_port, generate
from tests.e2e.simulated import OPTIONS, request, simulated_model

LIMIT, IDLE = 256, 400
EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Limited(Process):
    """A process that may have LIMIT files open."""

    def start(self) -> None:
        command = ["sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", sys.executable, "-m", *self.arguments]
        with self.log.open("ab") as log:
            environment = {**os.environ, **self.environment}
            self.child = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)


def idle_connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    with contextlib.suppress(OSError):
        connection.sendall(PREFACE + EMPTY_SETTINGS)
    return connection


def ready_workers(stub: InferenceServiceStub) -> int:
    return stub.GetModel(pb.GetModelRequest(), timeout=60).model.ready_workers


def end(process: Process) -> None:
    """Ends the child that it has now."""
    process.running.kill()
    process.running.wait()


@pytest.mark.slow
def test_idle_connections_leave_descriptors_for_workers(tmp_path: Path) -> None:
    """Former fault: with all descriptors taken by idle connections, the router could not dial a restarted worker."""
    model = simulated_model(tmp_path / "model")
    ports = free_port(), free_port()
    arguments = ["worker", "--model", str(model), "--model-name", "test", "--port", str(ports[0]), *OPTIONS]
    environment = {"OMP_NUM_THREADS": "1"}
    worker = Process("worker", arguments, ports[0], tmp_path / "worker.log", environment)
    arguments = ["router", "--port", str(ports[1]), "--worker", worker.address]
    router = Limited("router", arguments, ports[1], tmp_path / "router.log", environment)
    with contextlib.ExitStack() as stack:
        for process in (worker, router):
            process.start()
            stack.callback(end, process)
        for process in (worker, router):
            process.wait_serving()
        stub = stack.enter_context(client_of(router))
        generate(stub, request(0, 8))
        # Open until all has been looked at: those that never answer hold up the end of the router.
        idle = stack.enter_context(contextlib.ExitStack())
        for _ in range(IDLE):
            idle.enter_context(idle_connection(router.address))
        assert open_files(router) < LIMIT - 32
        worker.stop(signal.SIGKILL)
        worker.start()
        worker.wait_serving()
        until(lambda: ready_workers(stub) == 1, within_s=60, what="the worker that was restarted")
        generate(stub, request(1, 8))
        log = router.log.read_text()
        assert "Traceback" not in log
        assert log.count("few file descriptors") == 1
        idle.close()
        assert router.stop(timeout=60) == 0
