"""Decides what every step computes.

One number drives everything: `num_computed_tokens` of each sequence moves toward `num_tokens`. Under the policy
`prefill_first` a step computes prompts, or else one token of every running sequence, never both; after
`max_consecutive_prefill_steps` the running sequences get a step, or long prompts would freeze them (T8). Under `mixed`
 a step computes one token of every running sequence and fills its budget up with chunks of prompts. While a
prompt waits, decodes leave it PREFILL_SHARE of the budget; those that have no place for it go first in the next step.
While anything decodes, prompt chunks get smaller behind a long context, so that a step takes no longer than one of a
prompt that begins.

Invariants, checked by `check_integrity`:
- a live sequence is in exactly one of `gated`, `waiting`, `running`, and only running ones hold blocks;
- at most `max_num_seqs` run (T7), and a step computes at most `max_num_batched_tokens`;
- admission is first come, first served within a priority class, higher classes first: a prompt that finds no blocks
  blocks those behind it. Victims are the newest of the lowest class; preempted sequences go to the front of their
  class, newest victim first, so the order of arrival survives;
- all blocks of a prompt are reserved when it is admitted, so that its chunks can not run out of them, and those of a
  decode before it enters the batch; nobody is admitted in a step that preempts, else a
  newcomer would get the victim's blocks (T9);
- deferred output: `schedule` may be called again before a batch's `postprocess`; batches are postprocessed in order.
  What is in flight is counted on the sequence, and a preempted one is admitted again when nothing of it is;
- speculation: drafts follow the last token, with blocks for k + 1 tokens. How many are accepted decides where the next
  step begins, so a sequence with drafts in flight waits for its output;
- while anything is unfinished `schedule` finds work: the pool holds a sequence of `max_model_len` (T6), the oldest
  running sequence of the highest class is never preempted, and with nothing running the first waiting one fits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final, Protocol, TypeAlias

from common.config import MIXED, Config
from common.delay_gate import DelayGate
from common.errors import InvalidFieldError, PromptTooLongError
from common.limits import PREFILL_SHARE
from kernels.no_token import NO_TOKEN
from worker.engine.batch import RequestOutput, ScheduledBatch, ScheduledBatchOutput, SequenceColumns
from worker.engine.block_manager import BlockManager, IntegrityError
from worker.engine.context_cost import ContextCost
from worker.engine.sequence import EndReason, Sequence, SequenceStatus, SequenceType
from worker.engine.sequence_queue import SequenceQueue, SequenceSet
from worker.engine.spec_stats import SpecStats
from worker.engine.stop_rules import Stop, StopRules

# Weight of the newest step in the mean prefill speed.
_RATE_WEIGHT = 0.25
# A step tells how fast prompts can be computed when it has this share of its budget or more: a smaller one is mostly
# overhead, and a router that took its speed for the worker's would refuse what can well be served.
_TELLING_SHARE = 1 / 8
# A prompt gets this share of a step's tokens however long its context is, or it would take for ever.
_LEAST_CHUNK = 1 / 64
_NOT_A_NUMBER = Stop("not_a_number", EndReason.NOT_A_NUMBER)
# Waiting sequences that a step looks at, and blocks of cached prefixes that it looks up and takes, at least; more where
# steps are so long that it makes less than a share of one.
_MOST_LOOKED_AT: Final = 1024
_LEAST_LOOKUPS: Final = 4096
_LOOKUP_S: Final = 1e-6
_LOOKUP_SHARE: Final = 1 / 10


# Hashes of blocks that running prompts compute next, by their place in the prompt.
Fronts: TypeAlias = dict[int, set[int]]


class OutputQueue(Protocol):
    """Destination of a step's outputs in `postprocess`, all at once."""

    def put_nowait(self, outputs: list[RequestOutput], /) -> None:
        """Takes the outputs of one step."""
        ...


