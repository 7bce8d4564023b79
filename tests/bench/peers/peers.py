"""The peers: how each is started, asked and stopped.

Every peer computes with the same number of threads, keeps no prompts for later ones (prefix caches are off), holds at
most MOST_AT_ONCE sequences, and gets about the same memory for its KV cache. One that is not measured rests, and takes
no processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import SCHEDULING_POLICIES
from tests.bench.peers.client import HOST, Ask, closed_loop, grpc_generate, llama_completion, openai_completions
from tests.bench.peers.folder import GGUF_TYPES, AbsentError, PeerFolder, need
from tests.bench.peers.runs import Job, Run
from tests.e2e.service import free_port

REPOSITORY: Final = Path(__file__).resolve().parents[3]
MODEL_NAME: Final = "peer"
MOST_AT_ONCE: Final = 32
# Prompt and answer together have 320 tokens at most; llama.cpp reserves memory for this length per slot.
LONGEST: Final = 512
_LLAMA_PLACE: Final = 352
KV_GIB: Final = 2
# vLLM compiles for minutes when it starts for the first time, longer beside other work.
START_TIMEOUT_S: Final = 1800.0
_STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.2
_JOB_MARGIN_S: Final = 120.0
_MOST_BYTES_PER_LINE: Final = 1 << 28
# What would change how many threads a peer takes, or which of our options it has.
_NOT_INHERITED: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "LD_PRELOAD")


class PeerError(Exception):
    """A peer did not start, or ended; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all peers are started with.

    Attributes:
        folder: of the peers.
        shape: of the checkpoint.
        threads: of each peer's arithmetic.
    """

    folder: PeerFolder
    shape: str
    threads: int

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder.

        Raises:
            AbsentError: it has not been made.
        """
        how = f"python -m tests.bench.peers.checkpoint --folder {self.folder.root} --shape {self.shape}"
        return need(self.folder.checkpoint(self.shape) / "tokenizer.json", how).parent

    def gguf(self, kind: str) -> Path:
        """The checkpoint as a GGUF file.

        Raises:
            AbsentError: it has not been converted.
        """
        how = f"python -m tests.bench.peers.convert --folder {self.folder.root} --shape {self.shape}"
        return need(self.folder.gguf(self.shape, kind), how)

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's venv.

        Raises:
            AbsentError: it has not been installed.
        """
        how = f"python -m tests.bench.peers.install {peer} --folder {self.folder.root}"
        return need(self.folder.python(peer), how)


@dataclass(slots=True)
class Process:
    """A process of its own group, with its output in a log file.

    Attributes:
        command: program and arguments.
        log: the file.
        environment: variables beside the inherited ones.
        answers: whether its standard input and output are pipes.
        serves: whether it can be asked; a server's own answer.
        child: once it has been started.
    """

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    answers: bool = False
    serves: Callable[[], bool] = lambda: True
    child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with self.log.open("w", encoding="utf-8") as log:
            self.child = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env={**inherited, **self.environment},
                stdin=subprocess.PIPE if self.answers else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.answers else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def running(self) -> subprocess.Popen[str]:
        """The child.

        Raises:
            PeerError: it has ended, or has not been started.
        """
        if self.child is None or self.child.poll() is not None:
            raise PeerError(f"{self.log.stem} does not run: {self.log}: {self.log.read_text(errors='replace')[-1000:]}")
        return self.child

    def signal(self, which: signal.Signals) -> None:
        """Sends the signal to the process and its running children."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, which)

    def stop(self) -> None:
        """Ends the process and its children."""
        if self.child is None:
            return
        # One that rests would not hear that it is to end.
        self.signal(signal.SIGCONT)
        for which in (signal.SIGTERM, signal.SIGKILL):
            self.signal(which)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(_STOP_TIMEOUT_S)
        self.child = None


