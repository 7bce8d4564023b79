"""Decides what every step computes.

One number drives everything: `num_computed_tokens` of each sequence moves toward `num_tokens`. `schedule` shows the
policy. It asks the delay gate, then fills the step by two loops, `_prefill` and `_decode`, and adds drafts to the
decodes. Under the policy `prefill_first` a step computes prompts or decodes, never both. After
`max_consecutive_prefill_steps` the decodes come first once, or long prompts would freeze them. Under `mixed` a step
decodes every running sequence and fills its budget up with chunks of prompts. While a prompt waits, decodes leave it
PREFILL_SHARE of the budget.

Other modules compute what the policy needs: where a sequence is (lifecycle.py), its blocks (block_manager.py,
prefix_cache.py), how many prompt tokens a step can afford (prefill_meter.py), which drafts a step verifies
(speculation/drafter.py), and what a step's output changes (postprocessor.py).

Invariants of prefills:
- admission is first come, first served within a priority class, higher classes first: a prompt that finds no blocks
  blocks those behind it. A prompt is passed over only while its grammar is compiled, while it waits for KV tiers, or
  while another sequence computes its next block or tail, which it then finds in the cache;
- all blocks of a prompt are reserved when it is admitted, so that its chunks cannot run out of them;
- a step that preempts admits nothing, or a new sequence would get the victim's blocks;
- at most `max_num_seqs` sequences run.

Invariants of decodes:
- the blocks of a decode are reserved before it enters the batch. Victims of preemption are the newest sequences of the
  lowest class, so the oldest running sequence of the highest class is never preempted;
- decodes that a step has no room for go first in the next one;
- the number of accepted drafts decides where the next step begins. With a runner that drafts, a sequence with drafts in
  flight continues as if all were accepted (speculation/drafter.py); else it waits for its output. A sequence also waits
  if drafts of the scheduler's own proposer are expected behind its token in flight.

Invariants of the whole, checked by `check_integrity`:
- a step computes at most `max_num_batched_tokens` tokens;
- deferred output: `schedule` may be called again before a batch's `postprocess`; batches are postprocessed in order.
  The sequence counts what is in flight; a preempted one is admitted again when nothing of it is;
- while anything is unfinished `schedule` finds work: the pool holds a sequence of `max_model_len`, the oldest
  running sequence of the highest class is never preempted, and with nothing running the first waiting one fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol

from common.config import Config
from common.delay_gate import DelayGate
from common.errors import InvalidFieldError, PromptTooLongError
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput, SequenceColumns
from worker.engine.block_manager import BlockManager
from worker.engine.constraint_pace import ConstraintPace
from worker.engine.integrity import check_lifecycle
from worker.engine.lifecycle import Lifecycle
from worker.engine.outputs import EngineLoad, RequestOutput
from worker.engine.postprocessor import Postprocessor
from worker.engine.prefill_meter import PrefillMeter
from worker.engine.sequence import EndReason, Sequence, SequenceStatus, SequenceType
from worker.engine.speculation.draft_controller import DraftController
from worker.engine.speculation.drafter import Drafter, make_answers, make_proposer
from worker.engine.step import Step, StepLimits
from worker.engine.stop_rules import Stop, StopRules

# Most waiting sequences that a step looks at, and cached prefix blocks after which it admits no further sequence.
# Looking up and taking a block costs 1 us, and running sequences wait for it. A step behind a long one once admitted
# all 64 followers of a prompt of 100,000 tokens, which took 459 ms.
_MOST_LOOKED_AT: Final = 1024
_MOST_LOOKUPS: Final = 4096


class OutputQueue(Protocol):
    """Destination of a step's outputs in `Scheduler.postprocess`."""

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        """Takes all outputs of one step."""
        ...


