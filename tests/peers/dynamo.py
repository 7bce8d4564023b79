"""The real Dynamo in front of workers: a sidecar for each of them, and its OpenAI frontend, without etcd and NATS."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import openai
from fissile.peers.inference import open_inference_pb2 as oip
from fissile.peers.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub

from tests.clients import PINNED
from tests.e2e.service import Process, free_port
from tests.peers.environment import peer_environment, peer_variables

# Its own requirements name a package that is not published, so those that the two programs import stand here.
BARE: Final = (PINNED["Dynamo"], "ai-dynamo-runtime==1.6.1")
PACKAGES: Final = (
    *("aiohttp==3.14.5", "kubernetes==32.0.1", "msgspec==0.22.0", "prometheus-client==0.26.0", "pyzmq==27.3.0"),
    *("pydantic==2.13.5", "redis==8.1.0", "transformers==5.24.0", "uvloop==0.23.0", "zstandard==0.25.0"),
)
LIMIT_S: Final = 90.0
_FRONTEND: Final = ("-m", "dynamo.frontend", "--http-host", "127.0.0.1")


@dataclass
class Frontend:
    """A running frontend, and a client of its OpenAI API."""

    client: openai.OpenAI
    pid: int
    port: int


@contextlib.contextmanager
def running_sidecar(folder: Path, worker: Process, sidecar: str, *options: str) -> Iterator[int]:
    """Starts a sidecar for a worker; gives its process id.

    Args:
        folder: where logs and the list of instances go.
        worker: the worker.
        sidecar: function of `dynamo._core.backend` that runs it.
        options: further options of the sidecar.
    """
    run = "import sys; from dynamo._core import backend; getattr(backend, sys.argv[1])(sys.argv[2:])"
    given = ["--grpc-endpoint", worker.address, "--grpc-connections", "1", *options]
    with _running(folder, f"sidecar-{worker.port}", "-c", run, sidecar, *given) as (pid, _):
        yield pid


@contextlib.contextmanager
def running_frontend(folder: Path, model: str, *options: str) -> Iterator[Frontend]:
    """Starts the frontend with OpenAI's HTTP API, and waits until it serves the model of a sidecar."""
    port = free_port()
    with _running(folder, "frontend", *_FRONTEND, "--http-port", str(port), *options) as (pid, log):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
        _wait_until(lambda: model in [each.id for each in client.models.list().data], log)
        yield Frontend(client, pid, port)


@contextlib.contextmanager
def running_kserve(folder: Path, model: str) -> Iterator[GRPCInferenceServiceStub]:
    """Starts the frontend with the Open Inference Protocol, and waits until it serves the model of a sidecar."""
    port = free_port()
    options = ["--kserve-grpc-server", "--http-port", str(port), "--grpc-metrics-port", str(free_port())]
    with (
        _running(folder, "kserve", *_FRONTEND, *options) as (_, log),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)
        _wait_until(lambda: stub.ModelReady(oip.ModelReadyRequest(name=model), timeout=5).ready, log)
        yield stub


@contextlib.contextmanager
def _running(folder: Path, name: str, *arguments: str) -> Iterator[tuple[int, Path]]:
    """Runs Dynamo's interpreter, and kills it in the end; gives its process id and log."""
    environment = {
        **peer_variables(),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "instances"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
    }
    python, log = peer_environment("dynamo", PACKAGES, BARE) / "python", folder / f"{name}.log"
    with (
        log.open("wb") as out,
        subprocess.Popen([python, *arguments], env=environment, stdout=out, stderr=out) as child,
    ):
        try:
            yield child.pid, log
        finally:
            child.kill()


def _wait_until(is_true: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(openai.OpenAIError, grpc.RpcError):
            if is_true():
                return
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.2)
