"""Life of sequences: each live one is gated, waiting or running; Lifecycle moves them.

Invariants (worker/engine/integrity.py checks them):
- a live sequence is in exactly one of `gated`, `waiting`, `running`, and only running ones hold blocks;
- a running sequence is in `prefilling` until all its known tokens are computed or in flight, and then decodes;
- a preempted sequence moves to the front of its class. The newest is preempted first, so the order of arrival is kept;
- every sequence added gets exactly one output with `finished`.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.telemetry.names import Stage
from worker.engine.batch import BlockCopy, SequenceColumns
from worker.engine.block_manager import BlockManager
from worker.engine.outputs import DecodeWork, End, EngineTotals, GivenLogprobs, RequestOutput, Start, sequence_times
from worker.engine.prefix_cache import Fronts
from worker.engine.sequence import EndReason, Sequence, SequenceStatus
from worker.engine.sequence_ledger import PhaseStart, StepAccount
from worker.engine.sequence_queue import SequenceQueue, SequenceSet
from worker.engine.stop_rules import Stop, StopRules


class Lifecycle:
    """The live sequences and their moves.

    Args:
        block_manager: the KV cache's blocks.
        stop_rules: end a sequence that arrives complete.

    Attributes:
        gated: sequences that wait at the engine's own delay gate.
        waiting: sequences that wait for their first step, or for the first one after a preemption.
        running: sequences with blocks.
        prefilling: running sequences whose known tokens are not all computed or in flight, by id.
        live: all sequences by id, in order of arrival.
        num_growing: number of running sequences that may need more blocks.
        num_preemptions: preemptions since the start.
        outputs: outputs since the last `take_outputs`.
        phases: stages that live sequences have entered since the last `take_phases`, by id.
        totals: counts since the start.
        account: where the time of steps went.
    """

    def __init__(self, block_manager: BlockManager, stop_rules: StopRules) -> None:
        self.block_manager = block_manager
        self._stop_rules = stop_rules
        self.gated = SequenceQueue()
        self.waiting = SequenceQueue()
        self.running = SequenceSet()
        self.prefilling: dict[int, Sequence] = {}
        self.live: dict[int, Sequence] = {}
        self.num_growing = 0
        self.num_preemptions = 0
        self.outputs: list[RequestOutput] = []
        self.phases: dict[int, PhaseStart] = {}
        self.totals = EngineTotals()
        self.account = StepAccount()
        # Running sequences that decode, in order; None if they have changed.
        self._decoding: SequenceColumns | None = None

    def enter(self, seq: Sequence, queue: SequenceQueue) -> bool:
        """Adds a new sequence to a queue. False for the id of a live one (rule S5)."""
        if seq.id in self.live:
            return False
        self.live[seq.id] = seq
        self._stop_rules.prepare(seq)
        queue.append(seq)
        # Tokens of an earlier attempt may end the sequence already (rule S5). If they reach the length limit, one
        # further step shows whether they complete the constraint.
        stop = self._stop_rules.check(seq)
        if stop is not None and not (stop.end_reason is EndReason.LENGTH and seq.sampling_params.grammar):
            self.end(seq, stop, seq.arrive_time)
            self.emit_end(seq, [], stop)
        return True

    def start(self, seq: Sequence, cached: list[int]) -> BlockCopy | None:
        """Moves a waiting sequence to `running`, with blocks for all its tokens, `cached` first.

        Returns:
            The block copy that its first step makes (BlockManager.allocate).
        """
        self.waiting.remove(seq)
        copy = self.block_manager.allocate(seq, cached)
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        self.prefilling[seq.id] = seq
        self.note_growth(seq)
        return copy

    def end_prefill(self, seq: Sequence) -> None:
        """Moves a sequence from prefill to decode; a no-op for one that decodes already."""
        if self.prefilling.pop(seq.id, None) is not None:
            self._decoding = None

    def resume_prefill(self, seq: Sequence) -> None:
        """Moves a running sequence back to prefill: it has several tokens to compute again."""
        self.prefilling[seq.id] = seq
        self._decoding = None

    def preempt(self, seq: Sequence, grower: Sequence | None = None) -> None:
        """Frees a running sequence's blocks and puts it back at the front of `waiting`.

        Its tokens are computed again, except those whose published blocks are still cached then.

        Args:
            seq: the sequence.
            grower: sequence that needs a block. It is blamed; if it is `seq`, the one with the most slots is.
        """
        self._leave(seq)
        seq.ledger.move(Stage.PREEMPTED, self.account, self.account.ended)
        if grower is seq and self.running:
            grower = max(self.running, key=lambda each: each.num_slots)
        seq.ledger.evictor = None if grower is seq or grower is None else grower.ledger
        self.note_phase(seq)
        self.num_preemptions += 1
        seq.preempted_at += (self.account.ended,)
        seq.status = SequenceStatus.WAITING
        seq.num_cached_tokens = seq.num_computed_tokens = 0
        seq.spec_token_ids = []
        self.waiting.appendleft(seq)

    def account_prompts(self, prompts: Iterable[tuple[Sequence, int]], now: float) -> None:
        """Notes that a step with chunks of these prompts is scheduled."""
        for seq, _ in prompts:
            seq.ledger.start(self.account, now)

    def account_holds(self, before: frozenset[int], held: frozenset[int], now: float) -> None:
        """Notes that the sequences `held` wait for slow masks now; those `before` did so in the last step."""
        for seq_id in before ^ held:
            if (seq := self.live.get(seq_id)) is not None and seq.status is SequenceStatus.RUNNING:
                seq.ledger.move(Stage.GRAMMAR_WAIT if seq_id in held else Stage.DECODE, self.account, now)
                self.note_phase(seq)

    def end(self, seq: Sequence, stop: Stop, now: float) -> None:
        """Ends a live sequence and frees its blocks; the caller then calls `emit_end`."""
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq)
        else:
            (self.waiting if seq in self.waiting else self.gated).remove(seq)
            self.block_manager.deallocate(seq)
        del self.live[seq.id]
        self.phases.pop(seq.id, None)
        seq.ledger.move(seq.ledger.stage, self.account, now)
        seq.status = SequenceStatus.FINISHED
        seq.leave_time = now
        seq.leave_reason = stop.leave_reason

    def overdue(self, now: float, max_wait_s: float, in_flight: Iterable[Fronts]) -> list[Sequence]:
        """Waiting sequences that may return to their router and have waited longer than `max_wait_s` for a first step.

        A sequence whose prefix another one computes is not overdue: it hits that prefix soon, while another worker
        has nothing of it. Its time begins when the prefix is computed. Nor is one overdue whose blocks come from a KV
        tier: TierLookups bounds that wait. Within a class the search ends at the first
        sequence that has not waited so long: they are in order of arrival.

        Args:
            now: monotonic seconds.
            max_wait_s: longest wait.
            in_flight: fronts of the steps in flight.
        """
        prefixes, prompts = self.block_manager.prefixes, Fronts()
        for seq in self.prefilling.values():
            prefixes.add_front(prompts, seq, seq.num_computed_tokens)
        fronts = [prompts, *in_flight]
        found: list[Sequence] = []
        for seqs in self.waiting.by_class():
            for seq in seqs:
                if seq.first_scheduled_time is not None:
                    continue
                if now - seq.arrive_time <= max_wait_s:
                    break
                # Those that have not asked the tiers yet wait for their turn, as behind other prompts.
                is_fetching = seq.waits_for_kv and seq.ledger.tier_wait is not None
                if is_fetching or any(prefixes.follows(seq, each) for each in fronts):
                    seq.held_until = now
                elif seq.may_return and now - seq.held_until > max_wait_s:
                    found.append(seq)
        return found

    def emit(self, seq: Sequence, token_ids: list[int], *, is_first: bool = False, logprobs: bytes = b"") -> None:
        """Emits new tokens of a sequence; `is_first` for the first ones of this attempt."""
        output = RequestOutput(seq.id, token_ids, first_pos=seq.num_tokens - len(token_ids), logprobs=logprobs)
        self.totals.generated_tokens += len(token_ids)
        if is_first:
            output.start = self._begin(seq)
        self._put_out(seq, output)

    def note_phase(self, seq: Sequence) -> None:
        """Adds the stage that a sequence has entered to `phases`; a no-op if it is still the same."""
        if seq.ledger.has_moved:
            self.phases[seq.id] = seq.ledger.phase_start()

    def emit_given(self, seq: Sequence, given: GivenLogprobs) -> None:
        """Emits logprobs of given tokens."""
        self._put_out(seq, RequestOutput(seq.id, [], first_pos=seq.num_tokens, given=given))

    def emit_end(
        self,
        seq: Sequence,
        token_ids: list[int],
        stop: Stop,
        *,
        is_first: bool = False,
        message: str = "",
        logprobs: bytes = b"",
    ) -> None:
        """Emits the last tokens of a sequence that `end` has ended with this stop."""
        first_pos = seq.num_tokens - len(token_ids)
        output = RequestOutput(seq.id, token_ids, True, stop.leave_reason, first_pos, logprobs=logprobs)
        self.totals.generated_tokens += len(token_ids)
        if is_first:
            output.start = self._begin(seq)
        steps, tokens = seq.work_before
        drafts = () if seq.draft_history is None else seq.draft_history.counter.by_position
        kv_usage = 1 - self.block_manager.num_free_blocks / max(1, self.block_manager.num_blocks)
        done = DecodeWork(
            self.totals.steps - steps, self.totals.taken_tokens - tokens, len(seq.preempted_at), kv_usage, drafts
        )
        sequence = None if stop.token_sequence is None else tuple(stop.token_sequence)
        times = sequence_times(seq, done)
        output.end = End(seq.num_tokens, stop.end_reason, stop.token_id, sequence, message, times, seq.ledger)
        self.totals.ended[stop.end_reason] += 1
        self._put_out(seq, output)

    def take_outputs(self) -> list[RequestOutput]:
        """Takes the outputs since the last call."""
        outputs, self.outputs = self.outputs, []
        self.totals.taken_tokens = self.totals.generated_tokens
        return outputs

    def take_phases(self) -> dict[int, PhaseStart]:
        """Takes the stages that live sequences have entered since the last call."""
        phases, self.phases = self.phases, {}
        return phases

    def _begin(self, seq: Sequence) -> Start:
        totals = self.totals
        seq.work_before = totals.steps, totals.taken_tokens
        start = Start.of(seq)
        totals.prompt_tokens += start.prompt_tokens
        totals.cached_tokens += start.cached_tokens
        return start

    def _put_out(self, seq: Sequence, output: RequestOutput) -> None:
        self.outputs.append(output)
        if seq.stream_callback is not None:
            seq.stream_callback(output)

    def append_slots(self, seq: Sequence, num_tokens: int = 1) -> None:
        """Gives a running sequence slots for its next `num_tokens` tokens (BlockManager.may_append)."""
        self.block_manager.may_append(seq, num_tokens)
        self.note_growth(seq)

    def note_growth(self, seq: Sequence) -> None:
        """Updates `num_growing` for a sequence whose slots have changed."""
        # The KV of the last token is never computed.
        grows = seq.status is SequenceStatus.RUNNING and seq.length_limit - 1 > seq.num_slots
        self.num_growing += grows - seq.may_grow
        seq.may_grow = grows

    @property
    def num_decoding(self) -> int:
        """Number of running sequences that decode."""
        return len(self.running) - len(self.prefilling)

    @property
    def unfinished_tokens(self) -> int:
        """Number of tokens of running prompts that no step has computed or computes now."""
        return sum(seq.num_tokens - seq.next_position for seq in self.prefilling.values())

    def decodes(self) -> list[Sequence]:
        """Running sequences that decode, in the order of `running`."""
        return [seq for seq in self.running if seq.id not in self.prefilling]

    def decode_columns(self) -> SequenceColumns:
        """Columns of `decodes`; the same object while the sequences are the same."""
        if self._decoding is None:
            self._decoding = SequenceColumns(self.decodes())
        return self._decoding

    def _leave(self, seq: Sequence) -> None:
        """Removes a sequence from `running` and frees its blocks."""
        self.running.remove(seq)
        self.prefilling.pop(seq.id, None)
        self._decoding = None
        self.block_manager.deallocate(seq)
        self.num_growing -= seq.may_grow
        seq.may_grow = False
