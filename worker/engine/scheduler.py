"""Decides what every step computes.

One number drives everything: `num_computed_tokens` of each sequence moves toward `num_tokens`. Under the policy
`prefill_first` a step computes prompts, or else one token of every running sequence, never both; after
`max_consecutive_prefill_steps` the running sequences get a step, or long prompts would freeze them. Under `mixed`
a step computes one token of every running sequence and fills its budget up with chunks of prompts. While a prompt
waits, decodes leave it PREFILL_SHARE of the budget.

The parts answer one question each: where a sequence is (lifecycle.py), which prompt tokens a step computes
(prompt_filler.py), which decodes (decode_filler.py), which drafts behind them (drafter.py) and how many
(draft_lengths.py, model_drafts.py), who waits for another's prefix (prefix_followers.py), how fast prompts are computed
(prefill_meter.py), what a step's output does (postprocessor.py), how much is there to do (load.py). The invariants of each
stand there. Those of the whole, checked by `check_integrity`:
- a step computes at most `max_num_batched_tokens` tokens;
- deferred output: `schedule` may be called again before a batch's `postprocess`; batches are postprocessed in order.
  What is in flight is counted on the sequence, and a preempted one is admitted again when nothing of it is;
- while anything is unfinished `schedule` finds work: the pool holds a sequence of `max_model_len`, the oldest
  running sequence of the highest class is never preempted, and with nothing running the first waiting one fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from common.config import Config
from common.delay_gate import DelayGate
from common.errors import InvalidFieldError, PromptTooLongError
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.block_manager import BlockManager
from worker.engine.constraint_pace import ConstraintPace
from worker.engine.decode_filler import DecodeFiller
from worker.engine.integrity import check_lifecycle
from worker.engine.lifecycle import Lifecycle
from worker.engine.load import LoadReport, load_report
from worker.engine.outputs import RequestOutput
from worker.engine.postprocessor import Postprocessor
from worker.engine.prefill_meter import PrefillMeter
from worker.engine.prefix_followers import PrefixFollowers
from worker.engine.prompt_filler import PromptFiller
from worker.engine.sequence import EndReason, Sequence, SequenceType
from worker.engine.speculation.draft_lengths import DraftLengths
from worker.engine.speculation.drafter import Drafter, make_answers, make_proposer
from worker.engine.step import Step, StepLimits
from worker.engine.stop_rules import Stop, StopRules


class OutputQueue(Protocol):
    """Destination of a step's outputs in `postprocess`, all at once."""

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        """Takes the outputs of one step."""
        ...


