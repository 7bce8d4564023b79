"""A router's figures at one moment, and how threads that export them get the newest ones."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from common.limits import FIGURES_EVERY_S, FIGURES_WAIT_S
from common.telemetry.failures import harmless
from router.scheduling.dispatcher import ClassLoad
from router.scheduling.lanes import LaneCounts
from router.workers.worker_record import KnownWorker


class Usage(NamedTuple):
    """Tokens of answers that have begun: of their prompts, of those in a prefix cache, and those written to clients."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def plus(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(self.prompt + other.prompt, self.cached + other.cached, self.generated + other.generated)


class Failure(NamedTuple):
    """Kind of a failed request.

    Attributes:
        model: its model, "" if it is not served.
        reason: of its ErrorInfo, or its status.
        fault: `client` or `server`.
    """

    model: str
    reason: str
    fault: str


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """A router at one moment; totals are since its start.

    Attributes:
        in_flight: Generate and Chat requests that have not ended.
        queues: what waits, by priority class.
        waiting: number of waiting requests of each model that has any.
        lanes: what the workers' lanes do.
        workers: all workers.
        tables: entries of every table that grows, by name.
        lost: attempts that ended before their request, by worker id and reason.
        releases: groups of requests that have gone to workers.
        released: requests in them.
        adopted: requests that have gone on with the sequence of a router that is gone.
        unadopted: those that meant to, and began anew.
        failed: requests that have failed.
        usage: what answers have come to, by model and status.
        finished: complete answers, by model and finish reason.
        config_version: of the configuration in force.
        audits: answers that were chosen to be audited, by what came of it.
        kv_digests: digests of KV blocks that workers have sent, by what came of their comparison.
        kv_disputes: disputes about KV blocks, by what came of them.
    """

    in_flight: int = 0
    queues: tuple[ClassLoad, ...] = ()
    waiting: Mapping[str, int] = field(default_factory=dict)
    lanes: LaneCounts = field(default_factory=LaneCounts)
    workers: tuple[KnownWorker, ...] = ()
    tables: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[tuple[str, str], int] = field(default_factory=dict)
    releases: int = 0
    released: int = 0
    adopted: int = 0
    unadopted: int = 0
    failed: Mapping[Failure, int] = field(default_factory=dict)
    usage: Mapping[tuple[str, str], Usage] = field(default_factory=dict)
    finished: Mapping[tuple[str, str], int] = field(default_factory=dict)
    config_version: int = 1
    audits: Mapping[str, int] = field(default_factory=dict)
    kv_digests: Mapping[str, int] = field(default_factory=dict)
    kv_disputes: Mapping[str, int] = field(default_factory=dict)


class NewestSnapshot:
    """Snapshots that are made on the router's event loop when another thread reads them.

    A snapshot takes processor time on that loop, so none is made that no reader asks for.

    Invariant: a reader waits for FIGURES_WAIT_S at most. If the loop is busy for longer, it gets the snapshot before.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = RouterSnapshot()
        self._make: Callable[[], RouterSnapshot] = RouterSnapshot
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made = float("-inf")
        # Set when the snapshot that was asked for is made.
        self._is_made = threading.Event()
        self._is_made.set()
        self._lock = threading.Lock()

    def start(self, make: Callable[[], RouterSnapshot]) -> None:
        """Makes snapshots with `make` on the running event loop from now on."""
        self._make, self._loop = make, asyncio.get_running_loop()

    def stop(self) -> None:
        """Makes the last snapshot, on the event loop."""
        self._loop = None
        self._take()

    def read(self) -> RouterSnapshot:
        """The snapshot of the last FIGURES_EVERY_S, or a new one; for any thread but the event loop's."""
        with self._lock:
            loop = self._loop
            is_old = self._clock() - self._made >= FIGURES_EVERY_S
            if loop is not None and is_old and self._is_made.is_set():
                self._is_made.clear()
                # A loop that is closed has no newer figures.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._take)
                    self._is_made.wait(FIGURES_WAIT_S)
        return self._value

    @harmless("metrics")
    def _take(self) -> None:
        try:
            self._value = self._make()
        finally:
            self._made = self._clock()
            self._is_made.set()
