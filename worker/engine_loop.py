"""The engine thread, and its end on the event loop.

One thread owns the EngineCore. It empties its inbox once per turn, before it schedules, so that a group which has been
released together is in one batch; it hands what a turn produced to the event loop with exactly one
`call_soon_threadsafe`. It sleeps on a condition when nothing is unfinished.

Invariants of the event loop's end: every sequence submitted gets exactly one output with an end, also when the engine
fails; outputs of one sequence come in order; after a failure no sequence is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from common.telemetry.tracing import SequenceTimes
from worker.batch import RequestOutput
from worker.engine_core import EngineCore, LoadReport
from worker.outputs import PROTO_REASONS, End, SequenceOutput, Start
from worker.sequence import EndReason, Sequence

log = structlog.get_logger(__name__)

# How long the engine thread waits when it has unfinished sequences but no work: the delay gate holds them all.
_GATED_WAIT_S = 0.001


class EngineState(enum.Enum):
    """Where the engine is in its life."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    FAILED = enum.auto()


class Listener(Protocol):
    """Who gets the outputs of sequences. Called on the event loop."""

    def on_output(self, output: SequenceOutput) -> None:
        """One step's output of one sequence."""
        ...

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """After the outputs of a turn that concerned this listener."""
        ...


@dataclass(frozen=True, slots=True)
class _Submit:
    """Sequences for the waiting queue; `serial` is None for one that passes the engine's own delay gate."""

    listener: Listener
    serial: int | None
    seqs: Many[Sequence]


@dataclass(frozen=True, slots=True)
class _Cancel:
    seq_ids: Many[int]


@dataclass(frozen=True, slots=True)
class _EndAll:
    message: str


