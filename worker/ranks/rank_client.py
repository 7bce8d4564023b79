"""The engine's end of its ranks: starts them, calls them, watches them, ends them.

Invariants:
  * Every call ends: with all answers that it waits for, or with RankLostError once any rank is lost. Ranks compute
    together, so the loss of one is the loss of all: the group fails once, ends its processes, and is not used again.
  * A rank is lost when its connection ends (its process is gone), when it sends nothing for RANK_MISSED_HEARTBEATS
    heartbeats (it is frozen, or its machine is gone), when a step takes longer than the step timeout (it hangs), or
    when a call raises in it.
  * After `close` no process of this group is left on this machine. The processes belong to the thread that started
    them: the kernel kills them when it ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from common.limits import (
    RANK_END_S,
    RANK_HEARTBEAT_S,
    RANK_MISSED_HEARTBEATS,
    RANK_MISSED_HEARTBEATS_LOADING,
    RANK_TCP_TIMEOUT_S,
    STEP_TIMEOUT_S,
)
from worker.config.model_config import ModelError
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.executor import Executed
from worker.progress import Progress
from worker.ranks.batch_delta import BatchEncoder
from worker.ranks.frames import FrameError, FrameReader, encode, receive
from worker.ranks.topology import Topology

log = structlog.get_logger(__name__)

_WAIT_LOG_S: Final = 10.0
_ACCEPT_S: Final = 0.2
_GONE_S: Final = 0.5
# Calls that take as long as a step.
_TIMED: Final = frozenset({"forward", "any_has_work"})


class RankLostError(Exception):
    """A rank is gone, frozen, hangs or has failed; one line that says which and how."""


@dataclass(slots=True)
class _Peer:
    """One rank: its connection, and its process when that is on this machine."""

    rank: int
    sock: socket.socket
    process: subprocess.Popen[bytes] | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    silent: int = 0


@dataclass(slots=True)
class _Call:
    """A call in flight. `began` is when it became the oldest one."""

    serial: int
    name: str
    missing: set[int]
    future: Future[dict[int, Any]]
    began: float = 0.0
    answers: dict[int, Any] = field(default_factory=dict)


class RankGroup:
    """The ranks of one engine; implements worker.engine.batch.Runner and worker.engine.executor.Executor.

    Args:
        topology: which ranks there are, and where.
        model: the checkpoint's folder.
        threads: of each rank's arithmetic.
        progress: is told bytes loaded and in all, means over the ranks, and steps captured and to capture.
        step_timeout_s: after which a step counts as hung.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        topology: Topology,
        model: str,
        threads: int,
        progress: Progress,
        step_timeout_s: float = STEP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topology = topology
        self.threads = threads
        self._model = model
        self._progress = progress
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._peers: dict[int, _Peer] = {}
        self._loaded: dict[int, tuple[int, int]] = {}
        self._encoder = BatchEncoder()
        self._calls: deque[_Call] = deque()
        self._serial = 0
        self._error: Exception | None = None
        self._is_ready = False
        self._shares_sums = False
        # Held while a call is sent, so that all ranks see the calls in one order; that may take until a rank that does
        # not read is killed, so the watcher never takes it.
        self._sending = threading.Lock()
        # Guards the calls and the error.
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)

    def __len__(self) -> int:
        return self.topology.tp_size

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks on this machine."""
        return {rank: peer.process.pid for rank, peer in self._peers.items() if peer.process is not None}

    def start(self) -> None:
        """Starts this machine's ranks, waits for those of the others, and joins all.

        Raises:
            RankLostError: one has ended meanwhile.
            ModelError: the address for the other machines can not be listened on.
        """
        try:
            for rank in self.topology.local_ranks:
                self._peers[rank] = self._spawn(rank)
            if self.topology.remote_ranks:
                self._accept_remote()
            self._watcher.start()
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        topology = self.topology
        host, port = topology.meeting_point if topology.remote_ranks else ("127.0.0.1", 0)
        port = self.call("open_store", host, only=0)[0]
        local = host if topology.remote_ranks else ""
        addresses = dict.fromkeys(topology.local_ranks, local)
        self._call_each("join", {rank: (host, port, topology.tp_size, addresses.get(rank, "")) for rank in self._peers})
        if topology.dp_size > 1:
            log.info("waiting for the other engines", dp_rank=topology.dp_rank, dp_size=topology.dp_size)
            host, port = topology.meeting_point
            self.call("join_engines", host, port, topology.tp_size, topology.dp_rank, topology.dp_size)

    def any_has_work(self, has_work: bool) -> bool:
        """True if any of the engines in lockstep has work.

        Raises:
            RankLostError: a rank is lost, of this engine or of another.
        """
        return bool(self.call("any_has_work", has_work, only=0)[0])

    def call(self, name: str, *arguments: object, only: int | None = None) -> dict[int, Any]:
        """Calls a method of every rank, or of one. The answers, by rank.

        Raises:
            RankLostError: a rank is lost.
            ModelError: what a rank says of the model, with its number.
        """
        ranks = self._peers if only is None else (only,)
        return self._call_each(name, dict.fromkeys(ranks, arguments))

    def set_ready(self, shares_sums: bool) -> None:
        """The ranks have loaded: from now on silence is noticed within seconds.

        Args:
            shares_sums: whether their devices share memory for sums, which they have to give up together.
        """
        self._is_ready, self._shares_sums = True, shares_sums

    def submit(self, batch: ScheduledBatch) -> Future[Executed]:
        """Computes a batch after those submitted before; its duration is what rank 0 measures."""
        result: Future[Executed] = Future()
        try:
            answered = self._send("forward", dict.fromkeys(self._peers, self._encoder.encode(batch)), {0})
        except (RankLostError, ModelError) as error:
            result.set_exception(error)
            return result
        answered.add_done_callback(lambda done: _pass_on(done, result))
        return result

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step.

        Raises:
            RankLostError: a rank is lost.
        """
        return self.submit(batch).result().output

    def failure(self) -> Exception | None:
        """Why the ranks are lost; None while they are there."""
        return self._error

    def close(self) -> None:
        """Ends the ranks; waits for their end. May be called twice."""
        try:
            if self._shares_sums and self._error is None:
                self._leave()
        finally:
            self._fail(RankLostError("the engine has ended its ranks"))
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for peer in self._peers.values():
            _end(peer)

    def _leave(self) -> None:
        """Lets ranks end what they share on their devices, for RANK_END_S at most."""

        def call() -> None:
            with contextlib.suppress(RankLostError, ModelError):
                self.call("leave")

        # On a thread, which a rank that does not read holds up.
        leaving = threading.Thread(target=call, name="leave", daemon=True)
        leaving.start()
        leaving.join(RANK_END_S)

    def _spawn(self, rank: int) -> _Peer:
        ours, theirs = socket.socketpair()
        with theirs:
            target = f"fd:{theirs.fileno()}"
            process = spawn_rank(rank, target, self._model, self.threads, (theirs.fileno(),))
        return _Peer(rank, ours, process)

    def _accept_remote(self) -> None:
        """Waits for the ranks of other machines, for as long as it takes."""
        host, port = self.topology.meeting_point
        try:
            listener = socket.create_server((host, port), backlog=self.topology.tp_size)
        except OSError as error:
            raise ModelError(f"--dist-init: {host}:{port} can not be listened on: {error.strerror}") from None
        with listener:
            listener.settimeout(_ACCEPT_S)
            told = -_WAIT_LOG_S
            while missing := self.topology.remote_ranks - self._peers.keys():
                if self._clock() - told >= _WAIT_LOG_S:
                    told = self._clock()
                    log.info("waiting for ranks of other machines", ranks=sorted(missing), address=f"{host}:{port}")
                self._accept_one(listener, missing)
                self._check_local()

    def _accept_one(self, listener: socket.socket, missing: set[int]) -> None:
        try:
            sock, address = listener.accept()
        except TimeoutError:
            return
        sock.settimeout(RANK_TCP_TIMEOUT_S)
        reader = FrameReader()
        try:
            kind, rank, _pid = next(receive(sock, reader))
            if kind != "hello" or rank not in missing:
                raise FrameError(f"{kind!r} of rank {rank!r}")
        except (OSError, EOFError, FrameError, StopIteration, ValueError, TypeError) as error:
            log.warning("connection refused: not a rank that is missing", peer=address[0], why=str(error))
            sock.close()
            return
        log.info("rank connected", rank=rank, peer=address[0])
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(RANK_TCP_TIMEOUT_S * 1000))
        self._peers[rank] = _Peer(rank, sock, reader=reader)

    def _check_local(self) -> None:
        for peer in self._peers.values():
            if peer.process is not None and peer.process.poll() is not None:
                raise RankLostError(_how_lost(peer))

    def _call_each(self, name: str, arguments: dict[int, tuple[object, ...]]) -> dict[int, Any]:
        return self._send(name, arguments, set(arguments)).result()

    def _send(self, name: str, arguments: dict[int, tuple[object, ...]], wanted: set[int]) -> Future[dict[int, Any]]:
        """Sends one call. Arguments that are one object for several ranks are encoded once."""
        with self._sending:
            self._serial += 1
            call = _Call(self._serial, name, wanted, Future(), self._clock())
            each = {id(given): given for given in arguments.values()}
            frames = {key: encode((call.serial, name, *given)) for key, given in each.items()}
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._calls.append(call)
            for rank, given in arguments.items():
                # A rank that is gone is found by the watcher, and one that does not read is killed by it.
                with contextlib.suppress(OSError):
                    self._peers[rank].sock.sendall(frames[id(given)])
        return call.future

    def _watch(self) -> None:
        try:
            self._watch_peers()
        except Exception as error:
            # Without a watcher calls would wait for ever.
            self._fail(RankLostError(f"{type(error).__name__}: {error}"))

    def _watch_peers(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers.values():
                selector.register(peer.sock, selectors.EVENT_READ, peer)
            beat = self._clock() + RANK_HEARTBEAT_S
            while self._error is None:
                try:
                    for key, _ in selector.select(max(0.0, beat - self._clock())):
                        self._read(key.data)
                    if self._clock() >= beat:
                        beat = self._clock() + RANK_HEARTBEAT_S
                        self._check()
                except (RankLostError, ModelError) as error:
                    self._fail(error)
                except Exception as error:
                    self._fail(RankLostError(f"{type(error).__name__}: {error}"))

    def _read(self, peer: _Peer) -> None:
        peer.silent = 0
        try:
            messages = list(receive(peer.sock, peer.reader))
        except (EOFError, OSError):
            if self._error is not None:
                return
            raise RankLostError(_how_lost(peer)) from None
        except FrameError as error:
            raise RankLostError(f"rank {peer.rank} sent {error}") from None
        for kind, *content in messages:
            if kind == "done":
                self._answered(peer.rank, *content)
            elif kind == "failed":
                raise self._failure(peer.rank, *content)
            elif kind == "loaded":
                self._loaded[peer.rank] = (content[0], content[1])
                self._say_loaded()
            elif kind == "captured":
                self._progress.count(*content)

    def _failure(self, rank: int, serial: int, kind: str, message: str) -> Exception:
        if kind == "model":
            return ModelError(f"rank {rank}: {message}" if rank else message)
        # The survivors of a rank often speak before its own connection ends.
        gone = self._gone() if kind == "PeerLostError" else None
        return RankLostError(f"rank {rank} failed: {kind}: {message}" if gone is None else _how_lost(gone))

    def _gone(self) -> _Peer | None:
        """A rank of this machine whose process has ended, which may take a moment to show."""
        end = self._clock() + _GONE_S
        while self._clock() < end:
            for peer in self._peers.values():
                if peer.process is not None and peer.process.poll() is not None:
                    return peer
            time.sleep(0.01)
        return None

    def _answered(self, rank: int, serial: int, answer: Any) -> None:
        with self._lock:
            call = next((call for call in self._calls if call.serial == serial), None)
            if call is None or rank not in call.missing:
                raise RankLostError(f"rank {rank} answered what it was not asked")
            call.missing.discard(rank)
            call.answers[rank] = answer
            if call.missing:
                return
            self._calls.remove(call)
            if self._calls:
                self._calls[0].began = self._clock()
        call.future.set_result(call.answers)

    def _check(self) -> None:
        """Once per heartbeat. Silence is counted in the watcher's turns, so that its own pause is no rank's silence."""
        most_silent = RANK_MISSED_HEARTBEATS if self._is_ready else RANK_MISSED_HEARTBEATS_LOADING
        for peer in self._peers.values():
            peer.silent += 1
            if peer.silent > most_silent:
                raise RankLostError(f"rank {peer.rank} has been silent for {peer.silent * RANK_HEARTBEAT_S:g} s")
        with self._lock:
            oldest = self._calls[0] if self._calls else None
        if oldest is not None and oldest.name in _TIMED and self._clock() - oldest.began > self._step_timeout_s:
            raise RankLostError(f"a step took longer than --step-timeout {self._step_timeout_s:g} s: a rank hangs")

    def _say_loaded(self) -> None:
        done, total = (sum(column) for column in zip(*self._loaded.values(), strict=True))
        self._progress.bytes(done // len(self._peers), total // len(self._loaded))

    def _fail(self, error: Exception) -> None:
        """Ends all calls and all ranks. Only the first error counts."""
        for peer in self._peers.values():
            if peer.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    peer.process.kill()
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = list(self._calls)
            self._calls.clear()
        for call in lost:
            call.future.set_exception(error)


def spawn_rank(
    rank: int, target: str, model: str, threads: int, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Starts the process of a rank, bound to this thread."""
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
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=environment)


def _pass_on(done: Future[dict[int, Any]], result: Future[Executed]) -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(Executed(*done.result()[0]))


def _how_lost(peer: _Peer) -> str:
    if peer.process is None:
        return f"rank {peer.rank} on another machine has closed its connection"
    try:
        code = peer.process.wait(RANK_END_S)
    except subprocess.TimeoutExpired:
        return f"rank {peer.rank} (process {peer.process.pid}) has closed its connection"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {peer.rank} (process {peer.process.pid}) {how}"


def _end(peer: _Peer) -> None:
    if peer.process is not None:
        peer.process.wait()
    peer.sock.close()