class Peer(ABC):
    """One engine under measurement. `start` raises AbsentError when it is not installed, PeerError when it fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.processes: list[Process] = []

    @abstractmethod
    async def start(self) -> None:
        """Starts it and waits until it can be asked."""

    @abstractmethod
    async def run(self, job: Job) -> Run:
        """Does a job.

        Raises:
            WrongWorkError: the answers have not the lengths asked for.
            PeerError: it ended.
        """

    def rest(self) -> None:
        """Pauses its processes: an idle server polls for work."""
        for process in self.processes:
            process.signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets them go on."""
        for process in self.processes:
            process.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends its processes, the last one first."""
        for process in reversed(self.processes):
            process.stop()
        self.processes = []

    @property
    def started(self) -> bool:
        """Whether `start` was called and `stop` was not."""
        return bool(self.processes)

    @property
    def pids(self) -> list[int]:
        return [process.running.pid for process in self.processes]


class Server(Peer):
    """A server on a port of loopback.

    Args:
        name: of the peer.
        processes: makes those that serve on a port.
        client: to the port.
    """

    def __init__(
        self,
        name: str,
        processes: Callable[[int], list[Process]],
        client: Callable[[int], contextlib.AbstractAsyncContextManager[Ask]],
    ) -> None:
        super().__init__(name)
        self._make_processes, self._client = processes, client
        self._port = 0

    async def start(self) -> None:
        """Starts the processes and waits until all of them serve."""
        self._port = free_port()
        self.processes = self._make_processes(self._port)
        for process in self.processes:
            process.start()
        end = time.monotonic() + START_TIMEOUT_S
        for process in self.processes:
            while not process.serves():
                if process.running and time.monotonic() > end:
                    raise PeerError(f"{self.name} does not serve after {START_TIMEOUT_S:.0f} s; see {process.log}")
                await asyncio.sleep(_POLL_S)

    async def run(self, job: Job) -> Run:
        """A closed loop of the client."""
        async with self._client(self._port) as ask:
            return await closed_loop(ask, job)


class Engine(Peer):
    """An engine in a separate process, which reads jobs (`runs.serve_jobs`)."""

    def __init__(self, name: str, process: Callable[[], Process]) -> None:
        super().__init__(name)
        self._make_process = process

    async def start(self) -> None:
        """Starts the process and waits until it has loaded."""
        self.processes = [self._make_process()]
        self.processes[0].start()
        await self._line(START_TIMEOUT_S)

    async def run(self, job: Job) -> Run:
        """One job, one answer."""
        pipe = self.processes[0].running.stdin
        assert pipe is not None
        pipe.write(job.encode() + "\n")
        pipe.flush()
        # A step of a batch or of its prefill is not interrupted.
        return Run.decode(await self._line(job.limit_s * 2 + _JOB_MARGIN_S))

    async def _line(self, limit_s: float) -> str:
        process = self.processes[0]
        pipe = process.running.stdout
        assert pipe is not None
        line = await asyncio.wait_for(asyncio.to_thread(pipe.readline, _MOST_BYTES_PER_LINE), limit_s)
        if not line:
            process.running.wait(_STOP_TIMEOUT_S)
            _ = process.running
        return line


def http_serves(port: int) -> bool:
    """Whether `/health` says 200."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def grpc_serves(port: int) -> bool:
    """Whether the health service says SERVING."""
    with grpc.insecure_channel(f"{HOST}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


# What the worker or the offline engine is started with beside the common options.
_INT8: Final = ("--quantize", "int8")
_INT4: Final = ("--quantize", "int4")
_SERVED: Final[dict[str, tuple[str, ...]]] = {
    "fissile": (),
    "fissile-int8": _INT8,
    "fissile-int4": _INT4,
    **{f"fissile-{policy}": ("--scheduling-policy", policy) for policy in SCHEDULING_POLICIES},
}
# Types of the GGUF files that llama.cpp's peers of the same ending serve too.
_FILES: Final = {f"fissile-{kind}": kind for kind in ("q8", "q4_0", "q4_k_m")}
_OFFLINE: Final[dict[str, tuple[str, ...]]] = {
    "fissile-offline": (),
    "fissile-offline-int8": _INT8,
    "fissile-offline-int4": _INT4,
}


def _fissile_environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "protos")])}


