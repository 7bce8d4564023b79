"""Applies the output of steps to sequences: appends tokens, publishes full blocks, applies the stop rules.

Invariants:
- each batch is applied once, or discarded, in the order in which batches were scheduled;
- tokens behind the one that stops a sequence are dropped;
- a block is published only after the step that wrote its KV, and never by a step whose output was not a number.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from kernels.no_token import NO_TOKEN
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.lifecycle import Lifecycle
from worker.engine.outputs import GivenLogprobs, RequestOutput
from worker.engine.sequence import EndReason, Sequence, SequenceStatus
from worker.engine.speculation.draft_controller import DraftController
from worker.engine.speculation.draft_rates import DraftHistory
from worker.engine.speculation.spec_stats import SpecStats
from worker.engine.step import Step
from worker.engine.stop_rules import Stop, StopRules

_NOT_A_NUMBER: Final = Stop("not_a_number", EndReason.NOT_A_NUMBER)
_COMPLETE: Final = Stop("constraint", EndReason.CONSTRAINT)
_CONSTRAINT_FAILED: Final = Stop("constraint_failed", EndReason.CONSTRAINT_FAILED)
_NOT_A_NUMBER_MESSAGE: Final = "the model's output is not a number"
# Last token of an embedded sequence; it has no meaning.
_POOLED_TOKEN: Final = 0


class Postprocessor:
    """Applies the output of one step after the other.

    Args:
        lifecycle: the live sequences.
        stop_rules: rules by which sequences end.
        in_flight: the steps that are being computed, oldest first; `take` and `discard` remove the first.
        controller: learns which drafts were right.

    Attributes:
        spec_stats: drafts verified and accepted, without those of `forced_stats`.
        forced_stats: drafts verified and accepted that are text which grammars force.
        num_nan_rows: rows of logits that were no numbers, since the start.
    """

    def __init__(
        self, lifecycle: Lifecycle, stop_rules: StopRules, in_flight: deque[Step], controller: DraftController
    ) -> None:
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._stop_rules = stop_rules
        self._in_flight = in_flight
        self._controller = controller
        self.spec_stats = SpecStats()
        self.forced_stats = SpecStats(logs=False)
        # Sequences whose drafts are text that grammars force, in the step that is applied.
        self._forced: set[int] = set()
        self.num_nan_rows = 0

    def take(
        self, seqs: Iterable[Sequence], batch: ScheduledBatch, fwd_output: ScheduledBatchOutput, now: float
    ) -> list[Sequence]:
        """Applies the output of the oldest step in flight. Returns the sequences that have ended."""
        outputs = self._lifecycle.outputs
        first = len(outputs)
        vectors = self._pool(batch, fwd_output) if fwd_output.pooled else {}
        self._forced = self._in_flight.popleft().forced
        finished: list[Sequence] = []
        if batch.is_decode:
            self._take_decodes(seqs, batch, fwd_output, finished, now)
        else:
            given = self._given_logprobs(batch, fwd_output.target_logprobs or {})
            for seq, num_scheduled, final in zip(seqs, batch.num_scheduled_tokens, batch.is_final, strict=True):
                if seq.id in given:
                    self._take_given(seq, *given[seq.id])
                self._take_row(seq, num_scheduled, final, batch, fwd_output, finished, now)
        self._take_drafts(batch, fwd_output.draft_token_ids or {})
        if fwd_output.kv_digests:
            self._blocks.digests.add(fwd_output.kv_digests)
        if fwd_output.logit_digests:
            for output in outputs[first:]:
                output.logit_digests = _of_tokens(output, fwd_output.logit_digests.get(output.request_id))
        if vectors:
            for output in outputs[first:]:
                output.pooled = vectors.get(output.request_id, b"") if output.output_tokens else b""
        return finished

    def discard(self, seqs: Iterable[Sequence], batch: ScheduledBatch) -> None:
        """Gives up a batch that was interrupted, in place of `take`: its tokens are still to be computed."""
        self._in_flight.popleft()
        for seq, num_scheduled, final in zip(seqs, batch.num_scheduled_tokens, batch.is_final, strict=True):
            seq.num_inflight_tokens -= num_scheduled
            seq.num_inflight_drafts -= len(batch.scheduled_spec_decode_tokens.get(seq.id, ()))
            seq.num_placeholder -= final
            _forget_copy(seq)
            if seq.status is SequenceStatus.RUNNING and seq.next_position < seq.num_tokens - 1:
                self._lifecycle.resume_prefill(seq)
        self._take_drafts(batch, {})

    @staticmethod
    def _pool(batch: ScheduledBatch, fwd_output: ScheduledBatchOutput) -> dict[int, bytes]:
        """The vectors that are complete with this step, by sequence. Replaces the sampled tokens of their sequences."""
        states, vectors = fwd_output.pooled or {}, dict[int, bytes]()
        for i in batch.pooled:
            seq = batch.columns.rows[i]
            assert seq.pooled is not None
            seq.pooled.take(batch.num_computed_tokens[i], batch.context_lens[i], states[seq.id])
            if batch.is_final[i]:
                vectors[seq.id] = seq.pooled.finish()
                fwd_output.token_ids[seq.id] = (_POOLED_TOKEN if vectors[seq.id] else NO_TOKEN,)
        return vectors

    def _take_drafts(self, batch: ScheduledBatch, drafts: dict[int, list[int]]) -> None:
        """Keeps the drafts that the runner made for the next step. Their sequences no longer wait for this output."""
        seqs = batch.columns.by_id
        for seq_id in batch.scheduled_spec_decode_tokens:
            seqs[seq_id].awaits_output = False
        for seq_id in batch.drafts_wanted:
            seq = seqs[seq_id]
            seq.awaits_output = False
            if seq.status is not SequenceStatus.RUNNING:
                continue
            if not seq.num_placeholder:
                seq.spec_token_ids = drafts.get(seq_id, [])
            elif not seq.num_inflight_drafts and (own := drafts.get(seq_id)):
                # The step launched meanwhile verifies none of them; otherwise it took them on the device.
                self._controller.decided({seq_id: own}, seqs, ())

    def _take_decodes(
        self,
        seqs: Iterable[Sequence],
        batch: ScheduledBatch,
        fwd_output: ScheduledBatchOutput,
        finished: list[Sequence],
        now: float,
    ) -> None:
        """Applies a step of decodes: the common case of `_take_row` is written out, since nearly all rows are so.

        A row is common if it has tokens, none of which may end its sequence, and nothing besides tokens.
        """
        outputs, token_ids, drafts = self._lifecycle.outputs, fwd_output.token_ids, batch.scheduled_spec_decode_tokens
        others = {*self._forced, *(fwd_output.logprobs or ()), *(fwd_output.constraint_ends or ())}
        running, outcomes, num_others = SequenceStatus.RUNNING, list[tuple[int, int]](), 0
        for seq in seqs:
            own, sampled = seq.token_ids, token_ids.get(seq_id := seq.id, ())
            # A prompt's last token that was discarded alone is scheduled as a decode, and its output is the first one.
            if (
                seq.status is not running
                or not sampled
                or (token_id := sampled[-1]) < 0
                or seq.first_token_time is None
                or (others and seq_id in others)
                or token_id in seq.stopping_ids
                or len(own) + len(sampled) >= seq.length_limit
                or (drafts and not seq.stopping_ids.isdisjoint(sampled))
            ):
                num_others += 1
                self._take_row(seq, 1 + len(drafts.get(seq_id, ())), True, batch, fwd_output, finished, now)
                continue
            if seq.draft_history is not None and seq.draft_history.shadow:
                self._compare(seq.draft_history, sampled)
            seq.num_inflight_tokens -= 1
            seq.num_placeholder -= 1
            # The first new token is at the first position whose KV is not computed.
            position = computed = seq.num_computed_tokens + 1
            new = [token_id]
            if drafts and seq_id in drafts:
                num_drafts, num_accepted = len(drafts[seq_id]), len(sampled) - 1
                seq.num_inflight_tokens -= num_drafts
                seq.num_inflight_drafts -= num_drafts
                outcomes.append((num_drafts, num_accepted))
                self._controller.verified(seq, num_drafts, num_accepted)
                own += sampled[:-1]
                computed += num_accepted
                new = [*sampled]
            own.append(token_id)
            seq.num_computed_tokens = computed
            if computed >= seq.publish_at:
                self._blocks.publish(seq)
                self._blocks.prove(seq)
            output = RequestOutput(seq_id, new, False, None, position)
            outputs.append(output)
            if seq.stream_callback is not None:
                seq.stream_callback(output)
        from_drafts = sum(accepted for _, accepted in outcomes)
        self._lifecycle.totals.generated_tokens += len(batch.req_ids) - num_others + from_drafts
        if outcomes:
            self.spec_stats.take(Counter(outcomes))

    def _take_row(
        self,
        seq: Sequence,
        num_scheduled: int,
        final: bool,
        batch: ScheduledBatch,
        fwd_output: ScheduledBatchOutput,
        finished: list[Sequence],
        now: float,
    ) -> None:
        """Applies a step's output to one sequence, of any kind."""
        if seq.is_finished:
            return
        token_ids = fwd_output.token_ids.get(seq.id, ())
        verified = batch.scheduled_spec_decode_tokens.get(seq.id)
        constraint_end = (fwd_output.constraint_ends or {}).get(seq.id)
        seq.num_inflight_tokens -= num_scheduled
        seq.num_inflight_drafts -= len(verified or ())
        seq.num_placeholder -= final
        had_none = seq.first_token_time is None
        taken, stop = self._append(seq, token_ids, now, constraint_end)
        # A preempted sequence keeps its late token, but its KV is gone. KV of a step whose output is not a number is
        # not published: other sequences must not read it.
        if seq.status is SequenceStatus.RUNNING and stop is not _NOT_A_NUMBER:
            computed = seq.num_computed_tokens + num_scheduled - self._count_rejected(seq, verified, token_ids)
            seq.num_computed_tokens = min(computed, seq.num_tokens)
            self._blocks.publish(seq)
            if taken:
                self._blocks.prove(seq)
                if had_none:
                    self._blocks.publish_tail(seq)
        if stop is _NOT_A_NUMBER:
            # Chunks of earlier steps are published already, and no token has shown that their KV is finite.
            self._blocks.forget_unproved(seq)
        is_first = had_none and bool(taken)
        logprobs = (fwd_output.logprobs or {}).get(seq.id, b"")
        if logprobs:
            logprobs = logprobs[: len(taken) * (len(logprobs) // len(token_ids))]
        if stop is not None:
            self._lifecycle.end(seq, stop, now)
            finished.append(seq)
            message = _NOT_A_NUMBER_MESSAGE if stop is _NOT_A_NUMBER else constraint_end or ""
            self._lifecycle.emit_end(seq, taken, stop, is_first=is_first, message=message, logprobs=logprobs)
        elif taken:
            self._lifecycle.emit(seq, taken, is_first=is_first, logprobs=logprobs)
        if stop is None:
            self._lifecycle.note_phase(seq)

    @staticmethod
    def _given_logprobs(batch: ScheduledBatch, rows: dict[int, bytes]) -> dict[int, tuple[int, int, bytes]]:
        """Logprob rows of given tokens that the step computed, behind their first and last position, by sequence."""
        given = {}
        for i, targets in batch.targets.items():
            # The row that samples has no given token behind it.
            last = batch.context_lens[i] - batch.is_final[i]
            given[batch.req_ids[i]] = (last + 1 - len(targets), last, rows[batch.req_ids[i]])
        return given

    def _take_given(self, seq: Sequence, first: int, last: int, rows: bytes) -> None:
        """Emits logprobs of given tokens. After a preemption the sequence continues behind position `last`."""
        if seq.is_finished:
            return
        seq.logprobs_from = last + 1 if last + 1 < seq.num_given_tokens else math.inf
        self._lifecycle.emit_given(seq, GivenLogprobs(first, len(rows) // (last + 1 - first), rows))

    def _append(
        self, seq: Sequence, token_ids: tuple[int, ...], now: float, constraint_end: str | None
    ) -> tuple[list[int], Stop | None]:
        """Appends tokens one by one up to a stop. Returns the tokens appended, and the stop."""
        if token_ids and token_ids[0] != NO_TOKEN and seq.first_token_time is None:
            seq.first_token_time = now
        if token_ids and seq.status is SequenceStatus.RUNNING:
            seq.ledger.produce(self._lifecycle.account, now)
        taken: list[int] = []
        stop, history = None, seq.draft_history
        for token_id in token_ids:
            if seq.num_tokens >= seq.length_limit:
                # The sequence arrived full: this step only shows whether its tokens complete its constraint.
                stop = _COMPLETE if token_id == NO_TOKEN and constraint_end == "" else self._stop_rules.check(seq)
                break
            if token_id == NO_TOKEN:
                stop = self._without_token(constraint_end)
                break
            seq.append_token(token_id)
            taken.append(token_id)
            if history is not None and history.shadow:
                self._compare(history, (token_id,))
            if seq.may_end(token_id):
                stop = self._stop_rules.check(seq)
                if stop is not None:
                    break
        if constraint_end is not None and len(taken) == len(token_ids):
            # A complete constraint has its whole answer, also at the length limit.
            stop = _COMPLETE if stop is None or stop.end_reason is EndReason.LENGTH else stop
        if seq.status is SequenceStatus.WAITING:
            self._lifecycle.waiting.grew(len(taken))
        return taken, stop

    def _compare(self, history: DraftHistory, token_ids: tuple[int, ...]) -> None:
        """Compares new tokens with drafts that were not verified, to learn how often those are right."""
        for token_id in token_ids:
            if history.shadow:
                self._controller.came(history, token_id)

    def _without_token(self, constraint_end: str | None) -> Stop:
        """Why a sequence stops whose row has no token."""
        if constraint_end is not None:
            return _CONSTRAINT_FAILED if constraint_end else _COMPLETE
        self.num_nan_rows += 1
        return _NOT_A_NUMBER

    def _count_rejected(self, seq: Sequence, drafts: list[int] | None, token_ids: tuple[int, ...]) -> int:
        """Number of a sequence's verified drafts that were rejected; adds them to the statistics."""
        if not drafts:
            return 0
        accepted = len(token_ids) - 1
        if seq.id in self._forced:
            self.forced_stats.take({(len(drafts), accepted): 1})
        else:
            self.spec_stats.take({(len(drafts), accepted): 1})
            self._controller.verified(seq, len(drafts), accepted)
        return len(drafts) - accepted


def _of_tokens(output: RequestOutput, digests: dict[int, int] | None) -> dict[int, int] | None:
    """Logit digests of an output's own tokens: the step may have accepted drafts behind the last one."""
    if digests is None:
        return None
    end = output.first_pos + len(output.output_tokens)
    return {position: digest for position, digest in digests.items() if position < end}


def _forget_copy(seq: Sequence) -> None:
    """Makes a sequence recompute the partial block that the discarded step was to copy."""
    if seq.num_computed_tokens == seq.num_cached_tokens:
        seq.num_computed_tokens = seq.num_cached_tokens = seq.num_cached_blocks * seq.block_size
