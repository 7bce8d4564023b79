"""Turns of the engine: each applies commands and makes one step. The thread is in worker/session/engine_thread.py.

Invariants: every submitted sequence gets exactly one output with an end, unless the engine fails; outputs of one
sequence are in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.errors import ApiError
from common.telemetry import names
from worker.engine.core import EngineCore
from worker.engine.figures import EngineFigures
from worker.engine.outputs import End, EngineLoad, RequestOutput, sequence_times
from worker.engine.prefix_cache import BlockChange
from worker.engine.sequence import EndReason, Sequence
from worker.engine.sequence_ledger import PhaseStart


class StepListener(Protocol):
    """Receives notice of steps, on the event loop."""

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """Called after a turn's outputs; `submit_seen` is the serial of the newest group added in that turn."""
        ...


@dataclass(frozen=True, slots=True)
class TicketReceipt:
    """Serial number of a group of sequences, and the listener that submitted it."""

    listener: StepListener
    serial: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Adds sequences; without a receipt they wait at the engine's own delay gate."""

    receipt: TicketReceipt | None
    seqs: Many[Sequence]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends sequences; unknown ids are ignored."""

    seq_ids: Many[int]


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Changes a sequence's deadline: monotonic seconds, None for none; an unknown id is ignored."""

    seq_id: int
    deadline: float | None


@dataclass(frozen=True, slots=True)
class EndAll:
    """Ends all sequences with EndReason.CANCELLED and a message, which a router's cancel does not have."""

    message: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Drops cached blocks without a holder; `done` gets their number, on the event loop."""

    done: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WatchBlocks:
    """Makes turns report the cached blocks, and from then on their changes."""


Command = Submit | Cancel | SetDeadline | EndAll | Flush | WatchBlocks


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one turn of the engine: outputs, changes of the cache, and a load report.

    `seen` has the receipts of the groups added before its step, `granules` the changes of the prefix cache
    (`PrefixCache.take_granule_changes`) and of host memory (`MemoryGranules.apply`), `kv_digests` the names and digests
    of cached blocks, `flushed` the callbacks of Flush with their numbers of blocks, `blocks` the changes of cached
    blocks after WatchBlocks, `phases` the stages that live sequences have entered.
    """

    step: int
    load: EngineLoad
    outputs: list[RequestOutput] = field(default_factory=list)
    seen: list[TicketReceipt] = field(default_factory=list)
    figures: EngineFigures = field(default_factory=EngineFigures)
    granules: list[int] = field(default_factory=list)
    kv_digests: list[tuple[bytes, int]] = field(default_factory=list)
    flushed: list[tuple[Callable[[int], None], int]] = field(default_factory=list)
    blocks: list[BlockChange] = field(default_factory=list)
    phases: dict[int, PhaseStart] = field(default_factory=dict)