def _fissile(setting: Setting, name: str, port: int) -> list[Process]:
    """A worker and a router, as two processes."""
    worker_port = free_port()
    model = setting.gguf(_FILES[name]) if name in _FILES else setting.checkpoint
    worker = ["-m", "worker", "--model", str(model), "--model-name", MODEL_NAME, "--dtype", "bfloat16"]
    worker += ["--port", str(worker_port), "--threads", str(setting.threads), "--no-prefix-caching"]
    worker += ["--kv-cache-memory", f"{KV_GIB}GiB", "--log-level", "warning", *_SERVED.get(name, ())]
    router = ["-m", "router", "--port", str(port), "--worker", f"{HOST}:{worker_port}", "--log-level", "warning"]
    return [
        Process(
            [sys.executable, *arguments],
            setting.folder.log(f"{name}-{arguments[1]}"),
            _fissile_environment(),
            serves=partial(grpc_serves, at),
        )
        for arguments, at in ((worker, worker_port), (router, port))
    ]


def _fissile_offline(setting: Setting, name: str) -> Process:
    command = [sys.executable, "-m", "tests.bench.peers.fissile_engine", "--model", str(setting.checkpoint)]
    command += ["--threads", str(setting.threads), "--kv-cache-memory", str(KV_GIB << 30), *_OFFLINE[name]]
    return Process(command, setting.folder.log(name), _fissile_environment(), answers=True)


def _vllm(setting: Setting, dtype: str, port: int) -> list[Process]:
    """The OpenAI server of vLLM for CPUs; its compiled code is kept for the next start."""
    command = [str(setting.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(setting.checkpoint), "--served-model-name", MODEL_NAME, "--dtype", dtype]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", str(LONGEST), "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(MOST_AT_ONCE), "--disable-uvicorn-access-log"]
    preload = [setting.folder.tcmalloc, setting.folder.openmp]
    cache = setting.folder.peer("vllm") / "cache"
    environment = {
        "LD_PRELOAD": os.pathsep.join(str(library) for library in preload if library.exists()),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return [Process(command, setting.folder.log(f"vllm-{dtype}"), environment, serves=partial(http_serves, port))]


def _llamacpp(setting: Setting, kind: str, port: int) -> list[Process]:
    """llama.cpp's server with a place for each request, its flash attention, and no cache of prompts."""
    root = setting.folder.root
    program = need(
        setting.folder.llama_program("llama-server"), f"python -m tests.bench.peers.install llamacpp --folder {root}"
    )
    command = [str(program), "-m", str(setting.gguf(kind))]
    command += ["--host", HOST, "--port", str(port), "-c", str(MOST_AT_ONCE * _LLAMA_PLACE), "-np", str(MOST_AT_ONCE)]
    command += ["-t", str(setting.threads), "-tb", str(setting.threads), "-fa", "on", "--no-webui"]
    command += ["--no-cache-prompt", "--cache-ram", "0"]
    return [Process(command, setting.folder.log(f"llamacpp-{kind}"), serves=partial(http_serves, port))]


def _transformers(setting: Setting, name: str) -> Process:
    command = [str(setting.python("transformers")), "-m", "tests.bench.peers.transformers_engine"]
    command += ["--model", str(setting.checkpoint), "--threads", str(setting.threads)]
    command += ["--continuous"] if name == "transformers-continuous" else []
    environment = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    return Process(command, setting.folder.log(name), environment, answers=True)


@asynccontextmanager
async def _openai_client(port: int) -> AsyncIterator[Ask]:
    yield openai_completions(port, MODEL_NAME)


@asynccontextmanager
async def _llama_client(port: int) -> AsyncIterator[Ask]:
    yield llama_completion(port)


def make_peers(setting: Setting) -> dict[str, Peer]:
    """All peers by name, none of them started."""
    peers: list[Peer] = [
        *(Server(name, partial(_fissile, setting, name), grpc_generate) for name in (*_SERVED, *_FILES)),
        *(Engine(name, partial(_fissile_offline, setting, name)) for name in _OFFLINE),
        Server("vllm", partial(_vllm, setting, "bfloat16"), _openai_client),
        Server("vllm-float32", partial(_vllm, setting, "float32"), _openai_client),
        *(Server(f"llamacpp-{kind}", partial(_llamacpp, setting, kind), _llama_client) for kind in GGUF_TYPES),
        *(Engine(name, partial(_transformers, setting, name)) for name in ("transformers", "transformers-continuous")),
    ]
    return {peer.name: peer for peer in peers}


__all__ = ["AbsentError", "Peer", "PeerError", "Setting", "make_peers"]