class Scheduler:
    """Waiting and running sequences and their blocks. Pure: takes `now`, monotonic seconds, and does no I/O.

    Attributes:
        limits: bounds of a step.
        lifecycle: the live sequences.
        gated, waiting, running: queues of `lifecycle`.
        block_manager: the KV cache's blocks.
        meter: measures how fast prompts are computed.
        drafter: decides which drafts steps verify.
        in_flight: the steps that are being computed, oldest first.
        postprocessor: applies the output of steps; counts rows of logits that were no numbers.
        spec_stats: drafts verified and accepted.
        forced_stats: the same of drafts that are text which grammars force.

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
        self._prefixes = self.block_manager.prefixes
        self.stop_rules = StopRules(config, limits.max_model_len)
        self.lifecycle = Lifecycle(self.block_manager, self.stop_rules)
        self.gated, self.waiting = self.lifecycle.gated, self.lifecycle.waiting
        self.running = self.lifecycle.running
        self.gate = DelayGate(config.scheduler_delay_factor)
        self.meter = PrefillMeter(limits.max_num_batched_tokens, config.prefill_slice_s)
        self.in_flight: deque[Step] = deque()
        spec = config.speculative_config
        self._answers = make_answers(spec)
        proposer = make_proposer(spec, self._answers)
        controller = DraftController(limits.mtp_k, adapts=spec is None or spec.adaptive)
        in_runner = self.use_spec and proposer is None
        self.drafter = Drafter(
            limits, self.lifecycle, proposer, controller, in_runner=in_runner, is_deferred=config.deferred_output
        )
        self.postprocessor = Postprocessor(self.lifecycle, self.stop_rules, self.in_flight, controller)
        self.spec_stats, self.forced_stats = self.postprocessor.spec_stats, self.postprocessor.forced_stats
        self._num_prefill_steps = 0
        self._pace = ConstraintPace()
        # Sequences that steps do not decode now: their masks are too slow (constraint_pace.py).
        self._held: frozenset[int] = frozenset()
        # Decodes that the last step had no room for, in the order in which the next one takes them.
        self._left_out: list[int] = []
        # Time at which the newest step ended, None if there was nothing more to do; duration of the step being
        # postprocessed.
        self._ended: float | None = None
        self._duration_s: float | None = None

    def schedule(self, now: float) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """The next step's batch and its sequences; None when there is no work, or it needs output in flight first."""
        self._open_gate(now)
        self.lifecycle.account.begin_step(now, is_first=not self.in_flight)
        prefill_cost = self.meter.step_cost(has_decodes=self.lifecycle.num_decoding > 0)
        step = Step(self.max_num_batched_tokens, prefill_cost)
        held, self._held = self._held, self._pace.held(now, (seq.id for seq in self.running))
        self._fill(step)
        if not step.seqs and self._held:
            # Only held sequences have anything to compute, so nothing else waits for their masks.
            self._held = frozenset()
            self._fill(step)
        self.lifecycle.account_holds(held, self._held, now)
        if not step.seqs:
            return None
        self.drafter.fill(step)
        batch = step.build()
        self.drafter.ask(batch)
        batch.digested_blocks = self.block_manager.digests.take_wanted()
        self.in_flight.append(step)
        self.lifecycle.totals.add_step(batch.total_tokens_num)
        self.drafter.launched(batch)
        for seq in step.count_in_flight(batch, now):
            self.lifecycle.end_prefill(seq)
        self.lifecycle.account_prompts(step.prompts(), now)
        return batch, step.seqs

    def _open_gate(self, now: float) -> None:
        """Moves all gated sequences to `waiting` once the delay gate is open."""
        if not self.gated:
            return
        # Callers may add sequences in another order than by arrival, so the first of a class may not be its oldest.
        age, decoding = now - min(seq.arrive_time for seq in self.gated), len(self.running) > 0
        if self.gate.is_open(age_s=age, last_prompt_latency_s=self.last_prompt_latency, decoding=decoding):
            while self.gated:
                self.waiting.append(self.gated.popleft())

    def _fill(self, step: Step) -> None:
        """Fills a step by its policy."""
        if self.limits.mixes:
            self._decode(step, num_kept=self._prefill_share())
            self._prefill(step)
            return
        phases = [self._prefill, self._decode]
        if self._num_prefill_steps >= self.limits.max_consecutive_prefill_steps:
            phases.reverse()
        for phase in phases:
            if not step.seqs:
                phase(step)
        if step.seqs:
            self._num_prefill_steps = self._num_prefill_steps + 1 if step.num_prefill_seqs else 0

    def _prefill(self, step: Step) -> None:
        """Continues running prompts, then admits waiting ones, while the step has budget and the pool has blocks."""
        for seq in self.lifecycle.prefilling.values():
            wanted = min(seq.num_tokens - seq.next_position, step.budget)
            if num_tokens := self.meter.cut(step, seq.next_position, wanted):
                self._add_chunk(step, seq, num_tokens)
        if step.has_preempted or not self._has_place(step):
            return
        lookups = _MOST_LOOKUPS
        for seq in list(islice(self.waiting, _MOST_LOOKED_AT)):
            if lookups <= 0 or not self._has_place(step):
                break
            if seq.num_inflight_tokens:
                # Preempted with a step in flight: its late token is a token to compute too.
                break
            if seq.waits_for_grammar or seq.waits_for_kv or self._prefixes.follows(seq, step.fronts):
                continue
            cached = self._prefixes.cached_blocks(seq)
            lookups -= len(cached) + 1
            next_hash = self._prefixes.hittable_hash(seq, len(cached))
            if any(next_hash in each.computing for each in (step, *self.in_flight)):
                # The sequence hits that block when it is computed, instead of computing it again.
                continue
            start = self._prefixes.num_cached_tokens(seq, cached)
            num_tokens = self.meter.cut(step, start, self.limits.chunk(seq.num_tokens - start, step.budget))
            # One block is kept free for each running sequence that may need a further one, or a preempted sequence
            # would be admitted only to be preempted again.
            if num_tokens == 0 or not self.block_manager.can_allocate(seq, cached, self.lifecycle.num_growing):
                break
            if (copy := self.lifecycle.start(seq, cached)) is not None:
                step.block_copies.append(copy)
            self._add_chunk(step, seq, num_tokens)

    def _decode(self, step: Step, num_kept: int = 0) -> None:
        """Adds the newest token of each running sequence, each with a slot; without free blocks it preempts.

        Args:
            step: gets the decodes.
            num_kept: tokens of the budget that are left to prompts.
        """
        columns = self._decodable(step.budget - num_kept)
        growing = [seq for seq in columns.rows if seq.num_computed_tokens + seq.num_inflight_tokens >= seq.num_slots]
        if len(growing) <= self.block_manager.num_free_blocks:
            for seq in growing:
                self.lifecycle.append_slots(seq)
            if columns.rows:
                step.add_decodes(columns)
            return
        for seq in columns.rows:
            if seq.num_inflight_drafts and not self.block_manager.can_append(seq):
                # It needs a further block only if all of its drafts in flight are right.
                continue
            while seq.status is SequenceStatus.RUNNING and not self.block_manager.can_append(seq):
                # Victims are taken from the end of the order, so none of them is in the step already.
                victim = self.running.last()
                self.preempt(victim, seq)
                step.preempted.append(victim.id)
            if seq.status is SequenceStatus.RUNNING:
                self.lifecycle.append_slots(seq)
                step.add(seq, 1, SequenceType.DECODE)

    def _has_place(self, step: Step) -> bool:
        """True if the step has budget left and another sequence may run."""
        return step.budget > 0 and len(self.running) < self.max_num_seqs

    def _add_chunk(self, step: Step, seq: Sequence, num_tokens: int) -> None:
        start = seq.next_position
        step.computing.update(self._prefixes.hashes_in(seq, start, start + num_tokens))
        self._prefixes.add_front(step.fronts, seq, start)
        step.prefill_cost -= self.meter.context_cost.of(start, num_tokens)
        step.add(seq, num_tokens, SequenceType.PREFILL)

    def _prefill_share(self) -> int:
        """Tokens of the budget that decodes leave to prompts: at most PREFILL_SHARE, less if prompts need less."""
        share = self.limits.min_prefill_tokens
        if self.lifecycle.num_decoding <= self.max_num_batched_tokens - share:
            return 0
        unfinished = self.lifecycle.unfinished_tokens
        if unfinished < share and self.waiting and len(self.running) < self.max_num_seqs:
            head = self.waiting.first()
            if not head.num_inflight_tokens and self.block_manager.can_allocate(head, None, self.lifecycle.num_growing):
                unfinished += self.waiting.num_tokens
        return min(share, unfinished)

    def _decodable(self, most: int) -> SequenceColumns:
        """At most `most` sequences that this step can decode, round robin over steps."""
        columns = self.lifecycle.decode_columns()
        # The same object while the same sequences decode, so that what derives from it is computed once.
        if (self.in_flight or self._held) and not all(map(self._goes_on, columns.rows)):
            columns = SequenceColumns([seq for seq in columns.rows if self._goes_on(seq)])
        if len(columns.rows) <= most:
            self._left_out = []
            return columns
        rows, self._left_out = _in_turn(columns.rows, most, self._left_out)
        return SequenceColumns(rows)

    def _goes_on(self, seq: Sequence) -> bool:
        """True if a decode can be scheduled before the sequence's output in flight is there."""
        if seq.id in self._held:
            return False
        if not seq.num_placeholder:
            return True
        most = len(seq.token_ids) + seq.num_placeholder + seq.num_inflight_drafts
        if seq.awaits_output or most >= seq.length_limit:
            return False
        return not self.drafter.expects(seq)

    def record_step(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Notes how long a batch took; call before its `postprocess`. Sets `last_prompt_latency`."""
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
        """Applies a step's output: appends tokens, publishes full blocks, applies the stop rules.

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
            self.in_flight[0].account(self.lifecycle.account, self._duration_s, self.meter, now)
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
        """Gives up a batch that was interrupted, in place of `postprocess`: its tokens are still to be computed."""
        self.postprocessor.discard(seqs, batch)

    # Sequences that enter and leave.

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
        """Adds a sequence behind this worker's own delay gate. False for the id of a live one (rule S5).

        Raises:
            ApiError: see `validate`; nothing has changed.
        """
        self.validate(seq)
        return self.enter(seq, is_gated=True)

    def add_group(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Adds sequences that a router's gate has released together to `waiting`: all or none.

        Returns:
            Those added: all but the ones with the id of a live one (rule S5).

        Raises:
            ApiError: see `validate`; nothing has changed.
        """
        group = list(seqs)
        for seq in group:
            self.validate(seq)
        return [seq for seq in group if self.enter(seq, is_gated=False)]

    def enter(self, seq: Sequence, *, is_gated: bool) -> bool:
        """Adds a sequence that `validate` has passed. False for the id of a live one (rule S5)."""
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

    def preempt(self, seq: Sequence, grower: Sequence | None = None) -> None:
        """Frees a running sequence's blocks, which `grower` needs, and puts it back at the front of `waiting`."""
        self.lifecycle.preempt(seq, grower)

    def overdue(self, now: float, max_wait_s: float) -> list[Sequence]:
        """Sequences that may return to their router and have waited longer than `max_wait_s` for their first step.

        A sequence whose prefix another one computes is not overdue (Lifecycle.overdue).
        """
        return self.lifecycle.overdue(now, max_wait_s, [step.fronts for step in self.in_flight])

    def take_outputs(self) -> list[RequestOutput]:
        """Takes the outputs since the last call: exactly one finished output for every sequence that has ended."""
        return self.lifecycle.take_outputs()

    def has_unfinished(self) -> bool:
        """True if any sequence waits or runs, or an output has not been taken."""
        return bool(self.lifecycle.live or self.lifecycle.outputs)

    def load(self) -> EngineLoad:
        """The current load; O(1) apart from unfinished prefills."""
        return _load(self.limits, self.lifecycle, self.meter)

    def check_integrity(self) -> None:
        """Checks the invariants between steps. O(blocks): for tests and idle time.

        Raises:
            IntegrityError: one is broken.
        """
        check_lifecycle(self.limits, self.lifecycle, is_computing=bool(self.in_flight))


def _in_turn(rows: list[Sequence], most: int, first: list[int]) -> tuple[list[Sequence], list[int]]:
    """`most` of the rows, in their order, and the ids of the others: round robin, the ids of `first` first."""
    places = {seq.id: i for i, seq in enumerate(rows)}
    start = next((places[seq_id] for seq_id in first if seq_id in places), 0)
    left_out = [seq.id for seq in [*rows[start:], *rows[:start]][most:]]
    missing = set(left_out)
    return [seq for seq in rows if seq.id not in missing], left_out


def _load(limits: StepLimits, lifecycle: Lifecycle, meter: PrefillMeter) -> EngineLoad:
    gated, waiting, blocks = lifecycle.gated, lifecycle.waiting, lifecycle.block_manager
    waiting_seqs = len(gated) + len(waiting)
    waiting_tokens = gated.num_tokens + waiting.num_tokens + lifecycle.unfinished_tokens
    decodes = lifecycle.num_decoding * (limits.mtp_k + 1) if limits.mixes else 0
    budget = max(limits.min_prefill_tokens, limits.max_num_batched_tokens - decodes)
    return EngineLoad(
        decoding_seqs=lifecycle.num_decoding,
        waiting_seqs=waiting_seqs,
        waiting_tokens=waiting_tokens,
        room_tokens=max(0, budget - waiting_tokens),
        room_seqs=max(0, limits.max_num_seqs - len(lifecycle.running) - waiting_seqs),
        free_blocks=blocks.num_free_blocks,
        total_blocks=blocks.num_blocks,
        last_prompt_latency_s=meter.last_prompt_latency,
        prefill_rate=meter.rate,
        prefill_samples=meter.num_samples,
        sums=lifecycle.account.sums,
    )
