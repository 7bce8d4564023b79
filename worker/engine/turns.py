"""Turns of the engine, without the thread: commands go in, outputs come out and find their listeners.

`EngineTurns` belongs to the thread that owns the EngineCore, `Deliveries` to the event loop; simulations call both in
turn. Invariants: every sequence submitted gets exactly one output with an end, also when the engine fails; outputs of
one sequence come in order; nothing of a live sequence is read on two threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from common.process.tasks import run_guarded
from common.telemetry.metrics import EngineFigures
from common.telemetry.tracing import DecodeWork, SequenceTimes
from worker.engine.batch import RequestOutput
from worker.engine.core import EngineCore, LoadReport
from worker.engine.outputs import PROTO_REASONS, End, SequenceOutput, Start
from worker.engine.sequence import EndReason, Sequence

_OVERLOAD: Final = "the worker has no room for it"
_NOT_A_NUMBER: Final = "the model's output is not a number"


class Listener(Protocol):
    """Receiver of the outputs of sequences. Called on the event loop."""

    def on_output(self, output: SequenceOutput) -> None:
        """One step's output of one sequence."""
        ...

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """After the outputs of a turn that concerned this listener."""
        ...


@dataclass(frozen=True, slots=True)
class Submit:
    """Sequences for the waiting queue; `serial` is None for one that passes the engine's own delay gate."""

    listener: Listener
    serial: int | None
    seqs: Many[Sequence]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Sequences to end; unknown ids are ignored."""

    seq_ids: Many[int]


@dataclass(frozen=True, slots=True)
class EndAll:
    """Ends everything with END_REASON_CANCELLED; `message` tells it from a cancel of the router."""

    message: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Drops what the prefix cache has and no sequence holds; `done` is told how many blocks, on the event loop."""

    done: Callable[[int], None]


Command = Submit | Cancel | EndAll | Flush


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one turn.

    `seen` has the serial numbers of the groups taken in before its step, `granules` the changes of the prefix cache
    (`BlockManager.take_granule_changes`).
    """

    step: int
    load: LoadReport
    outputs: list[SequenceOutput] = field(default_factory=list)
    seen: list[tuple[Listener, int]] = field(default_factory=list)
    figures: EngineFigures = field(default_factory=EngineFigures)
    granules: list[int] = field(default_factory=list)
    flushed: list[tuple[Callable[[int], None], int]] = field(default_factory=list)


@dataclass(slots=True)
class _Tracked:
    """A live sequence on the engine thread; `have` counts the tokens handed out, prompt included."""

    seq: Sequence
    have: int
    started: bool = False
    # Steps and tokens of the engine at its first token.
    begun: tuple[int, int] = (0, 0)

    def output(self, token_ids: list[int], end: End | None, done: tuple[int, int] = (0, 0)) -> SequenceOutput:
        """The next output; `done` says the steps and tokens of the engine so far, with the first one and the last."""
        first_pos, self.have = self.have, self.have + len(token_ids)
        start = None
        if token_ids and not self.started:
            self.started, self.begun = True, done
            start = _start(self.seq)
        times = None
        if end is not None:
            steps, tokens = done[0] - self.begun[0], done[1] - self.begun[1]
            times = sequence_times(self.seq, DecodeWork(steps, tokens, self.seq.num_preemptions))
        return SequenceOutput(self.seq.id, first_pos, token_ids, start, end, times)


def _start(seq: Sequence) -> Start:
    """Facts at the first token, read on the engine thread."""
    scheduled = seq.arrive_time if seq.first_scheduled_time is None else seq.first_scheduled_time
    first_token = scheduled if seq.first_token_time is None else seq.first_token_time
    return Start(seq.num_prompt_tokens, seq.num_cached_tokens, scheduled - seq.arrive_time, first_token - scheduled)


def sequence_times(seq: Sequence, decode: DecodeWork | None = None) -> SequenceTimes:
    """Timestamps of a sequence that has ended, and what was done meanwhile, as far as that is known."""
    ended = seq.arrive_time if seq.leave_time is None else seq.leave_time
    return SequenceTimes(seq.arrive_time, seq.first_scheduled_time, seq.first_token_time, ended, decode)


class _Totals:
    """Sums of the outputs since the start; `ended` by reason."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.ended: Counter[str] = Counter()

    def count(self, outputs: Iterable[SequenceOutput]) -> None:
        """Adds a turn's."""
        for output in outputs:
            self.generated_tokens += len(output.token_ids)
            if output.start is not None:
                self.prompt_tokens += output.start.prompt_tokens
                self.cached_tokens += output.start.cached_tokens
            if output.end is not None:
                self.ended[_reason(output.end)] += 1


def _reason(end: End) -> str:
    """In lower case, without the enum's prefix: `eos`, `length`, `cancelled`."""
    return wpb.EndReason.Name(end.reason).removeprefix("END_REASON_").lower()


