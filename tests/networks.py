"""Machines as network namespaces: cables between them, good and bad ones, and a worker of two ranks over a cable."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from tests.e2e.service import REPOSITORY, Process, free_port

PROMPT = [7, 8, 9, 10] * 9
_COMMON = ["worker", "--tp-size", "2", "--nnodes", "2"]
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_numbers = itertools.count()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Cable:
    """A network namespace beside this process's own, and the addresses of both ends."""

    namespace: str
    here: str
    there: str


@contextlib.contextmanager
def _namespace() -> Iterator[Cable]:
    """A namespace and free addresses; skips the test where none can be made."""
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian package iproute2)")
    number = next(_numbers)
    name = f"fsl{os.getpid() % 100_000}x{number}"
    # A network of this process and cable alone out of 198.18.0.0/15, which is for tests of networks (RFC 2544).
    net, first = f"198.{18 + os.getpid() // 250 % 2}.{os.getpid() % 250}", 4 * (number % 63)
    done = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine lets no network namespace be made: {done.stderr.strip()}")
    try:
        yield Cable(name, f"{net}.{first + 1}", f"{net}.{first + 2}")
    finally:
        ip("netns", "del", name)


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """A namespace with a cable to this one."""
    with _namespace() as made:
        ip("link", "add", made.namespace, "type", "veth", "peer", "name", "eth0", "netns", made.namespace)
        ip("addr", "add", f"{made.here}/30", "dev", made.namespace)
        ip("link", "set", made.namespace, "up")
        ip("-n", made.namespace, "addr", "add", f"{made.there}/30", "dev", "eth0")
        ip("-n", made.namespace, "link", "set", "eth0", "up")
        yield made


@dataclass
class Weather:
    """What a bad cable does to packets; may be changed at any time.

    Attributes:
        loss: probability that a packet is dropped.
        delay_s: time that each packet takes.
        is_cut: True drops all packets.
        dropped: packets dropped so far.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    is_cut: bool = False
    dropped: int = 0


@contextlib.contextmanager
def bad_cable() -> Iterator[tuple[Cable, Weather]]:
    """A namespace with a cable whose packets this process carries, so that it can drop and delay them.

    Kernels often lack `tc netem`; TUN devices do the same here.
    """
    with _namespace() as made, contextlib.ExitStack() as stack:
        ends: list[int] = []
        for name in (f"{made.namespace}a", f"{made.namespace}b"):
            try:
                end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            except OSError as error:
                pytest.skip(f"this machine lets no network namespace be made with a TUN device: {error}")
            stack.callback(os.close, end)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
            ends.append(end)
        near, far = f"{made.namespace}a", f"{made.namespace}b"
        # The open file still carries the device's packets after the device has moved.
        ip("link", "set", far, "netns", made.namespace)
        ip("addr", "add", made.here, "peer", made.there, "dev", near)
        ip("link", "set", near, "up")
        ip("-n", made.namespace, "addr", "add", made.there, "peer", made.here, "dev", far)
        ip("-n", made.namespace, "link", "set", far, "up")
        weather, over = Weather(), threading.Event()
        thread = threading.Thread(target=_carry, args=(*ends, weather, over), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield made, weather


def _carry(one: int, other: int, weather: Weather, over: threading.Event) -> None:
    rnd, order = random.Random(11), itertools.count()
    late: list[tuple[float, int, int, bytes]] = []
    across = {one: other, other: one}
    while not over.is_set():
        wait = 0.2 if not late else max(0.0, late[0][0] - time.monotonic())
        for end in select.select(across, [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(end, 1 << 16)
                if weather.is_cut or rnd.random() < weather.loss:
                    weather.dropped += 1
                else:
                    heapq.heappush(late, (time.monotonic() + weather.delay_s, next(order), across[end], packet))
        while late and late[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(late)
            # A full or closing device drops packets, as cables do.
            with contextlib.suppress(OSError):
                os.write(end, packet)


@dataclass
class Machines:
    """Machine 0, which serves, and machine 1, which has the other rank."""

    first: Process
    second: subprocess.Popen[bytes]
    second_log: Path
    start_second: Callable[[], subprocess.Popen[bytes]]

    def kill(self, machine: int) -> None:
        """Ends the worker's process of a machine by SIGKILL; its rank ends with it."""
        process = self.second if machine else self.first.running
        process.kill()
        process.wait()

    def start(self, machine: int) -> None:
        """Starts the worker's process of a machine again, as a service manager would."""
        if machine:
            self.second = self.start_second()
        else:
            self.first.start()

    @property
    def remote_rank(self) -> int:
        """Process id of the rank on machine 1, as soon as it runs."""
        end = time.monotonic() + 60
        while not (found := ranks_of(self.second.pid)):
            assert time.monotonic() < end, "machine 1 runs no rank"
            time.sleep(0.05)
        return found[0]

    def stream(self, max_tokens: int = 64) -> Iterator[int]:
        request = wpb.GenerateRequest(token_ids=PROMPT, request_id="r")
        request.params.CopyFrom(
            wpb.SamplingParams(
                temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=max_tokens, ignore_eos=True
            )
        )
        with grpc.insecure_channel(self.first.address) as channel:
            for part in WorkerServiceStub(channel).Generate(request, timeout=120):
                yield from part.token_ids

    def generate(self) -> list[int]:
        return list(self.stream())

    def description(self) -> wpb.GetWorkerResponse:
        with grpc.insecure_channel(self.first.address) as channel:
            return WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60)

    def wait_lost(self) -> None:
        """Waits until the worker is not serving."""
        end = time.monotonic() + 60
        while self.first.is_serving():
            assert time.monotonic() < end, "the loss was not noticed"
            time.sleep(0.05)


@contextlib.contextmanager
def machines(wire: Cable, model: Path, folder: Path, *options: str) -> Iterator[Machines]:
    """A worker that serves, with one rank here and one at the other end of the cable."""
    port = free_port()
    environment = {"OMP_NUM_THREADS": "1", "FISSILE_DIST_SECRET": "a secret of the test"}
    meeting = ["--dist-init", f"tcp://{wire.here}:{free_port()}", "--model", str(model)]
    given = ["--port", str(port), "--kv-cache-memory", "16MiB", "--dtype", "float32", "--max-model-len", "512"]
    first = Process("machine-0", [*_COMMON, *meeting, *given, *options], port, folder / "machine-0.log", environment)
    log = folder / "machine-1.log"

    def start_second() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", wire.namespace, sys.executable, "-m", *_COMMON, *meeting, "--node-rank", "1"],
                cwd=REPOSITORY, env={**os.environ, **environment}, stdout=output, stderr=output,
            )  # fmt: skip

    first.start()
    made = Machines(first, start_second(), log, start_second)
    try:
        first.wait_serving()
        yield made
    finally:
        made.kill(0)
        made.kill(1)


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks that a `fissile worker` has started; `ip netns exec` becomes it."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in children for child in task.read_text().split()]
