"""A real service for tests: router and workers as separate processes on loopback, and a client for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cli.serve.ports import free_ports
from tests.e2e.forked import ForkedProcess, can_fork

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 200.0
# Of workers with a model: by itself one takes a quarter of the free memory when it starts, in seconds. Simulated ones
# have none.
SMALL_POOL = {"FISSILE_KV_CACHE_MEMORY": "64MiB"}


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now, no connection will have, and no other test run chooses."""
    return free_ports(1)[0]


def small_pool(arguments: Sequence[str]) -> dict[str, str]:
    """Environment of a process with these arguments that keeps its KV pool small."""
    return {} if any(argument.startswith("--simulate") for argument in arguments) else SMALL_POOL


@dataclass
class Process:
    """A child process and its log file."""

    name: str
    arguments: list[str]
    port: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    # Of health in plain text, where the port itself speaks TLS.
    health_port: int | None = None
    child: subprocess.Popen[bytes] | ForkedProcess | None = None
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, **small_pool(self.arguments), **self.environment}
        if can_fork(self.arguments, environment):
            self.child = ForkedProcess(self.arguments, REPOSITORY, environment, self.log)
            return
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", *self.arguments], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )

    @property
    def running(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """The child, which must have been started."""
        assert self.child is not None
        return self.child

    def wait_serving(self, service: str = "") -> None:
        """Waits until the health service says SERVING; fails with the log when the process ends before."""
        end = time.monotonic() + START_TIMEOUT_S
        while not self.is_serving(service):
            if self.running.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{self.name} is not serving:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def is_serving(self, service: str = "") -> bool:
        """Whether the health service says SERVING now."""
        port = self.port if self.health_port is None else self.health_port
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=30
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout: float = 240.0) -> int:
        """Sends a signal and returns the exit code."""
        if self.running.poll() is None:
            self.running.send_signal(sig)
        try:
            return self.running.wait(timeout)
        except subprocess.TimeoutExpired:
            self.running.kill()
            raise AssertionError(f"{self.name} did not stop:\n{self.log.read_text()[-4000:]}") from None


@dataclass
class Service:
    """One router and its workers."""

    router: Process
    workers: list[Process]
    channel: grpc.Channel

    @property
    def stub(self) -> InferenceServiceStub:
        """Blocking client of the router."""
        return InferenceServiceStub(self.channel)

    def worker_load(self, index: int = 0) -> wpb.Load:
        """The load that worker `index` reports to a router that opens a session now."""

        def hello() -> Iterator[wpb.SessionRequest]:
            yield wpb.SessionRequest(hello=wpb.Hello(proto_minor=0, router_id="probe", lease_ms=5000))
            time.sleep(0.2)

        with grpc.insecure_channel(self.workers[index].address) as channel:
            for frame in WorkerServiceStub(channel).Session(hello(), timeout=60):
                return frame.welcome.load
        raise AssertionError("no Welcome")

    def wait_idle(self, index: int = 0, timeout: float = 60.0) -> wpb.Load:
        """Waits until worker `index` has nothing to do and returns its load, or the last one seen."""
        end = time.monotonic() + timeout
        while True:
            load = self.worker_load(index)
            idle = not load.decoding_seqs and not load.waiting_seqs and load.free_blocks == load.total_blocks
            if idle or time.monotonic() > end:
                return load
            time.sleep(0.05)


@contextlib.contextmanager
def running_service(
    folder: Path,
    model: Path,
    *,
    workers: int = 1,
    worker_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    roles: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Service]:
    """Starts a service for `model`, with logs in `folder`, and stops it at the end.

    Args:
        folder: where the log files go.
        model: checkpoint folder.
        workers: number of worker processes.
        worker_options: further command-line options of every worker.
        router_options: further command-line options of the router.
        roles: of the workers, instead of their number.
        environment: further environment variables of all processes.
    """
    env = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "info", **(environment or {})}
    of_roles = [[*worker_options, "--role", role] for role in roles]
    fleet = [_worker(folder, model, i, each, env) for i, each in enumerate(of_roles or [worker_options] * workers)]
    router = _router(folder, fleet, router_options, env)
    with running([*fleet, router]), grpc.insecure_channel(router.address) as channel:
        yield Service(router, fleet, channel)


@contextlib.contextmanager
def running(processes: Sequence[Process]) -> Iterator[None]:
    """Starts processes side by side, waits until all serve, and kills in the end what still runs."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_serving()
        yield
    finally:
        for process in processes:
            if process.child is not None and process.child.poll() is None:
                process.child.kill()
                process.child.wait()


def _worker(folder: Path, model: Path, index: int, options: Sequence[str], env: dict[str, str]) -> Process:
    port = free_port()
    arguments = ["worker", "--model", str(model), "--model-name", "test", "--port", str(port)]
    name = f"worker-{index}"
    return Process(name, [*arguments, "--worker-id", name, *options], port, folder / f"{name}.log", env)


def _router(folder: Path, fleet: list[Process], options: Sequence[str], env: dict[str, str]) -> Process:
    port = free_port()
    addresses = [part for worker in fleet for part in ("--worker", worker.address)]
    return Process("router", ["router", "--port", str(port), *addresses, *options], port, folder / "router.log", env)


@dataclass
class Answer:
    """A whole stream, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_info: pb.PromptInfo | None = None
    finish: pb.Finish | None = None
    messages: int = 0

    def add(self, part: pb.GenerateResponse | pb.ChatResponse) -> None:
        """Adds one message, checking the contract of streams."""
        assert self.finish is None, "a message after the finish"
        assert part.HasField("prompt_info") == (self.messages == 0)
        self.messages += 1
        self.text += part.delta.content if isinstance(part, pb.ChatResponse) else part.text
        self.token_ids.extend(part.token_ids)
        if part.HasField("prompt_info"):
            self.prompt_info = part.prompt_info
        if part.HasField("finish"):
            self.finish = part.finish


def generate(
    stub: InferenceServiceStub,
    request: pb.GenerateRequest,
    timeout: float = 120.0,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Answer:
    """Runs one Generate to its end."""
    answer = Answer()
    for part in stub.Generate(request, timeout=timeout, metadata=metadata):
        answer.add(part)
    assert answer.finish is not None, "an OK stream without a finish"
    return answer


def chat(stub: InferenceServiceStub, request: pb.ChatRequest, timeout: float = 120.0) -> Answer:
    """Runs one Chat to its end."""
    answer = Answer()
    for part in stub.Chat(request, timeout=timeout):
        answer.add(part)
    assert answer.finish is not None, "an OK stream without a finish"
    return answer
