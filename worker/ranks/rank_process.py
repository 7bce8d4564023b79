"""One rank's process: a shard of the model, and the calls of the engine that it executes.

`python -m common.process.exec_child PARENT worker.ranks.rank_process RANK fd:N|HOST:PORT MODEL`. Ranks never schedule:
every rank gets the same calls in the same order and computes the same tokens; rank 0's answer counts. Blocks of KV
tiers have a slice of each rank. On a GPU every
rank launches a step as soon as it is told to, and rank 0 answers when the step's tokens have come, on another thread. A
rank ends with its engine, in whatever way that ended: its parent's death kills it, and a connection without a reader
ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from common.config import Config
from common.errors import ApiError
from common.files import parse_json
from common.limits import RANK_END_S, RANK_HEARTBEAT_S
from common.telemetry.logs import setup_logging
from common.telemetry.output import exit_now, guard_standard_streams
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.executor import StepLaunch, TimedOutput, TokenWaiter
from worker.garbage import GarbageCollector
from worker.ranks.batch_delta import BatchDecoder
from worker.ranks.door import SECRET_VARIABLE, Door, knock_until_admitted
from worker.ranks.frames import FrameReader, encode, messages

if TYPE_CHECKING:
    from worker.model.model_runner import ModelRunner
    from worker.model.sharding import Collectives, DataParallel

_PROGRESS_INTERVAL_S: Final = 0.1
_ENGINE_GONE: Final = 3


class Link:
    """A rank's end of the connection to its engine. Several threads send: answers of calls, and heartbeats."""

    def __init__(self, sock: socket.socket, reader: FrameReader) -> None:
        self._sock = sock
        self._reader = reader
        self._lock = threading.Lock()

    @property
    def own_address(self) -> str:
        """An address of this machine that the engine's machine reaches."""
        return str(self._sock.getsockname()[0]) if self._sock.family != socket.AF_UNIX else "127.0.0.1"

    def send(self, *message: object) -> None:
        """Sends a frame; ends the process if the engine is gone."""
        frame = encode(message)
        try:
            with self._lock:
                self._sock.sendall(frame)
        except OSError:
            exit_now(_ENGINE_GONE)

    def messages(self) -> Iterator[Any]:
        """Messages of the engine, until it closes the connection."""
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        with contextlib.suppress(EOFError, OSError):
            for message in messages(self._sock, self._reader):
                if beats.ident is None:
                    # An engine that waits for ranks of other machines reads nothing, for hours if need be. After its
                    # death no call comes any more, and this process may hang in a collective: a heartbeat ends it.
                    beats.start()
                yield message

    def _beat(self) -> None:
        while True:
            time.sleep(RANK_HEARTBEAT_S)
            self.send("beat")


