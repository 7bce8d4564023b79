"""A machine that serves ranks only (`fissile worker --node-rank 1`): keeps its ranks running for an engine elsewhere.

A rank that is not connected waits for the engine; one whose engine has ended ends too and is started anew, so the
machine is ready for the engine's next start. What is wrong with the model the engine says, on its own machine. All
machines of a group often get SIGTERM at once, so ranks stay for the answers of an engine that drains.

With a health port, liveness is SERVING while this process runs. Readiness is SERVING while the processes of all its
ranks run.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from common.rpc.server import HealthServer
from worker.ranks.rank_peers import spawn_rank
from worker.ranks.topology import Topology

log = structlog.get_logger(__name__)

_LOOK_S: Final = 0.25
_AGAIN_S: Final = 1.0


async def run_node(
    topology: Topology,
    model: str,
    threads: int,
    stop: asyncio.Event,
    drain_timeout_s: float,
    health: HealthServer | None = None,
) -> int:
    """Keeps this machine's ranks running until `stop`, and then until their engine has ended. Returns the exit code.

    Args:
        topology: all ranks, and which of them run on this machine.
        model: checkpoint folder.
        threads: threads of each rank.
        stop: event after which no rank is started again.
        drain_timeout_s: longest time after `stop` for an engine that drains at the same time.
        health: health service for probes; None opens no port.

    Raises:
        PortTakenError: the port of `health` cannot be opened.
    """
    host, port = topology.meeting_point
    target = f"{host}:{port}"
    if health is not None:
        await health.start()
    probed = {} if health is None else {"health": health.address}
    log.info("serving ranks", ranks=list(topology.local_ranks), engine=target, **probed)

    async def tell() -> None:
        if health is not None:
            await health.set_serving(all(rank.is_running for rank in ranks))

    ranks = [
        _Kept(rank, partial(spawn_rank, rank, target, topology, model, threads), tell) for rank in topology.local_ranks
    ]
    try:
        await asyncio.gather(*(rank.keep(stop) for rank in ranks))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout_s):
                await asyncio.gather(*(rank.drain() for rank in ranks))
    finally:
        for rank in ranks:
            rank.end()
        if health is not None:
            await health.close()
    log.info("ranks ended")
    return 0


class _Kept:
    """The process of one rank, restarted whenever it ends.

    Args:
        rank: number of the rank.
        spawn: starts the process.
        tell: called after each start and each end of the process.
    """

    def __init__(
        self, rank: int, spawn: Callable[[], subprocess.Popen[bytes]], tell: Callable[[], Awaitable[None]]
    ) -> None:
        self._rank = rank
        self._spawn = spawn
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """True if the rank's process runs."""
        return self._process is not None and self._process.poll() is None

    async def keep(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            # On the event loop's thread, which lasts as long as this process: the kernel ends ranks with it.
            self._process = self._spawn()
            await self._tell()
            while self._process.poll() is None and not stop.is_set():
                await _wait(stop, _LOOK_S)
            await self._tell()
            if not stop.is_set():
                log.info("rank ended; starting it again", rank=self._rank, exit_code=self._process.returncode)
                await _wait(stop, _AGAIN_S)

    async def drain(self) -> None:
        """Ends a rank that waits for an engine. Waits for the end of one that has an engine, which ends it."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
