"""The engine thread, and its end on the event loop.

One thread owns the EngineCore. It empties its inbox once per turn, before it schedules, so that a group which has been
released together is in one batch; it hands what a turn produced to the event loop with exactly one
`call_soon_threadsafe`. It sleeps on a condition when nothing is unfinished. After a failure no sequence is left live,
whichever of the two failed: what can not be handed out on the event loop is a failure of the engine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

import structlog

from common.errors import EngineError
from common.telemetry.metrics import EngineFigures
from worker.engine.core import EngineCore
from worker.engine.load import LoadReport
from worker.engine.turns import Cancel, Command, EndAll, EngineTurns, Flush, Receipt, Submit, Turn
from worker.garbage import Collector
from worker.session.cache_events import KvLog
from worker.session.deliveries import Deliveries, LiveSequence

log = structlog.get_logger(__name__)

# How long the engine thread waits when it has unfinished sequences but no work: the delay gate holds them all.
_GATED_WAIT_S = 0.001


class EngineState(enum.Enum):
    """Stage of the engine's life."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    FAILED = enum.auto()


class EngineThread:
    """The thread's own half. Only `start`, `put`, `stop`, `join` and `busy_s` may be called from outside.

    Args:
        build: makes the engine, on the thread, since loading a model takes long.
        started, turned, failed: told what happened, on the thread.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        build: Callable[[], EngineCore],
        *,
        started: Callable[[Turn], None],
        turned: Callable[[Turn], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], float],
    ) -> None:
        self._build = build
        self._started = started
        self._turned = turned
        self._failed = failed
        self._clock = clock
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._collector = Collector(clock)
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Gives the thread something to do before its next step."""
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end. False when it has not come."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def busy_s(self, now: float) -> float:
        """For how long the current step has been running; 0 when none is."""
        began = self._turn_began
        return 0.0 if began is None else max(0.0, now - began)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._build()) as core:
                turns = EngineTurns(core, self._clock)
                self._collector.start()
                self._started(turns.report())
                while self._turn(turns):
                    self._collector.between_steps()
        except Exception as error:
            self._failed(error)
        except BaseException as error:
            # A thread that ends in silence would leave its sequences waiting for ever.
            self._failed(EngineError(f"{type(error).__name__}: {error}"))
        finally:
            self._collector.stop()

    def _turn(self, turns: EngineTurns) -> bool:
        """Waits for something to do and does it. False when the thread must end."""
        if not turns.has_work:
            self._wait_idle(turns.core)
        commands = self._take()
        if commands is None:
            return False
        steps = turns.core.num_steps
        self._turn_began = self._clock()
        turn = turns.run(commands)
        self._turn_began = None
        if commands or turn.outputs or turn.granules or turn.step != steps:
            self._turned(turn)
        elif turns.has_work:
            self._wait(_GATED_WAIT_S)
        return True

    def _wait_idle(self, core: EngineCore) -> None:
        """Waits until there is something to do; raises when what computes the steps is lost meanwhile."""
        while not self._wait(core.idle_check_s) and not core.check():
            self._collector.while_idle()

    def _take(self) -> list[Command] | None:
        """All commands. None when the thread must end."""
        with self._condition:
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _wait(self, timeout_s: float) -> bool:
        """Waits until there is something to do. False when nothing came."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._commands) or self._stopping, timeout_s)


class EngineLoop:
    """The event loop's end of the engine.

    Attributes:
        state: starting, running or failed.
        load: as of the last turn; None before the start.
        num_steps: engine steps since the start.
        figures: for metrics, as of the last turn; replaced, never changed, so any thread may read them.
        kv_log: what the prefix cache holds; a new one for each engine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._reset()
        self._idle = asyncio.Event()
        self._idle.set()
        self._deliveries = Deliveries()
        self._thread: EngineThread | None = None

    def _reset(self) -> None:
        self.state = EngineState.STARTING
        self.load: LoadReport | None = None
        self.num_steps = 0
        self.figures: EngineFigures | None = None
        self.kv_log = KvLog()
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
        """Waits until the engine runs; raises what `build` raised."""
        await asyncio.shield(self._started)

    async def wait_failed(self) -> str:
        """Waits until the engine has failed; one line that says how."""
        return await asyncio.shield(self._failed)

    async def wait_idle(self) -> None:
        """Waits until no sequence is live."""
        await self._idle.wait()

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._deliveries)

    def busy_s(self, now: float) -> float:
        """For how long the current step has been running; 0 when idle."""
        return 0.0 if self._thread is None else self._thread.busy_s(now)

    def submit_group(self, receipt: Receipt, live: Many[LiveSequence]) -> None:
        """Takes a group that a router has released: it enters the waiting queue whole."""
        self._submit(receipt, live)

    def submit(self, live: LiveSequence) -> None:
        """Takes one sequence that passes this worker's own delay gate."""
        self._submit(None, [live])

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences at the thread's next turn; unknown ids are ignored."""
        ids = [seq_id for seq_id in seq_ids if seq_id in self._deliveries]
        if ids and self._thread is not None:
            self._thread.put(Cancel(ids))

    def end_all(self, message: str) -> None:
        """Ends everything with EndReason.CANCELLED: the worker goes, and another may go on with it."""
        if self._thread is not None:
            self._thread.put(EndAll(message))

    async def flush(self) -> int:
        """Drops what the prefix cache has and no sequence holds, at the thread's next turn; how many blocks that was.

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

    def stop(self) -> None:
        """Lets the thread end after its current step."""
        if self._thread is not None:
            self._thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; blocks the event loop. False when it has not come."""
        return self._thread is None or self._thread.join(timeout_s)

    def _submit(self, receipt: Receipt | None, live: Many[LiveSequence]) -> None:
        self._deliveries.add(live)
        if live:
            self._idle.clear()
        if self.state is EngineState.FAILED:
            self._end_live(self._failed.result())
        elif self._thread is not None:
            self._thread.put(Submit(receipt, [each.seq for each in live]))

    def _post(self, failed: asyncio.Future[str], handle: Callable[..., None], event: object) -> None:
        # The event loop may be gone when the process ends in the middle of a step.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, failed, handle, event)

    def _take(self, failed: asyncio.Future[str], handle: Callable[..., None], event: object) -> None:
        """Takes an event of the thread whose failure `failed` stands for. When that can not be done, the engine has
        failed: what else it says would be lost."""
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
        self.load, self.num_steps, self.figures = turn.load, turn.step, turn.figures
        self._deliveries.deliver(turn)
        self.kv_log.append(turn.granules)
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
            # It may have been answered in this turn of the event loop, and not have been heard yet.
            if not flush.done():
                flush.set_exception(EngineError(message))
        self._end_live(message)

    def _end_live(self, message: str) -> None:
        try:
            self._deliveries.end_all(self.num_steps, message, self._clock())
        finally:
            self._idle.set()
