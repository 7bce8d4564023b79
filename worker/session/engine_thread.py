"""The thread that owns the EngineCore.

It empties its inbox once per turn, before it schedules, so that a group that was released together is in one batch. It
reports a turn's results once. It sleeps on a condition while no sequence is unfinished.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from common.errors import EngineError
from worker.engine.core import EngineCore
from worker.engine.step_record import StepRing
from worker.engine.turns import Command, EngineTurns, Turn
from worker.garbage import GarbageCollector

# Wait while the delay gate holds all unfinished sequences, or they wait for KV tiers.
_GATED_WAIT_S: Final = 0.001


class EngineThread:
    """Runs the engine. Other threads may only call `start`, `put`, `stop`, `join` and `busy_s`, and read `steps`.

    Args:
        build: makes the engine, on the thread, because loading a model takes long.
        started, turned, failed: callbacks, called on the thread.
        clock: monotonic seconds.

    Attributes:
        steps: records of the engine's newest steps; empty until the engine is built.
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
        self.steps = StepRing()
        self._build = build
        self._started = started
        self._turned = turned
        self._failed = failed
        self._clock = clock
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._collector = GarbageCollector(clock)
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queues a command for the thread's next turn."""
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def stop(self) -> None:
        """Ends the thread after its current step."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end. False if it has not ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def busy_s(self, now: float) -> float:
        """Duration of the current step so far; 0 without one."""
        began = self._turn_began
        return 0.0 if began is None else max(0.0, now - began)

    def _run(self) -> None:
        try:
            with contextlib.closing(self._build()) as core:
                core.steps.unix_offset_s = time.time() - self._clock()
                self.steps = core.steps
                turns = EngineTurns(core, self._clock)
                self._collector.start()
                self._started(turns.report())
                while self._turn(turns):
                    self._collector.between_steps()
        except Exception as error:
            self._failed(error)
        except BaseException as error:
            # A thread that ended silently would leave its sequences waiting for ever.
            self._failed(EngineError(f"{type(error).__name__}: {error}"))
        finally:
            self._collector.stop()

    def _turn(self, turns: EngineTurns) -> bool:
        """Waits for work and does it. False if the thread must end."""
        if not turns.has_work:
            self._wait_idle(turns.core)
        commands = self._take()
        if commands is None:
            return False
        steps = turns.core.num_steps
        self._turn_began = self._clock()
        turn = turns.run(commands)
        self._turn_began = None
        if (
            commands
            or turn.outputs
            or turn.granules
            or turn.kv_digests
            or turn.blocks
            or turn.phases
            or turn.step != steps
        ):
            self._turned(turn)
        elif turns.has_work and not turns.core.others_have_work:
            self._wait(_GATED_WAIT_S)
        return True

    def _wait_idle(self, core: EngineCore) -> None:
        """Waits until there are commands. Raises when the process that computes the steps is lost meanwhile."""
        while not self._wait(core.idle_check_s) and not core.check():
            self._collector.while_idle()

    def _take(self) -> list[Command] | None:
        """All queued commands. None if the thread must end."""
        with self._condition:
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _wait(self, timeout_s: float) -> bool:
        """Waits for a command. False if none arrived."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._commands) or self._stopping, timeout_s)