class _Step:
    """A batch in the making.

    Attributes:
        budget: tokens that it has room for.
        prefill_cost: what its prompts may still cost (ContextCost).
    """

    def __init__(self, budget: int, prefill_cost: float) -> None:
        self.budget = budget
        self.prefill_cost = prefill_cost
        self.seqs: dict[int, Sequence] = {}
        self.num_scheduled_tokens: list[int] = []
        # Of all rows, when they are those of the last step.
        self.columns: SequenceColumns | None = None
        self.num_prefill_seqs = 0
        self.num_prefill_tokens = 0
        self.drafts: dict[int, list[int]] = {}
        # Hashes of the blocks that the step's prefills compute.
        self.computing: set[int] = set()
        self.fronts: Fronts = {}
        self.has_preempted = False

    def add(self, seq: Sequence, num_tokens: int, kind: SequenceType) -> None:
        """Lets the step compute the next `num_tokens` of `seq`."""
        seq.type = kind
        if self.columns is not None:
            for decoding in self.columns.rows:
                decoding.type = SequenceType.DECODE
            self.columns, self.seqs = None, dict(self.seqs)
        self.seqs[seq.id] = seq
        self.num_scheduled_tokens.append(num_tokens)
        self.budget -= num_tokens
        if kind is SequenceType.PREFILL:
            self.num_prefill_seqs += 1
            self.num_prefill_tokens += num_tokens

    def add_decodes(self, columns: SequenceColumns) -> None:
        """Lets a step that is empty so far compute one token of each."""
        self.columns = columns
        self.seqs = columns.by_id
        self.num_scheduled_tokens = [1] * len(columns.rows)
        self.budget -= len(columns.rows)

    def build(self, num_spec_step: int) -> ScheduledBatch:
        """The batch, a snapshot of everything."""
        total = sum(self.num_scheduled_tokens)
        return ScheduledBatch(
            self.seqs,
            self.num_scheduled_tokens,
            total,
            total_tokens_num_prefill=self.num_prefill_tokens,
            total_tokens_num_decode=total - self.num_prefill_tokens,
            total_seqs_num=len(self.seqs),
            total_seqs_num_prefill=self.num_prefill_seqs,
            total_seqs_num_decode=len(self.seqs) - self.num_prefill_seqs,
            num_spec_step=num_spec_step,
            scheduled_spec_decode_tokens=self.drafts,
            columns=self.columns,
        )


