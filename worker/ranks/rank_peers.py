"""An engine's view of its ranks: how their processes start, are found and end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog

from common.limits import RANK_END_S, RANK_NAME_S
from common.rpc.tls import is_loopback
from worker.config.model_config import ModelError
from worker.ranks.door import SECRET_VARIABLE, Door, Guest, allow_slow_reader
from worker.ranks.frames import FrameReader
from worker.ranks.topology import Topology

log = structlog.get_logger(__name__)

_WAIT_LOG_S: Final = 10.0
_ACCEPT_S: Final = 0.2
_GONE_S: Final = 0.5


class RankLostError(Exception):
    """A rank is gone, frozen, hangs or has failed; one line that says which and how."""


@dataclass(slots=True)
class Peer:
    """One rank: its connection, and its process when that is on this machine.

    Attributes:
        silent: heartbeats that have been missed since it last sent something.
    """

    rank: int
    sock: socket.socket
    process: subprocess.Popen[bytes] | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    silent: int = 0

    @property
    def has_ended(self) -> bool:
        """True if the rank's process ran on this machine and has ended."""
        return self.process is not None and self.process.poll() is not None

    def how_lost(self) -> str:
        """Describes in one line how a rank was lost whose connection has ended."""
        if self.process is None:
            return f"rank {self.rank} on another machine has closed its connection"
        try:
            code = self.process.wait(RANK_END_S)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} (process {self.process.pid}) has closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"

    def end(self) -> None:
        """Waits for the end of the rank's process and closes the connection."""
        if self.process is not None:
            self.process.wait()
        self.sock.close()


def spawn_local(rank: int, topology: Topology, model: str, threads: int) -> Peer:
    """Starts a rank of an engine on this machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        target = f"fd:{theirs.fileno()}"
        process = spawn_rank(rank, target, topology, model, threads, (theirs.fileno(),))
    return Peer(rank, ours, process)


def spawn_rank(
    rank: int, target: str, topology: Topology, model: str, threads: int, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Starts the process of a rank, which ends with this thread."""
    own = str(os.getpid())
    command = [
        sys.executable,
        "-m",
        "common.process.exec_child",
        own,
        "worker.ranks.rank_process",
        str(rank),
        target,
        model,
    ]
    # PyTorch's log lines are not JSON, and its warnings about host names have no use here.
    quiet = {"GLOO_LOG_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = {**quiet, **os.environ, "OMP_NUM_THREADS": str(threads)}
    environment[SECRET_VARIABLE] = topology.dist_secret
    if is_loopback(topology.meeting_point[0]):
        # NCCL and RCCL listen on the first other interface by default.
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=environment)


def accept_remote(topology: Topology, peers: dict[int, Peer], clock: Callable[[], float]) -> None:
    """Waits without a limit for the ranks of other machines and adds them to `peers`.

    Raises:
        RankLostError: one of `peers` has ended meanwhile.
        ModelError: the address for the other machines cannot be listened on.
    """
    host, port = topology.meeting_point
    door = _open_door(topology, clock)
    if not topology.dist_secret:
        log.warning("no --dist-secret: whoever reaches --dist-init can pose as a rank", address=f"{host}:{port}")
    with contextlib.closing(door):
        told = -_WAIT_LOG_S
        while missing := topology.remote_ranks - peers.keys():
            if clock() - told >= _WAIT_LOG_S:
                told = clock()
                log.info("waiting for ranks of other machines", ranks=sorted(missing), address=f"{host}:{port}")
            # Also ranks that have connected: one that has ended meanwhile starts again.
            if (guest := door.admit(topology.remote_ranks, _ACCEPT_S)) is not None:
                if guest.rank in peers:
                    log.warning("rank connected again; its earlier connection is closed", rank=guest.rank)
                    peers[guest.rank].sock.close()
                peers[guest.rank] = _remote_peer(guest)
            lost = next((peer for peer in peers.values() if peer.has_ended), None)
            if lost is not None:
                raise RankLostError(lost.how_lost())


def _open_door(topology: Topology, clock: Callable[[], float]) -> Door:
    """Opens the door at `--dist-init`. Waits for the name: DNS learns that of a new Pod after the Pod has started."""
    (host, port), end = topology.meeting_point, clock() + RANK_NAME_S
    told = False
    while True:
        try:
            return Door(host, port, topology.dist_secret, clock)
        except OSError as error:
            if not isinstance(error, socket.gaierror) or clock() >= end:
                raise ModelError(f"--dist-init: {host}:{port} cannot be listened on: {error.strerror}") from None
            if not told:
                told = True
                log.info("waiting for the name in --dist-init", host=host, why=error.strerror, at_most_s=RANK_NAME_S)
        time.sleep(_ACCEPT_S)


def ended_soon(peers: Iterable[Peer], clock: Callable[[], float]) -> Peer | None:
    """Finds a rank of this machine whose process has ended; waits a moment for the exit to show."""
    peers, end = list(peers), clock() + _GONE_S
    while clock() < end:
        for peer in peers:
            if peer.has_ended:
                return peer
        time.sleep(0.01)
    return None


def _remote_peer(guest: Guest) -> Peer:
    log.info("rank connected", rank=guest.rank, peer=guest.address)
    # A rank reads no call while it computes the previous one. A vanished machine sends no heartbeats.
    allow_slow_reader(guest.sock)
    return Peer(guest.rank, guest.sock)