class Rank:
    """Executes the engine's calls; each public method is one.

    Args:
        rank: of this process.
        link: to the engine.
        model: the checkpoint's folder on this machine.
    """

    def __init__(self, rank: int, link: Link, model: str) -> None:
        self._rank = rank
        self._link = link
        self._model = model
        self._said = 0.0
        self._collectives: Collectives | None = None
        self._door: Door | None = None
        self._data: DataParallel | None = None
        self._decoder = BatchDecoder()
        self._runner: ModelRunner | None = None
        self._waiter: TokenWaiter | None = None
        self._collector = GarbageCollector()

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "a call before load"
        return self._runner

    def open_door(self, address: str) -> tuple[str, int]:
        """Opens a port for the other ranks. Returns its address and number.

        Args:
            address: this machine's own; "" for the one of the connection to the engine.
        """
        address = address or self._link.own_address
        self._door = Door(address, 0, os.environ[SECRET_VARIABLE])
        return address, self._door.port

    def join(self, members: tuple[tuple[str, int], ...]) -> None:
        """Connects with the other ranks; `members` are the doors of all."""
        from worker.ranks.collectives import GroupCollectives, PeerLostError  # noqa: PLC0415
        from worker.ranks.mesh import join_mesh  # noqa: PLC0415

        assert self._door is not None, "join before open_door"
        # The engine watches all ranks, so this one need not.
        try:
            mesh = join_mesh(self._door, members, self._rank, os.environ[SECRET_VARIABLE], lambda: None)
        except OSError as error:
            raise PeerLostError(f"a rank is lost while the ranks connect: {error}") from error
        self._collectives = GroupCollectives(mesh, members[0][0])

    def join_engines(self, host: str, port: int, tp_size: int, dp_rank: int, dp_size: int) -> None:
        """Joins the ranks of the other engines in lockstep, which meet at `host` and `port`."""
        from worker.model.sharding import DataParallel  # noqa: PLC0415
        from worker.ranks.collectives import GroupCollectives, address_towards  # noqa: PLC0415
        from worker.ranks.engines import meet  # noqa: PLC0415

        place, size = dp_rank * tp_size + self._rank, dp_size * tp_size
        own = host if dp_rank == 0 else address_towards(host)
        everyone = meet(host, port, place, size, own, os.environ[SECRET_VARIABLE])
        alike = everyone.part(range(self._rank, size, tp_size))
        # Rank 0 of both groups is on the machine of `host`.
        self._data = DataParallel(dp_rank, dp_size, *(GroupCollectives(mesh, host) for mesh in (alike, everyone)))

    def count_engines_with_work(self, has_work: bool) -> int:
        """Number of engines in lockstep that have work. Rank 0 only."""
        import torch  # noqa: PLC0415

        assert self._data is not None, "count_engines_with_work before join_engines"
        return int(self._data.collectives.all_reduce(torch.tensor([float(has_work)])).item())

    def load(self, config: Config, threads: int, settings: str) -> tuple[int, int]:
        """Loads this rank's part of the model.

        Args:
            config: configuration of the engine.
            threads: threads of this rank's arithmetic.
            settings: `ModelConfig.source` as JSON, so that no rank imports `transformers`. The digest of the weights
                ensures that config.json is the same here.

        Returns:
            Bytes of one KV block on this rank, and the draft model's part of them.
        """
        import torch  # noqa: PLC0415

        from kernels.select import CPU_BACKENDS  # noqa: PLC0415
        from worker.model.model_runner import ModelRunner  # noqa: PLC0415
        from worker.model.runner_setup import make_token_waiter  # noqa: PLC0415
        from worker.model.sharding import Alone, Shard  # noqa: PLC0415

        torch.set_num_threads(threads)
        if torch.cuda.is_available() and config.kernels not in CPU_BACKENDS:
            # Ranks of one machine have consecutive numbers, and so have the engines of a group.
            engine = 0 if self._data is None else self._data.rank
            torch.cuda.set_device((engine * config.tensor_parallel_size + self._rank) % torch.cuda.device_count())
        config = replace(config, model=self._model)
        collectives = self._collectives or Alone()
        shard = Shard(self._rank, config.tensor_parallel_size, collectives, config.enable_expert_parallel, self._data)
        model_config = ModelConfig.from_folder(self._model, settings=parse_json(settings))
        self._runner = ModelRunner(config, model_config, partial(self._say, "loaded"), shard)
        if self._rank == 0 or config.kv_tiers:
            self._waiter = make_token_waiter(config, self._runner, time.perf_counter)
        return self._runner.kv_block_bytes, self._runner.draft_block_bytes

    def share_sums(self) -> bool:
        """Lets the kernels add across ranks if they can; True if they do, until `leave`.

        A call of its own, since all ranks take part: one whose load fails would leave the others waiting.
        """
        return self.runner.shard.collectives.use(self.runner.kernels)

    def kv_memory(self) -> tuple[Any, ...]:
        """Free memory for the KV cache after all ranks have loaded, as fields of KVMemory."""
        from worker.model.runner_setup import kv_memory  # noqa: PLC0415

        return astuple(kv_memory(self.runner))

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV pool."""
        from worker.model.runner_setup import allocate, take_kv_memory  # noqa: PLC0415

        allocate(self.runner, num_blocks)
        take_kv_memory(self.runner, num_blocks)

    def warmup(self) -> bool:
        """Runs the first steps; True if decode steps are captured next."""
        from worker.model.runner_setup import warm_up  # noqa: PLC0415

        warm_up(self.runner)
        return self.runner.captures_graphs

    def capture_graphs(self) -> None:
        """Captures decode steps, the same on all ranks. Rank 0 reports the progress."""
        if self._rank:
            self.runner.capture_graphs()
        else:
            self.runner.capture_graphs(partial(self._say, "captured"))

    def describe(self) -> dict[str, str]:
        """Facts of the model, which are the same on every rank. The last call before the first step."""
        from worker.model.runner_setup import describe  # noqa: PLC0415

        known = describe(self.runner)
        self._collector.start()
        return known

    def forward(self, *sent: Any) -> Future[TimedOutput] | TimedOutput | None:
        """Computes one step, which BatchEncoder has encoded. Rank 0 answers with its output and duration in seconds.

        The others answer only if the step reads blocks for KV tiers. Where steps are launched ahead ranks answer later,
        in the order of the steps, and this returns as soon as the step is launched.
        """
        begin = time.perf_counter()
        batch = self._decoder.decode(*sent)
        launched = StepLaunch(begin, self.runner.launch(batch))
        if self._rank and not batch.blocks_down:
            return None
        if self._waiter is not None:
            return self._waiter.submit(lambda: launched)
        return TimedOutput(launched.tokens(), time.perf_counter() - begin)

    def collect_garbage(self) -> None:
        """Collects some garbage if enough objects were allocated. Called after a step's answer, not by the engine."""
        self._collector.between_steps()

    def answer_launched(self) -> None:
        """Answers the launched steps on rank 0, for at most RANK_END_S: one may hang. Not called by the engine."""
        if self._waiter is not None:
            self._waiter.drain(RANK_END_S)

    def leave(self) -> None:
        """Ends the operations that ranks share on their devices, after the last steps. No call may follow."""
        self.answer_launched()
        self.runner.shard.collectives.close()

    def _say(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._said >= _PROGRESS_INTERVAL_S:
            self._said = now
            self._link.send(what, done, total)


def serve(rank: Rank, link: Link) -> None:
    """Executes calls until the engine ends the connection.

    A call that fails is answered and is the last; on rank 0 after steps that were launched before it, unless they hang.
    """
    calls: dict[str, Callable[..., Any]] = {
        each.__name__: each
        for each in (
            rank.open_door,
            rank.join,
            rank.join_engines,
            rank.count_engines_with_work,
            rank.load,
            rank.share_sums,
            rank.kv_memory,
            rank.allocate,
            rank.warmup,
            rank.capture_graphs,
            rank.describe,
            rank.forward,
            rank.leave,
        )
    }
    for serial, name, *arguments in link.messages():
        try:
            result = calls[name](*arguments)
        except Exception as error:
            rank.answer_launched()
            _answer_failed(link, serial, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(_answer, link, serial))
        elif result is not None or name != "forward":
            link.send("done", serial, result)
        if name == "forward":
            rank.collect_garbage()


def _answer(link: Link, serial: int, step: Future[TimedOutput]) -> None:
    error = step.exception()
    if error is None:
        link.send("done", serial, step.result())
    else:
        _answer_failed(link, serial, error)


def _answer_failed(link: Link, serial: int, error: BaseException) -> None:
    kind = "model" if isinstance(error, ModelError | ApiError) else type(error).__name__
    link.send("failed", serial, kind, " ".join(str(error).split()))


def _connect(target: str, rank: int) -> tuple[socket.socket, FrameReader]:
    """Uses the inherited connection, or connects to the engine's machine, whose door admits this rank."""
    if target.startswith("fd:"):
        return socket.socket(fileno=int(target.removeprefix("fd:"))), FrameReader()
    host, _, port = target.rpartition(":")
    sock, reader = knock_until_admitted(host.strip("[]"), int(port), rank, os.environ[SECRET_VARIABLE])
    sock.settimeout(None)
    # The engine has proved the secret. A thread of it always reads, so `notice_lost_machine` holds for this side.
    reader.has_extensions = True
    return sock, reader


def main() -> None:
    """Runs one rank until its engine ends."""
    rank, target, model = sys.argv[1:]
    # A terminal's Ctrl-C and an init system's SIGTERM go to all processes; the engine drains and then ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard_standard_streams()
    setup_logging(service=f"rank-{rank}")
    if target.startswith("fd:"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(*_connect(target, int(rank)))
    # Until then, SIGTERM ends a rank that waits for an engine on another machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(Rank(int(rank), link, model), link)
    # Without the interpreter's end: other threads may be inside of a collective.
    exit_now(0)


if __name__ == "__main__":
    main()