_Command = _Submit | _Cancel | _EndAll


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one turn of the engine thread produced."""

    step: int
    load: LoadReport
    outputs: list[SequenceOutput] = field(default_factory=list)
    seen: list[tuple[Listener, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Tracked:
    """A live sequence on the engine thread; `have` counts the tokens handed out, prompt included."""

    seq: Sequence
    have: int
    started: bool = False

    def output(self, token_ids: list[int], end: End | None) -> SequenceOutput:
        """The next output."""
        first_pos, self.have = self.have, self.have + len(token_ids)
        start = None
        if token_ids and not self.started:
            self.started = True
            start = _start(self.seq)
        times = sequence_times(self.seq) if end is not None else None
        return SequenceOutput(self.seq.id, first_pos, token_ids, start, end, times)


def _start(seq: Sequence) -> Start:
    """What is known at the first token, read on the engine thread."""
    scheduled = seq.arrive_time if seq.first_scheduled_time is None else seq.first_scheduled_time
    first_token = scheduled if seq.first_token_time is None else seq.first_token_time
    return Start(seq.num_cached_tokens, scheduled - seq.arrive_time, first_token - scheduled)


def sequence_times(seq: Sequence) -> SequenceTimes:
    """Timestamps of a sequence that has ended."""
    ended = seq.arrive_time if seq.leave_time is None else seq.leave_time
    return SequenceTimes(seq.arrive_time, seq.first_scheduled_time, seq.first_token_time, ended)


class EngineThread:
    """The thread's own half. Only `put`, `stop`, `join` and `busy_s` may be called from outside.

    Args:
        build: makes the engine, on the thread, since loading a model takes long.
        started, turned, failed: told what happened, on the thread.
    """

    def __init__(
        self,
        build: Callable[[], EngineCore],
        *,
        started: Callable[[LoadReport], None],
        turned: Callable[[_Turn], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._build = build
        self._started = started
        self._turned = turned
        self._failed = failed
        self._condition = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._stopping = False
        self._step_began: float | None = None
        self._tracked: dict[int, _Tracked] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, command: _Command) -> None:
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
        began = self._step_began
        return 0.0 if began is None else max(0.0, now - began)

    def _run(self) -> None:
        try:
            core = self._build()
            # What has been built stays, so no collection needs to look at it (a full pass takes 150 ms).
            gc.collect()
            gc.freeze()
            self._started(core.load())
            while self._turn(core):
                pass
        except Exception as error:
            self._failed(error)

    def _turn(self, core: EngineCore) -> bool:
        """Waits for something to do and does it. False when the thread must end."""
        commands = self._take(idle=not core.has_unfinished())
        if commands is None:
            return False
        outputs: list[SequenceOutput] = []
        seen: list[tuple[Listener, int]] = []
        for command in commands:
            outputs += self._apply(core, command, seen)
        before = core.num_steps
        if core.has_unfinished():
            outputs += self._step(core)
        self._turned(_Turn(core.num_steps, core.load(), outputs, seen))
        if core.num_steps == before and not outputs and core.has_unfinished():
            with self._condition:
                self._condition.wait_for(lambda: self._commands or self._stopping, _GATED_WAIT_S)
        return True

    def _take(self, *, idle: bool) -> list[_Command] | None:
        """All commands; waits for one when the engine is idle. None when the thread must end."""
        with self._condition:
            if idle:
                self._condition.wait_for(lambda: self._commands or self._stopping)
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _apply(self, core: EngineCore, command: _Command, seen: list[tuple[Listener, int]]) -> list[SequenceOutput]:
        match command:
            case _Submit(listener, serial, seqs):
                if serial is not None:
                    seen.append((listener, serial))
                return self._submit(core, seqs, gated=serial is None)
            case _Cancel(seq_ids):
                for seq_id in seq_ids:
                    core.abort(seq_id)
                return []
            case _EndAll(message):
                return [self._output(out, message) for out in core.abort_all(EndReason.ERROR)]

    def _submit(self, core: EngineCore, seqs: Many[Sequence], *, gated: bool) -> list[SequenceOutput]:
        """Gives the engine those that it can run; the outputs end the others."""
        refused: list[SequenceOutput] = []
        accepted: list[Sequence] = []
        for seq in seqs:
            try:
                core.validate(seq)
            except ApiError as error:
                seq.leave_time = time.monotonic()
                end = End(seq.num_tokens, wpb.END_REASON_INVALID, message=str(error))
                refused.append(_Tracked(seq, seq.num_tokens).output([], end))
            else:
                accepted.append(seq)
                self._tracked[seq.id] = _Tracked(seq, seq.num_tokens)
        if gated:
            for seq in accepted:
                core.add_request(seq)
        else:
            core.add_group(accepted)
        return refused

    def _step(self, core: EngineCore) -> list[SequenceOutput]:
        self._step_began = time.monotonic()
        try:
            result = core.step()
        finally:
            self._step_began = None
        return [self._output(out, "") for out in result.outputs]

    def _output(self, out: RequestOutput, message: str) -> SequenceOutput:
        tracked = self._tracked[out.request_id]
        end = None
        if out.finished:
            del self._tracked[out.request_id]
            assert out.end_reason is not None
            stop = out.stop_token_sequence
            end = End(
                tracked.have + len(out.output_tokens),
                PROTO_REASONS[out.end_reason],
                out.stop_token_id,
                None if stop is None else tuple(stop),
                message,
            )
        return tracked.output(out.output_tokens, end)


@dataclass(slots=True)
class _Live:
    """A live sequence on the event loop; `have` counts the tokens that have come, prompt included."""

    seq: Sequence
    listener: Listener
    have: int


class EngineLoop:
    """The event loop's end of the engine.

    Attributes:
        state: starting, running or failed.
        load: as of the last turn; None before the start.
        num_steps: engine steps since the start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = EngineState.STARTING
        self.load: LoadReport | None = None
        self.num_steps = 0
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._failed: asyncio.Future[str] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._live: dict[int, _Live] = {}
        self._thread: EngineThread | None = None

    def start(self, build: Callable[[], EngineCore]) -> None:
        """Starts the thread, which builds the engine."""
        self._thread = EngineThread(
            build,
            started=lambda load: self._post(self._on_started, load),
            turned=lambda turn: self._post(self._on_turn, turn),
            failed=lambda error: self._post(self._on_failed, error),
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
        return len(self._live)

    def busy_s(self, now: float) -> float:
        """For how long the current step has been running; 0 when idle."""
        return 0.0 if self._thread is None else self._thread.busy_s(now)

    def submit_group(self, listener: Listener, serial: int, seqs: Many[Sequence]) -> None:
        """Takes a group that a router has released: it enters the waiting queue whole."""
        self._submit(_Submit(listener, serial, seqs))

    def submit(self, listener: Listener, seq: Sequence) -> None:
        """Takes one sequence that passes this worker's own delay gate."""
        self._submit(_Submit(listener, None, [seq]))

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Ends sequences at the thread's next turn; unknown ids are ignored."""
        ids = [seq_id for seq_id in seq_ids if seq_id in self._live]
        if ids and self._thread is not None:
            self._thread.put(_Cancel(ids))

    def end_all(self, message: str) -> None:
        """Ends everything with END_REASON_ERROR."""
        if self._thread is not None:
            self._thread.put(_EndAll(message))

    def stop(self) -> None:
        """Lets the thread end after its current step."""
        if self._thread is not None:
            self._thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; blocks the event loop. False when it has not come."""
        return self._thread is None or self._thread.join(timeout_s)

    def _submit(self, command: _Submit) -> None:
        for seq in command.seqs:
            self._live[seq.id] = _Live(seq, command.listener, seq.num_tokens)
        if command.seqs:
            self._idle.clear()
        if self.state is EngineState.FAILED:
            self._end_live(self._failed.result())
        elif self._thread is not None:
            self._thread.put(command)

    def _post(self, handle: Callable[..., None], event: object) -> None:
        # The event loop may be gone when the process ends in the middle of a step.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(handle, event)

    def _on_started(self, load: LoadReport) -> None:
        self.state, self.load = EngineState.RUNNING, load
        self._started.set_result(None)

    def _on_turn(self, turn: _Turn) -> None:
        self.load, self.num_steps = turn.load, turn.step
        concerned: dict[Listener, int | None] = {}
        for output in turn.outputs:
            concerned.setdefault(self._deliver(output))
        concerned.update(turn.seen)
        for listener, submit_seen in concerned.items():
            listener.on_step(turn.step, submit_seen)
        if not self._live:
            self._idle.set()

    def _deliver(self, output: SequenceOutput) -> Listener:
        live = self._live[output.seq_id]
        live.have = output.first_pos + len(output.token_ids)
        if output.end is not None:
            del self._live[output.seq_id]
        live.listener.on_output(output)
        return live.listener

    def _on_failed(self, error: Exception) -> None:
        if self.state is EngineState.STARTING:
            self.state = EngineState.FAILED
            self._started.set_exception(error)
            return
        self.state = EngineState.FAILED
        log.error("engine failed", error=str(error), exc_info=error)
        message = " ".join(str(error).split())
        self._failed.set_result(message)
        self._end_live(message)

    def _end_live(self, message: str) -> None:
        """Ends every live sequence with END_REASON_ERROR, without the engine."""
        listeners: dict[Listener, None] = {}
        for live in list(self._live.values()):
            live.seq.leave_time = self._clock()
            end = End(live.have, wpb.END_REASON_ERROR, message=message)
            listeners[live.listener] = None
            self._deliver(SequenceOutput(live.seq.id, live.have, [], None, end, sequence_times(live.seq)))
        for listener in listeners:
            listener.on_step(self.num_steps, None)
        self._idle.set()
