"""EngineCore combines scheduler and model runner, with abort and deadlines.

Not thread-safe: one thread owns an EngineCore. Every sequence added ends in exactly one finished output.

With `Config.deferred_output` the runner has its own thread, and a step is scheduled before the tokens of the last one
are known: `step` submits batch N + 1, waits for batch N and applies its output.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, Protocol

import structlog

from common.config import Config
from common.errors import InvalidFieldError
from common.limits import MAX_HOLD_S
from common.telemetry.names import Stage
from worker.engine.batch import Runner, ScheduledBatch, ScheduledBatchOutput, StepResult
from worker.engine.executor import Executor, InlineExecutor, ThreadExecutor
from worker.engine.outputs import EngineLoad, RequestOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import EndReason, Sequence
from worker.engine.speculation.cost_probe import measure_costs
from worker.engine.step import Step
from worker.engine.step_record import StepRecord, StepRing
from worker.engine.tier_lookups import TierLookups, Tiers

log = structlog.get_logger(__name__)

# Interval at which an idle engine checks its ranks; and intervals at which engines in lockstep ask each other for work,
# the second after the given number of rounds without work, which is 5 s: each round takes a millisecond of CPU time.
_IDLE_CHECK_S: Final = 0.5
_LOCKSTEP_CHECK_S: Final = 0.02
_LOCKSTEP_REST_S: Final = 0.1
_LOCKSTEP_AWAKE_ROUNDS: Final = 250
# Message of a sequence that is returned to its router; a cancel by the router has no message.
_OVERLOAD: Final = "the worker has no room for it"


class EngineDeadError(Exception):
    """The model runner has failed: all sequences are lost, and no further step is possible."""


class GrammarCompiler(Protocol):
    """Compiles grammars on its own threads."""

    def begin(self, text: str, salt: bytes = b"") -> Future[Any]:
        """Begins to compile a grammar, or finds it among the grammars of this cache salt.

        The future raises if the grammar does not compile.
        """
        ...


class _Deadlines:
    """Sequences by deadline.

    Stale entries, of sequences that have ended or have another deadline, are dropped when they are due or too many.
    """

    def __init__(self) -> None:
        # The serial number is unique, so that two sequences are never compared.
        self._heap: list[tuple[float, int, Sequence]] = []
        self._serial = itertools.count()

    def add(self, seq: Sequence) -> None:
        """Adds a sequence, if it has a deadline."""
        if seq.deadline is not None:
            heapq.heappush(self._heap, (seq.deadline, next(self._serial), seq))

    def expired(self, now: float) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        due: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            deadline, _, seq = heapq.heappop(self._heap)
            # The sequence may have another deadline by now.
            if seq.deadline == deadline:
                due.append(seq)
        return due

    def compact(self, num_live: int) -> None:
        """Drops stale entries if they are many compared with `num_live`. O(1) amortized."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished and entry[2].deadline == entry[0]]
            heapq.heapify(self._heap)