class Scheduler:
    """Waiting and running sequences and their blocks. Pure: takes `now`, monotonic seconds, and does no I/O.

    Attributes:
        limits: of a step.
        lifecycle: the sequences.
        gated, waiting, running: of `lifecycle`.
        block_manager: gives them blocks.
        meter: how fast prompts are computed.
        drafter: decides which drafts steps verify.
        postprocessor: takes the output of steps, and counts rows that were no numbers.
        spec_stats: drafts verified and accepted.
        forced_stats: likewise of those that are text which grammars force.

    Raises:
        InvalidFieldError: the pool cannot hold one sequence of `max_model_len` tokens.
    """

    def __init__(self, config: Config) -> None:
        self.limits = limits = StepLimits(config)
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.mtp_k = limits.mtp_k
        self.use_spec = self.mtp_k > 0
        self.block_manager = BlockManager(config)
        self.stop_rules = StopRules(config, limits.max_model_len)
        self.lifecycle = Lifecycle(self.block_manager, self.stop_rules)
        self.gated, self.waiting = self.lifecycle.gated, self.lifecycle.waiting
        self.running = self.lifecycle.running
        self.gate = DelayGate(config.scheduler_delay_factor)
        self.meter = PrefillMeter(limits.max_num_batched_tokens, config.prefill_slice_s)
        # The steps in flight, oldest first.
        self._in_flight: deque[Step] = deque()
        self._followers = PrefixFollowers(self.block_manager.prefixes, self._in_flight)
        self._prompts = PromptFiller(limits, self.lifecycle, self._followers, self.meter)
        spec = config.speculative_config
        self._answers = make_answers(spec)
        proposer = make_proposer(spec, self._answers)
        lengths = DraftLengths(limits.mtp_k, adapts=spec is None or spec.adaptive)
        in_runner = self.use_spec and proposer is None
        self.drafter = Drafter(
            limits, self.lifecycle, proposer, lengths, in_runner=in_runner, is_deferred=config.deferred_output
        )
        self._decodes = DecodeFiller(self.lifecycle, self._in_flight, self.drafter)
        self.postprocessor = Postprocessor(self.lifecycle, self.stop_rules, self._in_flight, lengths)
        self.spec_stats, self.forced_stats = self.postprocessor.spec_stats, self.postprocessor.forced_stats
        self._num_prefill_steps = 0
        self._pace = ConstraintPace()
        # The end of the newest step, None if there was nothing more to do; and what the step took that now has ended.
        self._ended: float | None = None
        self._duration_s: float | None = None

    # Entrances and exits.

    def validate(self, seq: Sequence) -> None:
        """Checks that `seq` can be run.

        Raises:
            InvalidFieldError: it has no tokens, or blocks of another size.
            PromptTooLongError: its prompt leaves no room for an answer.
        """
        if not 1 <= seq.num_prompt_tokens <= seq.num_tokens:
            raise InvalidFieldError("token_ids", f"has {seq.num_prompt_tokens} prompt tokens", "at least 1")
        if seq.num_prompt_tokens >= self.limits.max_model_len:
            raise PromptTooLongError("token_ids", seq.num_prompt_tokens, self.limits.max_model_len)
        if seq.block_size != self.block_manager.block_size:
            raise InvalidFieldError("block_size", f"is {seq.block_size}", str(self.block_manager.block_size))

    def add(self, seq: Sequence) -> bool:
        """Takes a sequence that passes this worker's own delay gate. False for the id of a live one (rule S5).

        Raises:
            ApiError: see `validate`; nothing has changed.
        """
        self.validate(seq)
        return self.enter(seq, is_gated=True)

    def add_group(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Takes sequences that a router's gate has released together: all or none, past the gate, into `waiting`.

        Returns:
            Those taken: all but the ones with the id of a live one (rule S5).

        Raises:
            ApiError: see `validate`; nothing has changed.
        """
        group = list(seqs)
        for seq in group:
            self.validate(seq)
        return [seq for seq in group if self.enter(seq, is_gated=False)]

    def enter(self, seq: Sequence, *, is_gated: bool) -> bool:
        """Takes a sequence that `validate` has passed. False for the id of a live one (rule S5)."""
        return self.lifecycle.enter(seq, self.gated if is_gated else self.waiting)

    def abort(self, seq_id: int, *, now: float, reason: EndReason = EndReason.CANCELLED, message: str = "") -> bool:
        """Ends a sequence at once, wherever it is, and frees its blocks. False when the id is not live: idempotent."""
        seq = self.lifecycle.live.get(seq_id)
        if seq is None:
            return False
        stop = Stop("aborted", reason)
        self.lifecycle.end(seq, stop, now)
        self.drafter.forget(seq)
        self.lifecycle.emit_end(seq, [], stop, message=message)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Puts a running sequence back to the front of `waiting` (Lifecycle.preempt)."""
        self.lifecycle.preempt(seq)

    def overdue(self, now: float, max_wait_s: float) -> list[Sequence]:
        """Sequences that may go back to their router and have waited longer than `max_wait_s` for their first step.

        Not those that wait for what a running one computes: they hit it soon, while another worker has nothing of it.
        Their time begins when it is computed. Within a class it looks no further than the first that has not waited so
        long: they are in order of arrival.
        """
        fronts = [self._followers.fronts(self.lifecycle.prefilling.values()), *self._followers.fronts_in_flight()]
        found: list[Sequence] = []
        for seqs in self.waiting.by_class():
            for seq in seqs:
                if seq.first_scheduled_time is not None:
                    continue
                if now - seq.arrive_time <= max_wait_s:
                    break
                if any(self._followers.follows(seq, each) for each in fronts):
                    seq.held_until = now
                elif seq.may_return and now - seq.held_until > max_wait_s:
                    found.append(seq)
        return found

    def take_outputs(self) -> list[RequestOutput]:
        """Takes the outputs since the last call: exactly one finished output for every sequence that has ended."""
        return self.lifecycle.take_outputs()

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self.lifecycle.live)

    def live_ids(self) -> list[int]:
        """Ids of the sequences that have not ended, in the order of their arrival."""
        return list(self.lifecycle.live)

    def has_unfinished(self) -> bool:
        """True if anything waits or runs, or an output has not been taken."""
        return bool(self.lifecycle.live or self.lifecycle.outputs)

    # One step.

    def schedule(self, now: float) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """The next step's batch and its sequences; None when there is no work, or it needs output in flight first."""
        self._open_gate(now)
        prefill_cost = self.meter.step_cost(has_decodes=self.lifecycle.num_decoding > 0)
        step = Step(self.max_num_batched_tokens, prefill_cost)
        self._decodes.held = self._pace.held(now, (seq.id for seq in self.running))
        self._fill(step)
        if not step.seqs and self._decodes.held:
            # No other sequence has anything to compute, so none waits for the masks of the held ones.
            self._decodes.held = frozenset()
            self._fill(step)
        if not step.seqs:
            return None
        self.drafter.fill(step)
        batch = step.build()
        self.drafter.ask(batch)
        batch.digested_blocks = self.block_manager.digests.take_wanted()
        self._launch(step, batch, now)
        return batch, step.seqs

    def record_step(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Takes note of how long a batch took, before `postprocess`; that is what `last_prompt_latency` means."""
        self.meter.note(batch, duration_s)
        self._duration_s = duration_s

    @property
    def last_prompt_latency(self) -> float:
        """Seconds of the last step that computed prompt tokens."""
        return self.meter.last_prompt_latency

    def postprocess(
        self,
        seqs: Iterable[Sequence],
        fwd_output: ScheduledBatchOutput,
        stream_output_queue: OutputQueue | None = None,
        *,
        batch: ScheduledBatch,
        now: float,
    ) -> list[Sequence]:
        """Takes a step's tokens: moves the sequences on, publishes full blocks, applies the stop rules.

        Args:
            seqs: the batch's sequences, in its order. Those that were aborted meanwhile are passed over.
            fwd_output: the sampled tokens.
            stream_output_queue: gets the outputs (`take_outputs`) if given.
            batch: what was computed.
            now: monotonic seconds after the forward pass.

        Returns:
            The sequences that have ended, whose blocks are free.
        """
        if fwd_output.slow_constraints:
            self._pace.charge(fwd_output.slow_constraints, self._duration_s or 0.0, now)
        if self._duration_s is not None:
            self.drafter.took(batch, self._duration_s, None if self._ended is None else now - self._ended)
            self._duration_s = None
        finished = self.postprocessor.take(seqs, batch, fwd_output, now)
        self._ended = now if self.lifecycle.live else None
        self.drafter.note_forced(batch, fwd_output.forced_token_ids or {})
        for seq in finished:
            self.drafter.forget(seq)
            if self._answers is not None:
                self._answers.add(seq)
        if stream_output_queue is not None:
            stream_output_queue.put_nowait(self.take_outputs())
        return finished

    def discard(self, seqs: Iterable[Sequence], batch: ScheduledBatch) -> None:
        """Instead of `postprocess`, for a batch that was interrupted: what it should have computed is still to do."""
        self.postprocessor.discard(seqs, batch)

    def load(self) -> LoadReport:
        """The load at this moment; O(1) but for unfinished prefills."""
        return load_report(self.limits, self.lifecycle, self.meter)

    def check_integrity(self) -> None:
        """Checks the invariants between steps. O(blocks): for tests and idle time.

        Raises:
            IntegrityError: one is broken.
        """
        check_lifecycle(self.limits, self.lifecycle, is_computing=bool(self._in_flight))

    def _open_gate(self, now: float) -> None:
        """Lets the gated sequences wait for a prefill, all or none; asked once per step."""
        if not self.gated:
            return
        # Callers may add sequences in another order than by arrival, so the first of a class may not be its oldest.
        age, decoding = now - min(seq.arrive_time for seq in self.gated), len(self.running) > 0
        if self.gate.is_open(age_s=age, last_prompt_latency_s=self.last_prompt_latency, decoding=decoding):
            while self.gated:
                self.waiting.append(self.gated.popleft())

    def _fill(self, step: Step) -> None:
        if self.limits.mixes:
            self._decodes.fill(step, kept=self._prompts.share())
            self._prompts.fill(step)
        else:
            self._fill_one_kind(step)

    def _fill_one_kind(self, step: Step) -> None:
        """Prompts, or else decodes; after `max_consecutive_prefill_steps` the other way round."""
        fills = [self._prompts.fill, self._decodes.fill]
        if self._num_prefill_steps >= self.limits.max_consecutive_prefill_steps:
            fills.reverse()
        for fill in fills:
            if not step.seqs:
                fill(step)
        if step.seqs:
            self._num_prefill_steps = self._num_prefill_steps + 1 if step.num_prefill_seqs else 0

    def _launch(self, step: Step, batch: ScheduledBatch, now: float) -> None:
        """The batch is in flight: its sequences count what it computes, so that the next step goes on behind it."""
        self._in_flight.append(step)
        self.lifecycle.totals.steps += 1
        self.drafter.launched(batch)
        if step.columns is not None:
            decode = SequenceType.DECODE
            for seq in step.columns.rows:
                seq.num_inflight_tokens += 1
                seq.num_placeholder += 1
                seq.type = decode
            for seq_id, drafts in step.drafts.items():
                step.seqs[seq_id].num_inflight_tokens += len(drafts)
            return
        for seq, num_tokens, final in zip(step.seqs.values(), batch.num_scheduled_tokens, batch.is_final, strict=True):
            seq.num_inflight_tokens += num_tokens
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
            if final:
                seq.num_placeholder += 1
                self.lifecycle.end_prefill(seq)