class EngineTurns:
    """Runs an EngineCore turn by turn: all commands, then one step. Only the thread that owns the engine uses it.

    Args:
        core: the engine.
        clock: monotonic seconds.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float]) -> None:
        self.core = core
        self._clock = clock
        self._totals = core.scheduler.lifecycle.totals
        self._prefixes = core.scheduler.block_manager.prefixes
        self._digests = core.scheduler.block_manager.digests
        self._prefixes.watch_granules()
        if core.tiers is not None:
            core.tiers.watch_granules()

    @property
    def has_work(self) -> bool:
        """True if a turn without commands has something to do."""
        return self.core.has_unfinished()

    def run(self, commands: Iterable[Command]) -> Turn:
        """Runs one turn.

        Raises:
            EngineDeadError: the runner failed; what the engine holds is lost.
        """
        outputs: list[RequestOutput] = []
        seen: list[TicketReceipt] = []
        flushed: list[tuple[Callable[[int], None], int]] = []
        for command in commands:
            match command:
                case Submit(receipt, seqs):
                    if receipt is not None:
                        seen.append(receipt)
                    outputs += self._submit(seqs, is_gated=receipt is None)
                case Cancel(seq_ids):
                    for seq_id in seq_ids:
                        self.core.abort(seq_id)
                case SetDeadline(seq_id, deadline):
                    self.core.set_deadline(seq_id, deadline)
                case EndAll(message):
                    outputs += self.core.abort_all(EndReason.CANCELLED, message)
                case Flush(done):
                    flushed.append((done, self._flush()))
                case WatchBlocks():
                    self._prefixes.watch_blocks()
        if self.core.has_unfinished():
            outputs += self.core.step().outputs
            # After the step, which may have admitted them.
            outputs += self.core.return_overdue(self._clock())
        return replace(self.report(outputs, seen), flushed=flushed) if flushed else self.report(outputs, seen)

    def report(self, outputs: list[RequestOutput] | None = None, seen: list[TicketReceipt] | None = None) -> Turn:
        """Snapshot of the engine's load and metrics, with the outputs of this turn."""
        load, granules = self.core.load(), self._prefixes.take_granule_changes()
        if self.core.tiers is not None:
            granules += self.core.tiers.take_granule_changes()
        digests = self._digests.take()
        figures, blocks = self._figures(load), self._prefixes.take_block_changes()
        phases = self.core.scheduler.lifecycle.take_phases()
        return Turn(
            self.core.num_steps,
            load,
            outputs or [],
            seen or [],
            figures,
            granules,
            digests,
            blocks=blocks,
            phases=phases,
        )

    def _figures(self, load: EngineLoad) -> EngineFigures:
        scheduler, totals = self.core.scheduler, self._totals
        spec = self.core.config.speculative_config
        method = "" if spec is None else spec.method
        return EngineFigures(
            running=len(scheduler.running),
            max_running=scheduler.max_num_seqs,
            waiting=load.waiting_seqs,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            block_size=self.core.config.kv_cache_block_size,
            steps=totals.steps,
            step_tokens=totals.step_tokens,
            preemptions=scheduler.lifecycle.num_preemptions,
            nan_rows=scheduler.postprocessor.num_nan_rows,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            draft_tokens=scheduler.spec_stats.total_draft_tokens,
            accepted_tokens=scheduler.spec_stats.total_accepted_tokens,
            drafts={
                (name, position): both
                for name, stats in ((method, scheduler.spec_stats), (names.GRAMMAR_DRAFTS, scheduler.forced_stats))
                for position, both in enumerate(stats.by_position)
            },
            ended={reason.name.lower(): count for reason, count in totals.ended.items()},
            tier_blocks={} if self.core.tiers is None else self.core.tiers.store.counts(),
            tier_traffic={} if self.core.tiers is None else self.core.tiers.store.traffic(),
        )

    def _flush(self) -> int:
        """Drops cached blocks without a holder, and those in host memory. Returns the number in the pool."""
        if self.core.tiers is not None:
            self.core.tiers.store.flush()
        return self.core.scheduler.block_manager.flush()

    def _submit(self, seqs: Many[Sequence], *, is_gated: bool) -> list[RequestOutput]:
        """Adds the sequences that the engine can run. Returns outputs that end the others."""
        refused: list[RequestOutput] = []
        accepted: list[Sequence] = []
        for seq in seqs:
            try:
                self.core.validate(seq)
            except ApiError as error:
                refused.append(self._refuse(seq, str(error)))
            else:
                accepted.append(seq)
        self.core.enter(accepted, is_gated=is_gated)
        return refused

    def _refuse(self, seq: Sequence, message: str) -> RequestOutput:
        seq.leave_time = self._clock()
        self._totals.ended[EndReason.INVALID] += 1
        end = End(seq.num_tokens, EndReason.INVALID, message=message, times=sequence_times(seq))
        return RequestOutput(seq.id, [], True, None, seq.num_tokens, end=end)
