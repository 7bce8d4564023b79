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
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import structlog

from common.limits import (
    RANK_END_S,
    RANK_HEARTBEAT_S,
    RANK_MISSED_HEARTBEATS,
    RANK_MISSED_HEARTBEATS_LOADING,
    STEP_TIMEOUT_S,
)
from worker.config.model_config import ModelError
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.executor import TimedOutput
from worker.progress import StartProgress
from worker.ranks.batch_delta import BatchEncoder
from worker.ranks.frames import FrameError, encode, receive
from worker.ranks.rank_calls import RankCall, RankCalls
from worker.ranks.rank_peers import Peer, RankLostError, accept_remote, ended_soon, spawn_local
from worker.ranks.topology import Topology

log = structlog.get_logger(__name__)

# Calls that take as long as a step.
_TIMED: Final = frozenset({"forward", "count_engines_with_work"})


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
        progress: StartProgress,
        step_timeout_s: float = STEP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Ranks of one engine on one machine have a secret of their own, which no option needs to say.
        alone = not topology.dist_init
        self.topology = replace(topology, dist_secret=secrets.token_hex(32)) if alone else topology
        self.threads = threads
        self._model = model
        self._progress = progress
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._peers: dict[int, Peer] = {}
        self._loaded: dict[int, tuple[int, int]] = {}
        self._encoder = BatchEncoder()
        self._calls = RankCalls(clock)
        self._serial = 0
        self._is_ready = False
        self._shares_sums = False
        # Bytes of a KV block on each rank.
        self._slices: list[int] = []
        self._draft_bytes: list[int] = []
        # Held while a call is sent, so that all ranks see the calls in one order; that may take until a rank that does
        # not read is killed, so the watcher never takes it.
        self._sending = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)

    def __len__(self) -> int:
        return self.topology.tp_size

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks on this machine."""
        return {rank: peer.process.pid for rank, peer in self._peers.items() if peer.process is not None}

    def start(self) -> None:
        """Starts this machine's ranks, waits for those of other machines, and lets all join one group.

        Raises:
            RankLostError: one has ended meanwhile.
            ModelError: the address for the other machines cannot be listened on.
        """
        try:
            for rank in self.topology.local_ranks:
                self._peers[rank] = self._spawn(rank)
            if self.topology.remote_ranks:
                accept_remote(self.topology, self._peers, self._clock)
            self._watcher.start()
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        topology = self.topology
        if len(self) > 1:
            local = topology.meeting_point[0] if topology.remote_ranks else ""
            members = self._call_each(
                "open_door", {rank: (local if rank in topology.local_ranks else "",) for rank in self._peers}
            )
            self.call("join", [members[rank] for rank in range(len(self))])
        if topology.dp_size > 1:
            log.info("waiting for the other engines", dp_rank=topology.dp_rank, dp_size=topology.dp_size)
            host, port = topology.meeting_point
            self.call("join_engines", host, port, topology.tp_size, topology.dp_rank, topology.dp_size)

    def count_engines_with_work(self, has_work: bool) -> int:
        """Number of engines in lockstep that have work, this one included.

        Raises:
            RankLostError: a rank is lost, of this engine or of another.
        """
        return int(self.call("count_engines_with_work", has_work, only=0)[0])

    def call(self, name: str, *arguments: object, only: int | None = None) -> dict[int, Any]:
        """Calls a method of every rank, or of one. Returns the answers by rank.

        Raises:
            RankLostError: a rank is lost.
            ModelError: what a rank says of the model, with its number.
        """
        ranks = self._peers if only is None else (only,)
        return self._call_each(name, dict.fromkeys(ranks, arguments))

    def set_ready(self, shares_sums: bool, block_bytes: dict[int, tuple[int, int]]) -> None:
        """Notes that the ranks have loaded, after which their silence counts as a fault within seconds.

        Args:
            shares_sums: whether their devices share memory for sums, which they have to give up together.
            block_bytes: bytes of a KV block on each rank, and the draft model's part of them.
        """
        self._is_ready, self._shares_sums = True, shares_sums
        self._slices = [block_bytes[rank][0] for rank in range(len(block_bytes))]
        self._draft_bytes = [block_bytes[rank][1] for rank in range(len(block_bytes))]

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block on all ranks: in KV tiers it is one value, of the ranks' slices in order."""
        return sum(self._slices)

    @property
    def model_slices(self) -> list[slice]:
        """Slices of a KV block of all ranks that hold the model's bytes, and not a draft model's."""
        ends = list(accumulate(self._slices))
        rows = zip(ends, self._slices, self._draft_bytes, strict=True)
        return [slice(end - whole, end - drafts) for end, whole, drafts in rows]

    def submit(self, batch: ScheduledBatch) -> Future[TimedOutput]:
        """Computes a batch after those submitted before; rank 0 measures its duration."""
        result: Future[TimedOutput] = Future()
        try:
            wanted = set(self._peers) if batch.blocks_down else {0}
            answered = self._send("forward", self._step_arguments(batch), wanted)
        except (RankLostError, ModelError) as error:
            result.set_exception(error)
            return result
        answered.add_done_callback(lambda done: _pass_on(done, result))
        return result

    def _step_arguments(self, batch: ScheduledBatch) -> dict[int, tuple[object, ...]]:
        """The encoded batch for each rank: one for all, unless it has blocks from KV tiers, of which each gets its
        slice."""
        encoded = self._encoder.encode(batch)
        if not batch.blocks_up:
            return dict.fromkeys(self._peers, encoded)
        *shared, rest = encoded
        arguments, start = {}, 0
        for rank, size in enumerate(self._slices):
            blocks = [(block, data[start : start + size]) for block, data in batch.blocks_up]
            arguments[rank] = (*shared, {**rest, "blocks_up": blocks})
            start += size
        return arguments

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step.

        Raises:
            RankLostError: a rank is lost.
        """
        return self.submit(batch).result().output

    def failure(self) -> Exception | None:
        """Reason why the ranks are lost; None while they run."""
        return self._calls.error

    def close(self) -> None:
        """Ends the ranks; waits for their end. May be called twice."""
        try:
            if self._shares_sums and self._calls.error is None:
                self._leave()
        finally:
            self._fail(RankLostError("the engine has ended its ranks"))
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for peer in self._peers.values():
            peer.end()

    def _leave(self) -> None:
        """Gives ranks up to RANK_END_S to end the operations that they share on their devices."""

        def call() -> None:
            with contextlib.suppress(RankLostError, ModelError):
                self.call("leave")

        # On a thread, which a rank that does not read holds up.
        leaving = threading.Thread(target=call, name="leave", daemon=True)
        leaving.start()
        leaving.join(RANK_END_S)

    def _spawn(self, rank: int) -> Peer:
        return spawn_local(rank, self.topology, self._model, self.threads)

    def _call_each(self, name: str, arguments: dict[int, tuple[object, ...]]) -> dict[int, Any]:
        return self._send(name, arguments, set(arguments)).result()

    def _send(self, name: str, arguments: dict[int, tuple[object, ...]], wanted: set[int]) -> Future[dict[int, Any]]:
        """Sends one call. An argument that several ranks share is encoded once."""
        with self._sending:
            self._serial += 1
            call = RankCall(self._serial, name, wanted)
            each = {id(given): given for given in arguments.values()}
            frames = {key: encode((call.serial, name, *given)) for key, given in each.items()}
            self._calls.begin(call)
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
            while self._calls.error is None:
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

    def _read(self, peer: Peer) -> None:
        peer.silent = 0
        try:
            messages = list(receive(peer.sock, peer.reader))
        except (EOFError, OSError):
            if self._calls.error is not None:
                return
            raise RankLostError(peer.how_lost()) from None
        except FrameError as error:
            raise RankLostError(f"rank {peer.rank} sent {error}") from None
        for kind, *content in messages:
            if kind == "done":
                self._calls.answered(peer.rank, *content)
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
        gone = ended_soon(self._peers.values(), self._clock) if kind == "PeerLostError" else None
        return RankLostError(f"rank {rank} failed: {kind}: {message}" if gone is None else gone.how_lost())

    def _check(self) -> None:
        """Checks the ranks once per heartbeat. Counts their silence in checks, so that a pause of this process is no
        silence."""
        most_silent = RANK_MISSED_HEARTBEATS if self._is_ready else RANK_MISSED_HEARTBEATS_LOADING
        for peer in self._peers.values():
            peer.silent += 1
            if peer.silent > most_silent:
                raise RankLostError(f"rank {peer.rank} has been silent for {peer.silent * RANK_HEARTBEAT_S:g} s")
        oldest = self._calls.oldest()
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
        self._calls.fail(error)


def _pass_on(done: Future[dict[int, Any]], result: Future[TimedOutput]) -> None:
    error = done.exception()
    if error is not None:
        result.set_exception(error)
    else:
        answers = {rank: TimedOutput(*answer) for rank, answer in done.result().items()}
        if len(answers) > 1:
            answers[0].output.blocks_down = _joined([answers[rank].output for rank in sorted(answers)])
        result.set_result(answers[0])


def _joined(outputs: list[ScheduledBatchOutput]) -> list[tuple[bytes, bytes, bytes]]:
    """Blocks for KV tiers, of the ranks' slices in order. Ranks read them in the same order."""
    rows = zip(*(output.blocks_down or () for output in outputs), strict=True)
    return [(row[0][0], row[0][1], b"".join(part for _, _, part in row)) for row in rows]