class EngineTurns:
    """Runs an EngineCore turn by turn: first all commands, then one step.

    Args:
        core: the engine.
        clock: monotonic seconds.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float]) -> None:
        self.core = core
        self._clock = clock
        self._tracked: dict[int, _Tracked] = {}
        self._totals = _Totals()
        self._block_manager = core.scheduler.block_manager
        self._block_manager.watch_granules()

    @property
    def has_work(self) -> bool:
        """True if a turn without commands would do something."""
        return self.core.has_unfinished()

    def run(self, commands: Iterable[Command]) -> Turn:
        """One turn.

        Raises:
            EngineDeadError: the runner failed; what the engine holds is lost.
        """
        outputs: list[SequenceOutput] = []
        seen: list[tuple[Listener, int]] = []
        flushed: list[tuple[Callable[[int], None], int]] = []
        for command in commands:
            match command:
                case Submit(listener, serial, seqs):
                    if serial is not None:
                        seen.append((listener, serial))
                    outputs += self._submit(seqs, gated=serial is None)
                case Cancel(seq_ids):
                    for seq_id in seq_ids:
                        self.core.abort(seq_id)
                case EndAll(message):
                    # What was cancelled before has no such message: it ends as its router wished.
                    outputs += [self._output(out) for out in self.core.take_outputs()]
                    outputs += [self._output(out, message) for out in self.core.abort_all(EndReason.CANCELLED)]
                case Flush(done):
                    flushed.append((done, self.core.scheduler.block_manager.flush()))
        if self.core.has_unfinished():
            outputs += [self._output(out) for out in self.core.step().outputs]
            # After the step, which has had its chance to take them.
            outputs += [self._output(out, _OVERLOAD) for out in self.core.return_overdue(self._clock())]
        self._totals.count(outputs)
        return replace(self.report(outputs, seen), flushed=flushed) if flushed else self.report(outputs, seen)

    def report(
        self, outputs: list[SequenceOutput] | None = None, seen: list[tuple[Listener, int]] | None = None
    ) -> Turn:
        """Snapshot of the engine's load and metrics, with the outputs of this turn."""
        load, granules = self.core.load(), self._block_manager.take_granule_changes()
        return Turn(self.core.num_steps, load, outputs or [], seen or [], self._figures(load), granules)

    def _figures(self, load: LoadReport) -> EngineFigures:
        scheduler, totals = self.core.scheduler, self._totals
        return EngineFigures(
            running=len(scheduler.running),
            waiting=load.waiting_seqs,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            block_size=self.core.config.kv_cache_block_size,
            steps=self.core.num_steps,
            preemptions=scheduler.num_preemptions,
            nan_rows=scheduler.num_nan_rows,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            draft_tokens=scheduler.spec_stats.total_draft_tokens,
            accepted_tokens=scheduler.spec_stats.total_accepted_tokens,
            ended=dict(totals.ended),
        )

    def _submit(self, seqs: Many[Sequence], *, gated: bool) -> list[SequenceOutput]:
        """Gives the engine those that it can run; the outputs end the others."""
        refused: list[SequenceOutput] = []
        accepted: list[Sequence] = []
        for seq in seqs:
            try:
                self.core.validate(seq)
            except ApiError as error:
                seq.leave_time = self._clock()
                end = End(seq.num_tokens, wpb.END_REASON_INVALID, message=str(error))
                refused.append(_Tracked(seq, seq.num_tokens).output([], end))
            else:
                accepted.append(seq)
                self._tracked[seq.id] = _Tracked(seq, seq.num_tokens)
        if gated:
            for seq in accepted:
                self.core.add_request(seq)
        else:
            self.core.add_group(accepted)
        return refused

    def _output(self, out: RequestOutput, message: str = "") -> SequenceOutput:
        tracked = self._tracked[out.request_id]
        end = None
        if out.finished:
            del self._tracked[out.request_id]
            assert out.end_reason is not None
            stop = out.stop_token_sequence
            if out.end_reason is EndReason.NOT_A_NUMBER:
                message = _NOT_A_NUMBER
            end = End(
                tracked.have + len(out.output_tokens),
                PROTO_REASONS[out.end_reason],
                out.stop_token_id,
                None if stop is None else tuple(stop),
                message,
            )
        if tracked.started and end is None:
            return tracked.output(out.output_tokens, None)
        return tracked.output(out.output_tokens, end, (self.core.num_steps, self._totals.generated_tokens))


@dataclass(slots=True)
class _Live:
    """A live sequence on the event loop; `have` counts the tokens that have come, prompt included."""

    seq: Sequence
    listener: Listener
    have: int


class Deliveries:
    """Listeners of the live sequences."""

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._live

    def add(self, listener: Listener, seqs: Iterable[Sequence]) -> None:
        """The listener gets all outputs of these sequences."""
        for seq in seqs:
            self._live[seq.id] = _Live(seq, listener, seq.num_tokens)

    def deliver(self, turn: Turn) -> None:
        """Hands out what a turn produced; each listener concerned is told once of the step."""
        concerned: dict[Listener, int | None] = {}
        for output in turn.outputs:
            concerned.setdefault(self._hand_out(output))
        concerned.update(turn.seen)
        for listener, submit_seen in concerned.items():
            listener.on_step(turn.step, submit_seen)

    def end_all(self, step: int, message: str, now: float) -> None:
        """Ends every live sequence with END_REASON_ERROR: the engine has failed and says nothing more.

        A listener that fails costs the others nothing: it may be why the engine has failed.
        """
        listeners: dict[Listener, None] = {}
        for live in list(self._live.values()):
            live.seq.leave_time = now
            end = End(live.have, wpb.END_REASON_ERROR, message=message)
            listeners[live.listener] = None
            output = SequenceOutput(live.seq.id, live.have, [], None, end, sequence_times(live.seq))
            run_guarded("delivery", partial(self._hand_out, output), sequence=live.seq.id)
        for listener in listeners:
            run_guarded("delivery", partial(listener.on_step, step, None))
        self._live.clear()

    def _hand_out(self, output: SequenceOutput) -> Listener:
        live = self._live[output.seq_id]
        # First: a sequence whose listener fails is live still, and gets its end from `end_all`.
        live.listener.on_output(output)
        live.have = output.first_pos + len(output.token_ids)
        if output.end is not None:
            del self._live[output.seq_id]
        return live.listener
