"""Processes whose standard error cannot be written serve as if it could."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.chaos.support import until
from tests.covering import slow_but
from tests.e2e.service import REPOSITORY, Process, Service, free_port, generate
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers

# Dead: the reader of the pipe has ended. Stuck: it is there and does not read. Full: the disk. Closed: no descriptor.
KINDS = ("dead", "stuck", "full", "closed")
FILL = bytes(1 << 16)


class Mute(Process):
    """A process whose standard error and output are of one of KINDS; `kind` is behind the name."""

    def start(self) -> None:
        kind = self.name.rpartition(" ")[2]
        command = [sys.executable, "-m", *self.arguments]
        if kind == "closed":
            command = ["sh", "-c", 'exec "$@" 2>&- >&-', "sh", *command]
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(self.target(kind))
            environment = {**os.environ, **self.environment}
            self.child = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=target, stderr=target)

    @contextlib.contextmanager
    def target(self, kind: str) -> Iterator[int]:
        if kind in ("full", "closed"):
            opened = os.open("/dev/full" if kind == "full" else os.devnull, os.O_WRONLY)
            yield opened
            os.close(opened)
            return
        reads, writes = os.pipe()
        if kind == "dead":
            os.close(reads)
        else:
            # Full before the first line, and open to the end of the tests.
            fill(writes)
        yield writes
        os.close(writes)


def fill(pipe: int) -> None:
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    for size in (len(FILL), 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, FILL[:size])
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags)


def process(kind: type[Process], name: str, folder: Path, *arguments: str) -> Process:
    environment = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "debug"}
    port = free_port()
    log = folder / f"{name.replace(' ', '-')}.log"
    return kind(name, [*arguments, "--port", str(port)], port, log, environment)


def worker_arguments(model: Path) -> list[str]:
    return ["worker", "--model", str(model), "--model-name", "test", *OPTIONS]


@contextlib.contextmanager
def ending(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in processes:
            if each.child is not None and each.child.poll() is None:
                each.child.kill()
                each.child.wait()


@contextlib.contextmanager
def client(router: Process, workers: list[Process]) -> Iterator[Service]:
    with grpc.insecure_channel(router.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Service(router, workers, channel)


def assert_answers(stub: InferenceServiceStub, count: int = 5) -> None:
    """Whole answers with OK, and a refusal with its own status."""
    for i in range(count):
        answer = generate(stub, request(i, 8))
        assert len(answer.token_ids) == 8
    with pytest.raises(grpc.RpcError) as caught:
        generate(stub, pb.GenerateRequest(text="a", priority=pb.Priority.ValueType(99)))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
def test_router_with_broken_log_serves_and_reconnects_worker(tmp_path: Path) -> None:
    """With each kind of broken standard error all requests succeed, a restarted worker is used, and SIGTERM ends
    cleanly."""
    worker = process(Process, "worker", tmp_path, *worker_arguments(simulated_model(tmp_path / "model")))
    routers = [process(Mute, f"router {kind}", tmp_path, "router", "--worker", worker.address) for kind in KINDS]
    with ending([worker, *routers]):
        for each in (worker, *routers):
            each.start()
        for each in (worker, *routers):
            each.wait_serving()
        for router in routers:
            with client(router, [worker]) as service:
                assert_answers(service.stub)
        worker.stop(signal.SIGKILL)
        worker.start()
        worker.wait_serving()
        for router in routers:
            with client(router, [worker]) as service:
                wait_workers(service, 1)
                assert_answers(service.stub)
            assert router.is_serving()
        assert {router.name: router.stop() for router in routers} == {router.name: 0 for router in routers}


@pytest.mark.slow
def test_workers_with_unwritable_log_serve_every_router(tmp_path: Path) -> None:
    """With each kind of broken standard error a worker accepts Sessions of new routers, and SIGTERM ends it cleanly."""
    model = simulated_model(tmp_path / "model")
    workers = [process(Mute, f"worker {kind}", tmp_path, *worker_arguments(model)) for kind in KINDS]
    addresses = [argument for worker in workers for argument in ("--worker", worker.address)]
    router = process(Process, "router", tmp_path, "router", *addresses)
    with ending([router, *workers]):
        for each in (router, *workers):
            each.start()
        for _ in range(2):
            router.wait_serving()
            with client(router, workers) as service:
                wait_workers(service, len(KINDS), within_s=60)
                assert_answers(service.stub, 3 * len(KINDS))
            assert router.stop() == 0
            router.start()
        assert {worker.name: worker.stop() for worker in workers} == {worker.name: 0 for worker in workers}


def answers(stub: InferenceServiceStub) -> bool:
    """True if a request is served; the router lets it wait for a worker for five seconds."""
    try:
        generate(stub, request(1, 8), timeout=60)
    except grpc.RpcError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but({"stuck"}, ["dead", "stuck"]))
def test_serve_with_broken_output_keeps_children(kind: str, tmp_path: Path) -> None:
    """With unread output `fissile serve` keeps serving, restarts a dead child, and ends cleanly."""
    model = simulated_model(tmp_path / "model")
    arguments = ["common.cli.main", "serve", "--model", str(model), "--model-name", "test", "--simulate", "fixed:5ms"]
    serve = process(Mute, f"serve {kind}", tmp_path, *arguments)
    with ending([serve]):
        serve.start()
        serve.wait_serving()
        with client(serve, []) as service:
            assert_answers(service.stub)
            for i in range(300):
                with contextlib.suppress(grpc.RpcError):
                    generate(service.stub, pb.GenerateRequest(text="a", priority=pb.Priority.ValueType(99 + i)))
            children = Path(f"/proc/{serve.running.pid}/task/{serve.running.pid}/children").read_text().split()
            (worker,) = [c for c in children if b"worker" in Path(f"/proc/{c}/cmdline").read_bytes().split(b"\0")]
            os.kill(int(worker), signal.SIGKILL)
            until(lambda: answers(service.stub), what="the worker that is started again")
            assert_answers(service.stub)
        assert serve.stop(timeout=60) == 0
