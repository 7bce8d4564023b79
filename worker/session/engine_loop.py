"""The engine on the event loop's side: sends commands to its thread and delivers the thread's outputs.

Invariant: a failure leaves no sequence live. An output that cannot be delivered counts as a failure of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

import structlog

from common.errors import EngineError
from common.telemetry import names
from worker.engine.core import EngineCore
from worker.engine.figures import EngineFigures
from worker.engine.outputs import EngineLoad
from worker.engine.step_record import StepRing
from worker.engine.turns import Cancel, EndAll, Flush, SetDeadline, Submit, TicketReceipt, Turn, WatchBlocks
from worker.session.block_log import BlockLog
from worker.session.cache_events import KvLog
from worker.session.deliveries import Deliveries, OwnedSequence
from worker.session.engine_thread import EngineThread

log = structlog.get_logger(__name__)


class EngineState(enum.Enum):
    """Stage of an engine's life."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    FAILED = enum.auto()


class EngineLoop:
    """The event loop's end of the engine.

    Attributes:
        state: starting, running or failed.
        load: as of the last turn; None before the start.
        num_steps: engine steps since the start.
        figures: for metrics, as of the last turn; replaced, never changed, so any thread may read them.
        on_figures: called with the figures of each turn that made a step; None for no callback.
        kv_log: what the prefix cache holds; a new one for each engine.
        block_log: the cached blocks one by one, after `watch_blocks`; a new one for each engine, None before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.on_figures: Callable[[EngineFigures], None] | None = None
        self._reset()
        self._idle = asyncio.Event()
        self._idle.set()
        self._deliveries = Deliveries()
        self._thread: EngineThread | None = None

    def _reset(self) -> None:
        self.state = EngineState.STARTING
        self.load: EngineLoad | None = None
        self.num_steps = 0
        self.figures: EngineFigures | None = None
        self.kv_log = KvLog()
        self.block_log: BlockLog | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._flushes: set[asyncio.Future[int]] = set()

    def start(self, build: Callable[[], EngineCore]) -> None:
        """Starts the thread, which builds the engine; after a failure, a new thread with a new engine."""
        if self.state is EngineState.FAILED:
            self._reset()
        mine = self._failed
        self._thread = EngineThread(
            build,
            started=lambda turn: self._post(mine, self._on_started, turn),
            turned=lambda turn: self._post(mine, self._on_turn, turn),
            failed=lambda error: self._post(mine, self._on_failed, error),
            clock=self._clock,
        )
        self._thread.start()

    async def wait_started(self) -> None:
        """Waits until the engine runs."""
        await asyncio.shield(self._started)

    async def wait_failed(self) -> str:
        """Waits until the engine has failed. Returns one line that says how."""
        return await asyncio.shield(self._failed)

    async def wait_idle(self) -> None:
        """Waits until no sequence is live."""
        await self._idle.wait()

    @property
    def num_live(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._deliveries)

    @property
    def draft_counts(self) -> list[tuple[int, int]]:
        """Verified and accepted drafts since the engine's start, by their position after a token."""
        drafts = {} if self.figures is None else self.figures.drafts
        return [counts for (method, _), counts in drafts.items() if method != names.GRAMMAR_DRAFTS]

    def busy_s(self, now: float) -> float:
        """Duration of the current step so far; 0 when idle."""
        return 0.0 if self._thread is None else self._thread.busy_s(now)

    @property
    def steps(self) -> StepRing:
        """Records of the newest steps of the engine, or of one that has failed."""
        return StepRing() if self._thread is None else self._thread.steps

    def submit_group(self, receipt: TicketReceipt, live: Many[OwnedSequence]) -> None:
        """Submits a group that a router has released: it enters the waiting queue as a whole."""
        self._submit(receipt, live)

    def submit(self, *live: OwnedSequence) -> None:
        """Submits the sequences of a call without a router, which pass this worker's own delay gate."""
        self._submit(None, live)

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences at the thread's next turn; unknown ids are ignored."""
        ids = [seq_id for seq_id in seq_ids if seq_id in self._deliveries]
        if ids and self._thread is not None:
            self._thread.put(Cancel(ids))

    def set_deadline(self, seq_id: int, deadline: float | None) -> None:
        """Gives a sequence another deadline at the thread's next turn; an unknown id is ignored."""
        if self._thread is not None:
            self._thread.put(SetDeadline(seq_id, deadline))

    def end_all(self, message: str) -> None:
        """Ends every sequence with EndReason.CANCELLED: the worker ends, and another worker may continue them."""
        if self._thread is not None:
            self._thread.put(EndAll(message))

    async def flush(self) -> int:
        """Drops cached blocks that no sequence holds, at the thread's next turn. Returns their number.

        Raises:
            EngineError: the engine does not run, or fails meanwhile.
        """
        if self.state is not EngineState.RUNNING or self._thread is None:
            raise EngineError(f"the engine is {self.state.name.lower()}")
        flushed: asyncio.Future[int] = self._loop.create_future()
        self._flushes.add(flushed)
        try:
            self._thread.put(Flush(lambda blocks: None if flushed.done() else flushed.set_result(blocks)))
            return await flushed
        finally:
            self._flushes.discard(flushed)

    def watch_blocks(self) -> BlockLog:
        """Log of this engine's cached blocks, kept from the first call on.

        Its first number is the time, so that numbers rise from engine to engine, and from process to process.
        """
        if self.block_log is None:
            self.block_log = BlockLog(time.time_ns() // 1000)
            if self._thread is not None:
                self._thread.put(WatchBlocks())
        return self.block_log

    def stop(self) -> None:
        """Tells the thread to end after its current step."""
        if self._thread is not None:
            self._thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; blocks the event loop. False if it has not ended."""
        return self._thread is None or self._thread.join(timeout_s)

    def _submit(self, receipt: TicketReceipt | None, live: Many[OwnedSequence]) -> None:
        self._deliveries.add(live)
        if live:
            self._idle.clear()
        if self.state is EngineState.FAILED:
            self._end_live(self._failed.result())
        elif self._thread is not None:
            self._thread.put(Submit(receipt, [each.seq for each in live]))

    def _post(self, failed: asyncio.Future[str], handle: Callable[..., None], event: object) -> None:
        # The event loop may be gone if the process ends in the middle of a step.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, failed, handle, event)

    def _take(self, failed: asyncio.Future[str], handle: Callable[..., None], event: object) -> None:
        """Handles an event of the thread. If the handler raises, the engine has failed, because its later events would
        be lost.

        `failed` belongs to the thread that sent the event.
        """
        if failed.done():
            return
        try:
            handle(event)
        except Exception as error:
            self.stop()
            self._on_failed(error)

    def _on_started(self, turn: Turn) -> None:
        self.state, self.load, self.figures = EngineState.RUNNING, turn.load, turn.figures
        self.kv_log.append(turn.granules)
        self._started.set_result(None)

    def _on_turn(self, turn: Turn) -> None:
        if self.on_figures is not None and turn.step != self.num_steps:
            self.on_figures(turn.figures)
        self.load, self.num_steps, self.figures = turn.load, turn.step, turn.figures
        self._deliveries.deliver(turn)
        self.kv_log.append(turn.granules)
        self.kv_log.append_digests(turn.kv_digests)
        if self.block_log is not None:
            self.block_log.append(turn.blocks)
        for done, blocks in turn.flushed:
            done(blocks)
        if not self._deliveries:
            self._idle.set()

    def _on_failed(self, error: Exception) -> None:
        message = " ".join(str(error).split()) or type(error).__name__
        was, self.state = self.state, EngineState.FAILED
        self._failed.set_result(message)
        if not self._started.done():
            self._started.set_exception(error)
        if was is not EngineState.STARTING:
            log.error("engine failed", error=message, exc_info=error)
        for flush in self._flushes:
            # It may have been answered in this turn of the event loop already.
            if not flush.done():
                flush.set_exception(EngineError(message))
        self._end_live(message)

    def _end_live(self, message: str) -> None:
        try:
            self._deliveries.end_all(self.num_steps, message, self._clock())
        finally:
            self._idle.set()