class EngineCore:
    """One engine with one model runner.

    Args:
        config: configuration, with the size of the KV cache.
        runner: executes batches.
        clock: monotonic seconds; a virtual clock in simulations.
        executor: runs the batches; None for this process, with deferred output on a thread.
        grammars: compiles the grammars of sequences; None refuses sequences with grammars.
        tiers: KV tiers below the block pool, closed with the engine; None without any.

    Attributes:
        steps: records of its newest steps, which other threads may read.
        tiers: waits for KV tiers; None without tiers.

    Raises:
        InvalidFieldError: see Scheduler.
    """

    def __init__(
        self,
        config: Config,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        grammars: GrammarCompiler | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.scheduler = Scheduler(config)
        self.tiers = None if tiers is None else TierLookups(self.scheduler.lifecycle, *tiers)
        self.steps = StepRing()
        in_process = ThreadExecutor if config.deferred_output else InlineExecutor
        self.executor: Executor = executor or in_process(self._forward, clock)
        self._clock = clock
        self._deadlines = _Deadlines()
        self._grammars = grammars
        # Sequences that wait for their grammars.
        self._compiling: list[Sequence] = []
        self._dead = False

    @property
    def num_steps(self) -> int:
        """Steps scheduled since the start."""
        return self.scheduler.lifecycle.totals.steps

    @property
    def serves_grammars(self) -> bool:
        """True if sequences may have grammars."""
        return self._grammars is not None

    def measure_step_costs(self) -> None:
        """Measures the times of steps by their number of rows, if drafts are adaptive; call before the first step."""
        spec = self.config.speculative_config
        if spec is not None and spec.adaptive:
            costs = self.scheduler.drafter.controller.costs = measure_costs(self.config, self.executor)
            log.info("step costs measured", ms_by_rows={rows: round(1e3 * s, 2) for rows, s in costs.table.items()})

    def validate(self, seq: Sequence) -> None:
        """Raises an ApiError if `seq` cannot be run (Scheduler.validate)."""
        if seq.sampling_params.grammar and self._grammars is None:
            raise InvalidFieldError("params.grammar", "is set", "none: this engine has no grammars")
        self.scheduler.validate(seq)

    def add_request(self, seq: Sequence) -> None:
        """Adds a sequence behind the engine's own delay gate. One with the id of a live one is ignored (S5).

        Raises:
            ApiError: it cannot be run; nothing has changed.
        """
        self.validate(seq)
        if self.scheduler.add(seq):
            self._watch(seq)

    def add_group(self, seqs: Iterable[Sequence]) -> None:
        """Adds sequences that a router's gate has released together, all or none, so that they share a prefill.

        Raises:
            ApiError: one cannot be run; nothing has changed.
        """
        group = list(seqs)
        for seq in group:
            self.validate(seq)
        for seq in self.scheduler.add_group(group):
            self._watch(seq)

    def enter(self, seqs: Iterable[Sequence], *, is_gated: bool) -> None:
        """Adds sequences that `validate` has passed."""
        for seq in seqs:
            if self.scheduler.enter(seq, is_gated=is_gated):
                self._watch(seq)

    def _watch(self, seq: Sequence) -> None:
        """Watches the deadline of a sequence, the compilation of its grammar, and its blocks in KV tiers."""
        self._deadlines.add(seq)
        if self.tiers is not None:
            self.tiers.enter(seq)
        if seq.sampling_params.grammar and self._grammars is not None:
            seq.compiling = self._grammars.begin(seq.sampling_params.grammar, seq.cache_salt)
            self._compiling.append(seq)
            seq.ledger.stage = Stage.GRAMMAR_WAIT

    def abort(self, seq_id: int) -> bool:
        """Ends a sequence and frees its blocks at once. False if it is not live: idempotent.

        The next `step` returns its last output, with EndReason.CANCELLED.
        """
        was_live = self.scheduler.abort(seq_id, now=self._clock())
        if self.tiers is not None:
            self.tiers.close_ended()
        return was_live

    def set_deadline(self, seq_id: int, deadline: float | None) -> None:
        """Changes the deadline of a sequence; one that is not live is ignored."""
        seq = self.scheduler.lifecycle.live.get(seq_id)
        if seq is not None:
            seq.deadline = deadline
            self._deadlines.add(seq)

    def abort_all(self, reason: EndReason, message: str = "") -> list[RequestOutput]:
        """Ends all sequences, for example with EndReason.ERROR after EngineDeadError. Returns their last outputs."""
        now = self._clock()
        for seq_id in list(self.scheduler.lifecycle.live):
            self.scheduler.abort(seq_id, now=now, reason=reason, message=message)
        if self.tiers is not None:
            self.tiers.close_ended()
        return self.scheduler.take_outputs()

    def return_overdue(self, now: float) -> list[RequestOutput]:
        """Ends sequences that wait so long for their first step that another worker may be faster (rule S9).

        The longest wait is MAX_HOLD_S, or four prefills if those take longer, because prompts and decodes take turns.

        Returns:
            The last outputs of these sequences.
        """
        max_wait_s = max(MAX_HOLD_S, 4 * self.scheduler.last_prompt_latency)
        overdue = self.scheduler.overdue(now, max_wait_s)
        for seq in overdue:
            self.scheduler.abort(seq.id, now=now, message=_OVERLOAD)
        if self.tiers is not None:
            self.tiers.close_ended()
        return self.scheduler.take_outputs() if overdue else []

    def expire(self, now: float) -> int:
        """Ends the sequences whose deadline has passed. Returns their number. `step` calls it."""
        return sum(
            self.scheduler.abort(seq.id, now=now, reason=EndReason.DEADLINE) for seq in self._deadlines.expired(now)
        )

    def has_unfinished(self) -> bool:
        """True if sequences are live, outputs are not taken, steps are in flight, or blocks move to or from tiers."""
        has_blocks = self.tiers is not None and self.tiers.has_blocks
        return self.scheduler.has_unfinished() or bool(self.scheduler.in_flight) or has_blocks

    def step(self) -> StepResult:
        """Schedules, computes and postprocesses one batch. Without work it only returns the outputs of ended sequences.

        With deferred output it postprocesses the batch before: the first step of a burst has no tokens.

        Raises:
            EngineDeadError: the runner failed, now or before.
        """
        if self._dead:
            raise EngineDeadError("the engine has failed before")
        now = self._clock()
        self.expire(now)
        self._deadlines.compact(len(self.scheduler.lifecycle.live))
        if self._compiling:
            self._look_at_grammars(now)
        if self.tiers is not None:
            self.tiers.look(now, self.scheduler.meter.rate, self.scheduler.max_num_batched_tokens)
        in_flight = self.scheduler.in_flight
        scheduled = self.scheduler.schedule(now)
        if scheduled is None:
            self._nothing_scheduled()
        else:
            self._launch(in_flight[-1], now)
        num_kept = 1 if scheduled is not None and self.config.deferred_output else 0
        while len(in_flight) > num_kept:
            self._finish(in_flight[0])
        return StepResult(self.scheduler.take_outputs())

    def _look_at_grammars(self, now: float) -> None:
        """Ends sequences whose grammars do not compile. The others can be scheduled once theirs are compiled."""
        for seq in self._compiling:
            if seq.compiling is not None and seq.compiling.done() and (error := seq.compiling.exception()):
                # The router's check passed, but with this model's tokens the grammar takes more work than allowed.
                self.scheduler.abort(seq.id, now=now, reason=EndReason.CONSTRAINT_FAILED, message=str(error))
            elif not seq.waits_for_grammar:
                # Whoever keeps the sequence must not keep its grammar in memory.
                seq.compiling = None
                seq.ledger.move(Stage.WORKER_QUEUE, self.scheduler.lifecycle.account, now)
        self._compiling = [seq for seq in self._compiling if seq.waits_for_grammar and not seq.is_finished]

    def _nothing_scheduled(self, *, is_dummy_run: bool = False) -> None:
        """Moves the blocks that are left, to KV tiers and from there, in a step without sequences.

        Args:
            is_dummy_run: makes a step in any case, for engines in lockstep with this one.
        """
        if not is_dummy_run and (self.tiers is None or not self.tiers.has_blocks or self.scheduler.in_flight):
            return
        batch = ScheduledBatch({}, [], 0, is_dummy_run=is_dummy_run)
        if self.tiers is not None:
            self.tiers.move_with(batch)
        try:
            output = self.executor.submit(batch).result().output
        except Exception as error:
            self._dead = True
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            if self.tiers is not None:
                self.tiers.put_back(batch)
            raise
        if self.tiers is not None:
            self.tiers.store.store(output.blocks_down or ())

    def _forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        return self.runner.forward(batch)

    def _launch(self, step: Step, now: float) -> None:
        """Records a step that was scheduled from `now` on, and submits its batch."""
        lifecycle, batch = self.scheduler.lifecycle, step.batch
        if self.tiers is not None:
            self.tiers.move_with(batch)
        blocks = lifecycle.block_manager
        step.record = StepRecord(
            lifecycle.totals.steps,
            now,
            self._clock(),
            batch.req_ids,
            batch.columns.request_ids,
            batch.num_scheduled_tokens,
            batch.num_computed_tokens,
            batch.num_cached_tokens,
            batch.total_seqs_num_prefill,
            blocks.num_free_blocks,
            blocks.num_blocks,
            len(lifecycle.waiting),
            len(lifecycle.gated),
            step.preempted,
        )
        self.steps.append(step.record)
        step.result = self.executor.submit(batch)

    def _finish(self, step: Step) -> None:
        """Waits for the oldest step and applies its output. An interrupted wait can be repeated, a step cannot."""
        batch, result, record = step.batch, step.result, step.record
        record.waited = self._clock()
        try:
            output, duration_s = result.result()
        except Exception as error:
            self._dead = True
            self.scheduler.in_flight.clear()
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            if result.done() and result.exception() is not None:
                self.scheduler.discard(step.seqs.values(), batch)
                if self.tiers is not None:
                    self.tiers.put_back(batch)
            raise
        totals = self.scheduler.lifecycle.totals
        num_generated, now = totals.generated_tokens, self._clock()
        record.finished, record.duration_s = now, duration_s
        if self.tiers is not None and output.blocks_down:
            self.tiers.store.store(output.blocks_down)
        self.scheduler.record_step(batch, duration_s)
        self.scheduler.postprocess(step.seqs.values(), output, batch=batch, now=now)
        record.num_new_tokens = totals.generated_tokens - num_generated

    @property
    def idle_check_s(self) -> float:
        """Seconds between calls of `check` while the engine is idle."""
        return _IDLE_CHECK_S

    @property
    def others_have_work(self) -> bool:
        """True if another engine may need a step of this one."""
        return False

    def check(self) -> bool:
        """True if an idle engine has to make a turn: a step for another engine, or a report of host memory.

        Raises:
            EngineDeadError: the executor is lost, which an idle engine would not notice otherwise.
        """
        if (error := self.executor.failure()) is not None:
            self._dead = True
            raise EngineDeadError(f"{type(error).__name__}: {error}")
        return self.tiers is not None and self.tiers.store.has_memory_changes

    def close(self) -> None:
        """Ends the executor's thread or ranks, and the tiers' threads."""
        self.executor.close()
        if self.tiers is not None:
            self.tiers.store.close()

    def load(self) -> EngineLoad:
        """The current load; O(1) apart from unfinished prefills."""
        load = self.scheduler.load()
        return load if self.tiers is None else replace(load, memory_rate=self.tiers.memory_rate)


class LockstepGroup(Runner, Executor, Protocol):
    """Executor whose ranks share experts with the ranks of other engines."""

    def count_engines_with_work(self, has_work: bool) -> int:
        """Number of engines that have work. Returns once all engines have called it.

        Raises:
            Exception: a rank is lost, of this engine or of another.
        """
        ...


class DPEngineCoreProc(EngineCore):
    """An engine in lockstep with others, each in its own worker, with its own requests and cache.

    Experts are spread over the ranks of all engines, so a step of one needs the ranks of all. Engines work in rounds.
    In each round every engine says whether it has work (an all_reduce). If any has, each makes exactly one step, a
    dummy step if it has nothing to compute. While none has work, rounds are 20 ms apart, after 5 s 100 ms: the first
    request may wait as long. All engines count the same rounds, so none keeps the others waiting.

    Args:
        config: see EngineCore.
        group: runs the steps, and reaches the other engines.
        clock: see EngineCore.
        grammars, tiers: see EngineCore.
    """

    def __init__(
        self,
        config: Config,
        group: LockstepGroup,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        super().__init__(config, group, clock, group, grammars, tiers)
        self._group = group
        self._in_round = False
        self._busy = False
        self._others_busy = False
        # Rounds since any engine had work.
        self._idle_rounds = 0

    @property
    def idle_check_s(self) -> float:
        """Seconds until the next round; 0 after a round in which any engine had work."""
        if self._busy:
            return 0.0
        return _LOCKSTEP_CHECK_S if self._idle_rounds < _LOCKSTEP_AWAKE_ROUNDS else _LOCKSTEP_REST_S

    @property
    def others_have_work(self) -> bool:
        """True if another engine had work in the last round."""
        return self._others_busy

    def has_unfinished(self) -> bool:
        """True if this engine has work, or a round is open in which another one needs its ranks."""
        return self._in_round or super().has_unfinished()

    def check(self) -> bool:
        """Opens a round; True if any engine has work, or host memory of this one has changes to report."""
        has_changes = super().check()
        self._open_round(has_work=False)
        return has_changes or self._in_round

    def step(self) -> StepResult:
        """Makes one round."""
        if not self._in_round:
            self._open_round(has_work=True)
        self._in_round = False
        return super().step()

    def dummy_prefill_execution(self) -> None:
        """Makes a step of this engine's ranks for the other engines, which also moves blocks to KV tiers and back."""
        super()._nothing_scheduled(is_dummy_run=True)

    def _nothing_scheduled(self, *, is_dummy_run: bool = True) -> None:
        del is_dummy_run
        self.dummy_prefill_execution()

    def _open_round(self, *, has_work: bool) -> None:
        try:
            num_busy = self._group.count_engines_with_work(has_work)
        except Exception as error:
            self._dead = True
            raise EngineDeadError(f"{type(error).__name__}: {error}") from error
        self._in_round = self._busy = num_busy > 0
        self._others_busy = num_busy > has_work
        self._idle_rounds = 0 if self._busy else self._idle_rounds + 1