class Scheduler:
    """Waiting and running sequences and their blocks. Pure: takes `now`, monotonic seconds, and does no I/O.

    Raises:
        InvalidFieldError: the pool can not hold one sequence of `max_model_len` tokens (T6).
    """

    def __init__(self, config: Config) -> None:
        pool_tokens = config.num_kvcache_blocks * config.kv_cache_block_size
        self.max_model_len = config.max_model_len or pool_tokens
        if pool_tokens < self.max_model_len:
            raise InvalidFieldError(
                "num_kvcache_blocks",
                f"is {config.num_kvcache_blocks}, which holds {pool_tokens} tokens",
                f"enough for max_model_len {self.max_model_len}",
            )
        spec = config.speculative_config
        self.use_spec = spec is not None
        self.mtp_k = spec.num_speculative_tokens if spec is not None else 0
        self.spec_stats = SpecStats()
        # A decode takes k + 1 tokens of the budget, so more could never run in one step.
        self.max_num_seqs = max(1, min(config.max_num_seqs, config.max_num_batched_tokens // (self.mtp_k + 1)))
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.min_prefill_tokens = int(PREFILL_SHARE * config.max_num_batched_tokens)
        self.block_manager = BlockManager(config)
        self.mixes = config.scheduling_policy == MIXED
        self.max_consecutive_prefill_steps = config.max_consecutive_prefill_steps
        self.gate = DelayGate(config.scheduler_delay_factor)
        self.stop_rules = StopRules(config, self.max_model_len)
        self.gated = SequenceQueue()
        self.waiting = SequenceQueue()
        self.running = SequenceSet()
        self.last_prompt_latency = 0.0
        self._last_step_s = 0.0
        self.prefill_rate = 0.0
        self.num_prefill_samples = 0
        self.context_cost = ContextCost()
        self.num_preemptions = 0
        self.num_nan_rows = 0
        # The steps in flight, oldest first.
        self._computing: deque[_Step] = deque()
        # Those of `running` whose prompt is not computed to its end.
        self._prefilling: dict[int, Sequence] = {}
        # The others, in the order of `running`; None when they have to be looked up anew.
        self._decoding: SequenceColumns | None = None
        # Decodes that the last step had no place for, in the order in which the next one takes them.
        self._left_out: list[int] = []
        # How many of `running` may need more blocks than they have.
        self._num_growing = 0
        self._num_prefill_steps = 0
        self._live: dict[int, Sequence] = {}
        self._outputs: list[RequestOutput] = []

    # Entrances and exits.

    def validate(self, seq: Sequence) -> None:
        """Checks that `seq` can be run.

        Raises:
            InvalidFieldError: it has no tokens, or blocks of another size.
            PromptTooLongError: its prompt leaves no room for an answer.
        """
        if not 1 <= seq.num_prompt_tokens <= seq.num_tokens:
            raise InvalidFieldError("token_ids", f"has {seq.num_prompt_tokens} prompt tokens", "at least 1")
        if seq.num_prompt_tokens >= self.max_model_len:
            raise PromptTooLongError("token_ids", seq.num_prompt_tokens, self.max_model_len)
        if seq.block_size != self.block_manager.block_size:
            raise InvalidFieldError("block_size", f"is {seq.block_size}", str(self.block_manager.block_size))

    def add(self, seq: Sequence) -> bool:
        """Takes a sequence that passes this worker's own delay gate. False for the id of a live one (rule S5).

        Raises:
            ApiError: see `validate`; nothing has changed.
        """
        self.validate(seq)
        return self._enter(seq, self.gated)

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
        return [seq for seq in group if self._enter(seq, self.waiting)]

    def abort(self, seq_id: int, *, now: float, reason: EndReason = EndReason.CANCELLED) -> bool:
        """Ends a sequence at once, wherever it is, and frees its blocks. False when the id is not live: idempotent."""
        seq = self._live.get(seq_id)
        if seq is None:
            return False
        self._end(seq, Stop("aborted", reason), now)
        self._emit(seq, [])
        return True

    def overdue(self, now: float, max_wait_s: float) -> list[Sequence]:
        """Sequences that may go back to their router and have waited longer than `max_wait_s` for their first step.

        Not those that wait for what a running one computes: they hit it soon, while another worker has nothing of it.
        Their time begins when it is computed. Within a class it looks no further than the first that has not waited so
        long: they are in order of arrival.
        """
        fronts = [self._fronts(), *(step.fronts for step in self._computing)]
        found: list[Sequence] = []
        for seqs in self.waiting.by_class():
            for seq in seqs:
                if seq.first_scheduled_time is not None:
                    continue
                if now - seq.arrive_time <= max_wait_s:
                    break
                if any(self._follows(seq, each) for each in fronts):
                    seq.held_until = now
                elif seq.may_return and now - seq.held_until > max_wait_s:
                    found.append(seq)
        return found

    def _fronts(self) -> Fronts:
        """The first blocks that running prompts have not computed to their ends, as hashes by place in the prompt."""
        fronts: Fronts = {}
        for seq in self._prefilling.values():
            self._note_front(fronts, seq, seq.num_computed_tokens)
        return fronts

    def _note_front(self, fronts: Fronts, seq: Sequence, start: int) -> None:
        """Adds the block that a prompt goes on with at `start`, unless it is cached: then nobody waits for it."""
        hashes = self.block_manager.hashes_in(seq, start, start + 1)
        if hashes and hashes[0] not in self.block_manager.hash_to_block_id:
            fronts.setdefault(start // seq.block_size, set()).add(hashes[0])

    def _follows(self, seq: Sequence, fronts: Fronts) -> bool:
        """True if `seq` will find in the cache what one of the fronts computes. Cheap: looks at no cached block."""
        return any(self.block_manager.hittable_hash(seq, place) in hashes for place, hashes in fronts.items())

    def take_outputs(self) -> list[RequestOutput]:
        """Takes the outputs since the last call: exactly one finished output for every sequence that has ended."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def live_ids(self) -> list[int]:
        """Ids of the sequences that have not ended, in the order of their arrival."""
        return list(self._live)

    def has_unfinished(self) -> bool:
        """True if anything waits or runs, or an output has not been taken."""
        return bool(self._live or self._outputs)

    # One step.

    def schedule(self, now: float) -> tuple[ScheduledBatch, dict[int, Sequence]] | None:
        """The next step's batch and its sequences; None when there is no work, or it needs output in flight first."""
        self._open_gate(now)
        step = _Step(self.max_num_batched_tokens, self._prefill_cost())
        if self.mixes:
            self._fill_decode(step)
            self._fill_prefill(step)
        else:
            self._fill_one_kind(step)
        if not step.seqs:
            return None
        batch = step.build(self.mtp_k)
        self._launch(step, batch, now)
        return batch, step.seqs

    def record_step(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Takes note of how long a batch took, which is what `last_prompt_latency` means."""
        self._last_step_s = duration_s
        if batch.total_tokens_num_prefill == 0:
            return
        self.last_prompt_latency = duration_s
        if duration_s > 0:
            self._note_rate(batch.total_tokens_num_prefill, duration_s)
            self._note_contexts(batch, duration_s)

    def _note_contexts(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Prompts are behind the decodes in their batch."""
        first = len(batch.num_scheduled_tokens) - batch.total_seqs_num_prefill
        rows = list(zip(batch.num_computed_tokens[first:], batch.num_scheduled_tokens[first:], strict=True))
        cost = sum(self.context_cost.of(start, num_tokens) for start, num_tokens in rows)
        if cost >= _TELLING_SHARE * self.max_num_batched_tokens:
            num_pairs = sum(n * start + n * (n + 1) // 2 for start, n in rows)
            self.context_cost.note(batch.total_tokens_num_prefill, num_pairs, duration_s)

    def _note_rate(self, num_tokens: int, duration_s: float) -> None:
        """A small step may show that the worker is faster than was thought, but never that it is slower."""
        rate = num_tokens / duration_s
        is_telling = num_tokens >= _TELLING_SHARE * self.max_num_batched_tokens
        self.num_prefill_samples += is_telling
        if is_telling or 0 < self.prefill_rate < rate:
            self.prefill_rate += (rate - self.prefill_rate) * (_RATE_WEIGHT if self.prefill_rate else 1.0)

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
        finished: list[Sequence] = []
        self._computing.popleft()
        if batch.is_plain_decode:
            self._land_decodes(seqs, fwd_output, finished, now)
        else:
            drafts = fwd_output.draft_token_ids or {}
            for seq, num_scheduled, final in zip(seqs, batch.num_scheduled_tokens, batch.is_final, strict=True):
                verified = batch.scheduled_spec_decode_tokens.get(seq.id)
                token_ids = fwd_output.token_ids.get(seq.id, ())
                self._land(seq, num_scheduled, final, token_ids, verified, finished, now)
                if seq.status is SequenceStatus.RUNNING:
                    seq.spec_token_ids = drafts.get(seq.id, [])
        if stream_output_queue is not None:
            stream_output_queue.put_nowait(self.take_outputs())
        return finished

    def _land_decodes(
        self, seqs: Iterable[Sequence], fwd_output: ScheduledBatchOutput, finished: list[Sequence], now: float
    ) -> None:
        """`_land` for a step of single decoded tokens, whose plain cases are written out: they are nearly all."""
        outputs, token_ids, running = self._outputs, fwd_output.token_ids, SequenceStatus.RUNNING
        for seq in seqs:
            sampled = token_ids.get(seq.id, ())
            # A prompt's last token that was discarded alone comes as a decode, and brings the first token.
            if seq.status is not running or len(sampled) != 1 or seq.first_token_time is None or sampled[0] < 0:
                self._land(seq, 1, True, sampled, None, finished, now)
                continue
            token_id = sampled[0]
            seq.num_inflight_tokens -= 1
            seq.num_placeholder -= 1
            tokens = seq.token_ids
            tokens.append(token_id)
            seq.num_computed_tokens += 1
            if seq.num_computed_tokens >= seq.publish_at:
                self.block_manager.publish(seq)
                self.block_manager.prove(seq)
            if token_id in seq.stopping_ids or seq.stop_token_sequences or len(tokens) >= seq.length_limit:
                stop = self.stop_rules.check(seq)
                if stop is not None:
                    self._end(seq, stop, now)
                    finished.append(seq)
                    self._emit(seq, [token_id])
                    continue
            output = RequestOutput(seq.id, [token_id])
            outputs.append(output)
            if seq.stream_callback is not None:
                seq.stream_callback(output)

    def _land(
        self,
        seq: Sequence,
        num_scheduled: int,
        final: bool,
        token_ids: tuple[int, ...],
        verified: list[int] | None,
        finished: list[Sequence],
        now: float,
    ) -> None:
        """Takes what a step has computed of one sequence, with the drafts that it has verified."""
        if seq.is_finished:
            return
        seq.num_inflight_tokens -= num_scheduled
        seq.num_placeholder -= final
        taken, stop = self._append(seq, token_ids, now)
        # A preempted sequence gets its late token, but what was computed with it is gone. Nor is what a step has
        # computed for anybody else if its output is no number.
        if seq.status is SequenceStatus.RUNNING and stop is not _NOT_A_NUMBER:
            computed = seq.num_computed_tokens + num_scheduled - self._count_rejected(verified, token_ids)
            seq.num_computed_tokens = min(computed, seq.num_tokens)
            self.block_manager.publish(seq)
            if taken:
                self.block_manager.prove(seq)
        if stop is _NOT_A_NUMBER:
            # Chunks before this step have been published, and none of them has given a number.
            self.block_manager.forget_unproved(seq)
        if stop is not None:
            self._end(seq, stop, now)
            finished.append(seq)
        if taken or stop is not None:
            self._emit(seq, taken)

    def discard(self, seqs: Iterable[Sequence], batch: ScheduledBatch) -> None:
        """Instead of `postprocess`, for a batch that was interrupted: what it should have computed is still to do."""
        self._computing.popleft()
        for seq, num_scheduled, final in zip(seqs, batch.num_scheduled_tokens, batch.is_final, strict=True):
            seq.num_inflight_tokens -= num_scheduled
            seq.num_placeholder -= final
            if seq.status is SequenceStatus.RUNNING and seq.next_position < seq.num_tokens - 1:
                self._prefilling[seq.id] = seq
                self._decoding = None

    # Load figures.

    @property
    def num_decoding(self) -> int:
        """Running sequences whose prompt is computed."""
        return len(self.running) - len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step, or for the step after a preemption."""
        return len(self.gated) + len(self.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before every sequence decodes, cache hits not foreseen."""
        unfinished = sum(seq.num_tokens - seq.next_position for seq in self._prefilling.values())
        return self.gated.num_tokens + self.waiting.num_tokens + unfinished

    @property
    def room_tokens(self) -> int:
        """Prompt tokens that would still fit the next prefill: under `mixed` beside the decodes."""
        decodes = self.num_decoding * (self.mtp_k + 1) if self.mixes else 0
        return max(0, max(self.min_prefill_tokens, self.max_num_batched_tokens - decodes) - self.waiting_tokens)

    @property
    def room_seqs(self) -> int:
        """Sequences that could still be run."""
        return max(0, self.max_num_seqs - len(self.running) - self.num_waiting)

    def check_integrity(self) -> None:
        """Checks the module's invariants between steps. O(blocks): for tests and idle time.

        Raises:
            IntegrityError: one is broken.
        """
        queued = [*self.gated, *self.waiting]
        everywhere = [seq.id for seq in [*queued, *self.running]]
        _require(sorted(everywhere) == sorted(self._live), "a live sequence is in no queue, or in two")
        _require(len(self.running) <= self.max_num_seqs, f"{len(self.running)} sequences run")
        for seq in queued:
            _require(seq.status is SequenceStatus.WAITING and not seq.block_table, f"waiting sequence {seq.id}")
            _require(seq.num_computed_tokens == 0 and not seq.spec_token_ids, f"waiting sequence {seq.id} has a past")
        for seq in self.running:
            self._check_running(seq)
        _require(self._num_growing == sum(seq.may_grow for seq in self.running), "the count of growing sequences")
        _require(self.waiting.num_tokens == sum(seq.num_tokens for seq in self.waiting), "the count of waiting tokens")
        self.block_manager.check_integrity(self.running)

    def _check_running(self, seq: Sequence) -> None:
        _require(seq.status is SequenceStatus.RUNNING, f"running sequence {seq.id} is {seq.status}")
        _require(0 <= seq.num_cached_tokens <= seq.num_computed_tokens < seq.num_tokens, f"lengths of {seq.id}")
        _require(len(seq.block_table) * seq.block_size >= seq.next_position, f"blocks of {seq.id}")
        _require(bool(self._computing) or seq.num_inflight_tokens == 0, f"sequence {seq.id} is in no step in flight")
        if seq.id in self._prefilling:
            _require(seq.num_placeholder == 0 and seq.next_position < seq.num_tokens, f"prefill of {seq.id}")
        else:
            unknown = 0 if seq.num_inflight_tokens else seq.num_tokens - 1 - seq.num_computed_tokens
            _require((seq.num_placeholder > 0) == (seq.num_inflight_tokens > 0), f"output in flight of {seq.id}")
            _require(unknown == 0, f"sequence {seq.id} neither prefills nor decodes")

    # Admission.

    def _enter(self, seq: Sequence, queue: SequenceQueue) -> bool:
        if seq.id in self._live:
            return False
        self._live[seq.id] = seq
        self.stop_rules.prepare(seq)
        queue.append(seq)
        # What an earlier attempt has delivered may have ended the stream already (rule S5).
        stop = self.stop_rules.check(seq)
        if stop is not None:
            self._end(seq, stop, seq.arrive_time)
            self._emit(seq, [])
        return True

    def _open_gate(self, now: float) -> None:
        """Lets the gated sequences wait for a prefill, all or none; asked once per step."""
        if not self.gated:
            return
        age, decoding = now - min(seq.arrive_time for seq in self.gated.heads()), len(self.running) > 0
        if self.gate.is_open(age_s=age, last_prompt_latency_s=self.last_prompt_latency, decoding=decoding):
            while self.gated:
                self.waiting.append(self.gated.popleft())

    def _fill_one_kind(self, step: _Step) -> None:
        """Prompts, or else decodes; after `max_consecutive_prefill_steps` the other way round."""
        fills = [self._fill_prefill, self._fill_decode]
        if self._num_prefill_steps >= self.max_consecutive_prefill_steps:
            fills.reverse()
        for fill in fills:
            if not step.seqs:
                fill(step)
        if step.seqs:
            self._num_prefill_steps = self._num_prefill_steps + 1 if step.num_prefill_seqs else 0

    def _launch(self, step: _Step, batch: ScheduledBatch, now: float) -> None:
        """The batch is in flight: its sequences count what it computes, so that the next step goes on behind it."""
        self._computing.append(step)
        if step.columns is not None:
            decode = SequenceType.DECODE
            for seq in step.columns.rows:
                seq.num_inflight_tokens += 1
                seq.num_placeholder += 1
                seq.type = decode
            return
        for seq, num_tokens, final in zip(step.seqs.values(), batch.num_scheduled_tokens, batch.is_final, strict=True):
            seq.num_inflight_tokens += num_tokens
            if seq.first_scheduled_time is None:
                seq.first_scheduled_time = now
            if final:
                seq.num_placeholder += 1
                if self._prefilling.pop(seq.id, None) is not None:
                    self._decoding = None

    def _fill_prefill(self, step: _Step) -> None:
        for seq in self._prefilling.values():
            if num_tokens := self._cut(step, seq.next_position, min(seq.num_tokens - seq.next_position, step.budget)):
                self._add_prefill(step, seq, num_tokens)
        if self.waiting and not step.has_preempted:
            self._admit(step)

    def _admit(self, step: _Step) -> None:
        places = self.max_num_seqs - len(self.running)
        if step.budget <= 0 or places <= 0:
            return
        lookups = max(_LEAST_LOOKUPS, int(_LOOKUP_SHARE * self._last_step_s / _LOOKUP_S))
        # One block is kept free for each sequence that may need a further one, else a preempted sequence would be
        # admitted again only to be preempted again (T9).
        for seq in list(islice(self.waiting, _MOST_LOOKED_AT)):
            if step.budget <= 0 or lookups <= 0 or places <= 0:
                break
            if seq.num_inflight_tokens:
                # Preempted with a step in flight: its late token belongs to what has to be computed.
                break
            # If this very step computes its next block, it hits that next step instead of computing it again.
            if self._follows(seq, step.fronts):
                continue
            cached = self.block_manager.cached_blocks(seq)
            lookups -= len(cached) + 1
            if self._is_computing(self.block_manager.next_hash(seq, cached), step):
                continue
            start = len(cached) * seq.block_size
            num_tokens = self._cut(step, start, self._chunk(seq.num_tokens - start, step))
            if num_tokens == 0 or not self.block_manager.can_allocate(seq, cached, self._num_growing):
                break
            places -= 1
            self._start(seq, cached)
            self._add_prefill(step, seq, num_tokens)

    def _is_computing(self, block_hash: int | None, step: _Step) -> bool:
        """True if the step in the making, or one in flight, computes a block."""
        return block_hash in step.computing or any(block_hash in flight.computing for flight in self._computing)

    def _chunk(self, remaining: int, step: _Step) -> int:
        """Number of the `remaining` prompt tokens that fit the step. Steps without decodes are cut to whole prompts,
        but for prompts that are longer than any step."""
        if remaining <= step.budget:
            return remaining
        return step.budget if self.mixes or remaining > self.max_num_batched_tokens else 0

    def _prefill_cost(self) -> float:
        """Budget of the step's prompts: beside decodes as much as a full step of a prompt that begins."""
        return self.context_cost.of(0, self.max_num_batched_tokens) if self.num_decoding else math.inf

    def _cut(self, step: _Step, start: int, num_tokens: int) -> int:
        """Number of a prompt's next `num_tokens`, from `start` on, that the step can afford."""
        affordable = self.context_cost.most_tokens(start, num_tokens, step.prefill_cost)
        if step.num_prefill_seqs:
            return affordable
        return max(affordable, min(num_tokens, math.ceil(_LEAST_CHUNK * self.max_num_batched_tokens)))

    def _start(self, seq: Sequence, cached: list[int]) -> None:
        self.waiting.remove(seq)
        self.block_manager.allocate(seq, cached)
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        self._prefilling[seq.id] = seq
        self._note_growth(seq)

    def _add_prefill(self, step: _Step, seq: Sequence, num_tokens: int) -> None:
        start = seq.next_position
        step.computing.update(self.block_manager.hashes_in(seq, start, start + num_tokens))
        self._note_front(step.fronts, seq, start)
        step.prefill_cost -= self.context_cost.of(start, num_tokens)
        step.add(seq, num_tokens, SequenceType.PREFILL)

    def _note_growth(self, seq: Sequence) -> None:
        """Counts whether decoding may need a further block than the sequence has now."""
        # The last token's KV is never computed, but drafts want slots behind it.
        longest = min(seq.length_limit - 1 + self.mtp_k, self.max_model_len)
        grows = seq.status is SequenceStatus.RUNNING and longest > seq.num_slots
        self._num_growing += grows - seq.may_grow
        seq.may_grow = grows

    # Decoding.

    def _fill_decode(self, step: _Step) -> None:
        kept = self._kept_for_prompts() if self.mixes else 0
        most = step.budget - kept
        if not self.use_spec and self._fill_plain_decode(step, most):
            return
        decoding, self._left_out = self._in_turn([seq for seq in self._decodes() if self._goes_on(seq)], most)
        # Tokens that are not for this row: the prompts', and one of each row behind it.
        for others, seq in zip(range(kept + len(decoding) - 1, kept - 1, -1), decoding, strict=True):
            # Victims are taken from the end, so none of them is in the step already.
            if seq.status is SequenceStatus.RUNNING:
                self._try_decode(step, seq, step.budget - others - 1)

    def _decodes(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.id not in self._prefilling]

    def _kept_for_prompts(self) -> int:
        """Tokens of a step that decodes leave to prompts: a share, or less where the prompts need no more."""
        share = self.min_prefill_tokens
        if self.num_decoding * (self.mtp_k + 1) <= self.max_num_batched_tokens - share:
            return 0
        unfinished = sum(seq.num_tokens - seq.next_position for seq in self._prefilling.values())
        if unfinished < share and self._may_admit():
            unfinished += self.waiting.num_tokens
        return min(share, unfinished)

    def _may_admit(self) -> bool:
        """True if the sequence at the front finds a place and blocks."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        head = self.waiting.first()
        return not head.num_inflight_tokens and self.block_manager.can_allocate(head, None, self._num_growing)

    def _in_turn(self, rows: list[Sequence], most: int) -> tuple[list[Sequence], list[int]]:
        """Rows that the step has room for, in their order, and the ids of the others: round robin, beginning with
        those that the last step left out."""
        if len(rows) <= most:
            return rows, []
        places = {seq.id: i for i, seq in enumerate(rows)}
        start = next((places[seq_id] for seq_id in self._left_out if seq_id in places), 0)
        left_out = [seq.id for seq in [*rows[start:], *rows[:start]][most:]]
        missing = set(left_out)
        return [seq for seq in rows if seq.id not in missing], left_out

    def _fill_plain_decode(self, step: _Step, most: int) -> bool:
        """Takes one token of every sequence that can go on, `most` at most; takes nothing and returns False if one
        must be preempted for it."""
        if self._decoding is None:
            self._decoding = SequenceColumns(self._decodes())
        columns = self._decoding
        left_out: list[int] = []
        # Kept while all go on: whoever has seen these columns need not look at them again.
        if self._computing and not all(map(self._goes_on, columns.rows)):
            columns = SequenceColumns([seq for seq in columns.rows if self._goes_on(seq)])
        if len(columns.rows) > most:
            rows, left_out = self._in_turn(columns.rows, most)
            columns = SequenceColumns(rows)
        growing = [seq for seq in columns.rows if seq.num_computed_tokens + seq.num_inflight_tokens >= seq.num_slots]
        if len(growing) > self.block_manager.num_free_blocks:
            return False
        for seq in growing:
            self.block_manager.may_append(seq)
            self._note_growth(seq)
        if columns.rows:
            step.add_decodes(columns)
        self._left_out = left_out
        return True

    def _try_decode(self, step: _Step, seq: Sequence, most_drafts: int) -> None:
        # Slots for k drafts and the token before them, but never beyond the longest sequence (T6).
        num_slots = min(self.mtp_k + 1, self.max_model_len - seq.next_position)
        if self._make_room(seq, num_slots, step):
            self.block_manager.may_append(seq, num_slots)
            self._note_growth(seq)
            self._add_decode(step, seq, most_drafts)

    def _goes_on(self, seq: Sequence) -> bool:
        """True if a decode can be scheduled before the output in flight is there."""
        if not seq.num_placeholder:
            return True
        return not self.use_spec and len(seq.token_ids) + seq.num_placeholder < seq.length_limit

    def _add_decode(self, step: _Step, seq: Sequence, most_drafts: int) -> None:
        """The newest token, and drafts as far as they can still be output."""
        most = min(most_drafts, self.mtp_k, self.max_model_len - seq.num_tokens - 1)
        drafts = seq.spec_token_ids[: max(0, min(most, seq.max_tokens - seq.num_completion_tokens - 1))]
        if drafts:
            step.drafts[seq.id] = drafts
        step.add(seq, 1 + len(drafts), SequenceType.DECODE)

    def _make_room(self, seq: Sequence, num_slots: int, step: _Step) -> bool:
        """Preempts the newest sequences of the lowest class until `seq` can go on; False when it was itself the one."""
        while not self.block_manager.can_append(seq, num_slots):
            victim = self.running.last()
            self.preempt(victim)
            step.has_preempted = True
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Puts a running sequence back to the front of `waiting`. All its tokens are computed anew, as far as its
        published blocks are not still cached by then."""
        self._leave(seq)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        seq.num_cached_tokens = seq.num_computed_tokens = 0
        seq.spec_token_ids = []
        self.waiting.appendleft(seq)

    # Ends.

    def _count_rejected(self, drafts: list[int] | None, token_ids: tuple[int, ...]) -> int:
        """Number of the drafts verified by a sequence's step that were not accepted."""
        if not drafts:
            return 0
        accepted = len(token_ids) - 1
        self.spec_stats.update(len(drafts), accepted)
        return len(drafts) - accepted

    def _append(self, seq: Sequence, token_ids: tuple[int, ...], now: float) -> tuple[list[int], Stop | None]:
        """Appends tokens one by one up to a stop; those behind it count nowhere. Those appended, and the stop."""
        if token_ids and token_ids[0] != NO_TOKEN and seq.first_token_time is None:
            seq.first_token_time = now
        taken: list[int] = []
        stop = None
        for token_id in token_ids:
            if token_id == NO_TOKEN:
                self.num_nan_rows += 1
                stop = _NOT_A_NUMBER
                break
            seq.append_token(token_id)
            taken.append(token_id)
            stop = self.stop_rules.check(seq)
            if stop is not None:
                break
        if seq.status is SequenceStatus.WAITING:
            self.waiting.grew(len(taken))
        return taken, stop

    def _end(self, seq: Sequence, stop: Stop, now: float) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq)
        else:
            (self.waiting if seq in self.waiting else self.gated).remove(seq)
            self.block_manager.deallocate(seq)
        del self._live[seq.id]
        seq.status = SequenceStatus.FINISHED
        seq.leave_time = now
        seq.leave_reason, seq.end_reason, seq.stop_token_id, seq.stop_token_sequence = stop

    def _leave(self, seq: Sequence) -> None:
        """Takes a sequence out of the running set."""
        self.running.remove(seq)
        self._prefilling.pop(seq.id, None)
        self._decoding = None
        self.block_manager.deallocate(seq)
        self._num_growing -= seq.may_grow
        seq.may_grow = False

    def _emit(self, seq: Sequence, token_ids: list[int]) -> None:
        output = RequestOutput(seq.id, token_ids)
        if seq.is_finished:
            output.finished = True
            output.finish_reason, output.end_reason = seq.leave_reason, seq.end_reason
            output.stop_token_id, output.stop_token_sequence = seq.stop_token_id, seq.stop_token_sequence
        self._outputs.append(output)
        if seq.stream_callback is not None:
            seq.stream_callback(output)


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise IntegrityError(problem)
