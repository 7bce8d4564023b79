"""Takes what steps have brought: moves sequences on, publishes full blocks, applies the stop rules.

Invariants:
- batches are taken in the order in which they were scheduled, each once, or discarded;
- tokens behind the one that stops a sequence count nowhere;
- a block is published only after the step that wrote its KV, and none of a step whose output was not a number.
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
from worker.engine.speculation.draft_lengths import DraftLengths
from worker.engine.speculation.spec_stats import SpecStats
from worker.engine.step import Step
from worker.engine.stop_rules import Stop, StopRules

_NOT_A_NUMBER: Final = Stop("not_a_number", EndReason.NOT_A_NUMBER)
_COMPLETE: Final = Stop("constraint", EndReason.CONSTRAINT)
_CONSTRAINT_FAILED: Final = Stop("constraint_failed", EndReason.CONSTRAINT_FAILED)
_NOT_A_NUMBER_MESSAGE: Final = "the model's output is not a number"
# The token with which a sequence that is embedded ends.
_POOLED_TOKEN: Final = 0


class Postprocessor:
    """Moves sequences on when a step's output is there.

    Args:
        lifecycle: the sequences.
        stop_rules: end them.
        in_flight: the steps that are being computed, oldest first; the first one leaves with its output.
        lengths: learns which drafts were right.

    Attributes:
        spec_stats: drafts verified and accepted.
        forced_stats: likewise of those that are text which grammars force, and are not counted there.
        num_nan_rows: rows of logits that were no numbers, since the start.
    """

    def __init__(
        self, lifecycle: Lifecycle, stop_rules: StopRules, in_flight: deque[Step], lengths: DraftLengths
    ) -> None:
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._stop_rules = stop_rules
        self._in_flight = in_flight
        self._lengths = lengths
        self.spec_stats = SpecStats()
        self.forced_stats = SpecStats(logs=False)
        # Sequences whose drafts are text that grammars force, in the step that is taken.
        self._forced: set[int] = set()
        self.num_nan_rows = 0

    def take(
        self, seqs: Iterable[Sequence], batch: ScheduledBatch, fwd_output: ScheduledBatchOutput, now: float
    ) -> list[Sequence]:
        """Takes the output of the oldest step in flight. Returns the sequences that have ended."""
        outputs = self._lifecycle.outputs
        first = len(outputs)
        vectors = self._pool(batch, fwd_output) if fwd_output.pooled else {}
        finished = self._take(seqs, batch, fwd_output, now)
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

    @staticmethod
    def _pool(batch: ScheduledBatch, fwd_output: ScheduledBatchOutput) -> dict[int, bytes]:
        """The vectors that are whole now, by sequence; what was sampled of these is replaced."""
        states, vectors = fwd_output.pooled or {}, dict[int, bytes]()
        for i in batch.pooled:
            seq = batch.columns.rows[i]
            assert seq.pooled is not None
            seq.pooled.take(batch.num_computed_tokens[i], batch.context_lens[i], states[seq.id])
            if batch.is_final[i]:
                vectors[seq.id] = seq.pooled.finish()
                fwd_output.token_ids[seq.id] = (_POOLED_TOKEN if vectors[seq.id] else NO_TOKEN,)
        return vectors

    def _take(
        self, seqs: Iterable[Sequence], batch: ScheduledBatch, fwd_output: ScheduledBatchOutput, now: float
    ) -> list[Sequence]:
        finished: list[Sequence] = []
        self._forced = self._in_flight.popleft().forced
        if batch.is_decode:
            land = self._land_decodes if batch.is_plain_decode else self._land_verified
            land(seqs, batch, fwd_output, finished, now)
            return finished
        given = self._given_logprobs(batch, fwd_output.target_logprobs or {})
        for seq, num_scheduled, final in zip(seqs, batch.num_scheduled_tokens, batch.is_final, strict=True):
            if seq.id in given:
                self._land_given(seq, *given[seq.id])
            self._land(seq, num_scheduled, final, batch, fwd_output, finished, now)
        return finished

    def _take_drafts(self, batch: ScheduledBatch, drafts: dict[int, list[int]]) -> None:
        """Notes what the runner has drafted; the sequences need not wait for it any more."""
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
                # The step that was launched meanwhile has left them; else it has taken them on the device.
                self._lengths.decided({seq_id: own}, seqs, ())

    def discard(self, seqs: Iterable[Sequence], batch: ScheduledBatch) -> None:
        """Instead of `take`, for a batch that was interrupted: what it should have computed is still to do."""
        self._in_flight.popleft()
        for seq, num_scheduled, final in zip(seqs, batch.num_scheduled_tokens, batch.is_final, strict=True):
            seq.num_inflight_tokens -= num_scheduled
            seq.num_inflight_drafts -= len(batch.scheduled_spec_decode_tokens.get(seq.id, ()))
            seq.num_placeholder -= final
            _forget_copy(seq)
            if seq.status is SequenceStatus.RUNNING and seq.next_position < seq.num_tokens - 1:
                self._lifecycle.resume_prefill(seq)
        self._take_drafts(batch, {})

    def _land_decodes(
        self,
        seqs: Iterable[Sequence],
        batch: ScheduledBatch,
        fwd_output: ScheduledBatchOutput,
        finished: list[Sequence],
        now: float,
    ) -> None:
        """`_land` for a step of single decoded tokens, whose plain cases are written out: they are nearly all."""
        outputs, token_ids, running = self._lifecycle.outputs, fwd_output.token_ids, SequenceStatus.RUNNING
        others, num_others = _with_more(fwd_output), 0
        for seq in seqs:
            seq_id = seq.id
            sampled = token_ids.get(seq_id, ())
            # A prompt's last token that was discarded alone comes as a decode, and brings the first token.
            if (
                seq.status is not running
                or len(sampled) != 1
                or (token_id := sampled[0]) < 0
                or seq.first_token_time is None
                or (others and seq_id in others)
            ):
                num_others += 1
                self._land(seq, 1, True, batch, fwd_output, finished, now)
                continue
            seq.num_inflight_tokens -= 1
            seq.num_placeholder -= 1
            seq.token_ids.append(token_id)
            seq.num_computed_tokens = position = seq.num_computed_tokens + 1
            if position >= seq.publish_at:
                self._blocks.publish(seq)
                self._blocks.prove(seq)
            if seq.draft_history is not None and seq.draft_history.shadow:
                self._lengths.came(seq.draft_history, token_id)
            if seq.may_end(token_id):
                stop = self._stop_rules.check(seq)
                if stop is not None:
                    num_others += 1
                    self._lifecycle.end(seq, stop, now)
                    finished.append(seq)
                    self._lifecycle.emit_end(seq, [token_id], stop)
                    continue
            # It stands at the first position whose KV is not computed.
            output = RequestOutput(seq_id, [token_id], False, None, position)
            outputs.append(output)
            if seq.stream_callback is not None:
                seq.stream_callback(output)
        self._lifecycle.totals.generated_tokens += len(batch.req_ids) - num_others

    def _land_verified(
        self,
        seqs: Iterable[Sequence],
        batch: ScheduledBatch,
        fwd_output: ScheduledBatchOutput,
        finished: list[Sequence],
        now: float,
    ) -> None:
        """`_land` for a step of decodes of which some have drafts, likewise."""
        outputs, token_ids, running = self._lifecycle.outputs, fwd_output.token_ids, SequenceStatus.RUNNING
        others, verified = self._forced | _with_more(fwd_output), self._lengths.verified
        num_tokens, outcomes = 0, list[tuple[int, int]]()
        for seq, num_scheduled in zip(seqs, batch.num_scheduled_tokens, strict=True):
            seq_id = seq.id
            sampled = token_ids.get(seq_id, ())
            if (
                seq.status is not running
                or not sampled
                or sampled[-1] < 0
                or seq.first_token_time is None
                or (others and seq_id in others)
                or seq.may_end_within(sampled)
                or (seq.draft_history is not None and seq.draft_history.shadow)
            ):
                self._land(seq, num_scheduled, True, batch, fwd_output, finished, now)
                continue
            seq.num_inflight_tokens -= num_scheduled
            seq.num_inflight_drafts -= num_scheduled - 1
            seq.num_placeholder -= 1
            taken = [*sampled]
            seq.token_ids += taken
            position, num_new = seq.num_computed_tokens + 1, len(taken)
            seq.num_computed_tokens += num_new
            if seq.num_computed_tokens >= seq.publish_at:
                self._blocks.publish(seq)
                self._blocks.prove(seq)
            if num_scheduled > 1:
                outcomes.append((num_scheduled - 1, num_new - 1))
                verified(seq, num_scheduled - 1, num_new - 1)
            num_tokens += num_new
            # The first one stands at the first position whose KV is not computed.
            output = RequestOutput(seq_id, taken, False, None, position)
            outputs.append(output)
            if seq.stream_callback is not None:
                seq.stream_callback(output)
        self.spec_stats.take(Counter(outcomes))
        self._lifecycle.totals.generated_tokens += num_tokens

    def _land(
        self,
        seq: Sequence,
        num_scheduled: int,
        final: bool,
        batch: ScheduledBatch,
        fwd_output: ScheduledBatchOutput,
        finished: list[Sequence],
        now: float,
    ) -> None:
        """Takes what a step has computed of one sequence, with the drafts that it has verified."""
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
        # A preempted sequence gets its late token, but what was computed with it is gone. Nor is what a step has
        # computed for anybody else if its output is not a number.
        if seq.status is SequenceStatus.RUNNING and stop is not _NOT_A_NUMBER:
            computed = seq.num_computed_tokens + num_scheduled - self._count_rejected(seq, verified, token_ids)
            seq.num_computed_tokens = min(computed, seq.num_tokens)
            self._blocks.publish(seq)
            if taken:
                self._blocks.prove(seq)
                if had_none:
                    self._blocks.publish_tail(seq)
        if stop is _NOT_A_NUMBER:
            # Chunks before this step have been published, and none of them has given a number.
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

    @staticmethod
    def _given_logprobs(batch: ScheduledBatch, rows: dict[int, bytes]) -> dict[int, tuple[int, int, bytes]]:
        """By sequence, the first and the last position whose given token's logprob has come, and the rows."""
        given = {}
        for i, targets in batch.targets.items():
            # The target of the row that samples is not given yet.
            last = batch.context_lens[i] - batch.is_final[i]
            given[batch.req_ids[i]] = (last + 1 - len(targets), last, rows[batch.req_ids[i]])
        return given

    def _land_given(self, seq: Sequence, first: int, last: int, rows: bytes) -> None:
        """Puts out logprobs of given tokens; after a preemption the next ones are those behind these."""
        if seq.is_finished:
            return
        seq.logprobs_from = last + 1 if last + 1 < seq.num_given_tokens else math.inf
        self._lifecycle.emit_given(seq, GivenLogprobs(first, len(rows) // (last + 1 - first), rows))

    def _append(
        self, seq: Sequence, token_ids: tuple[int, ...], now: float, constraint_end: str | None
    ) -> tuple[list[int], Stop | None]:
        """Appends tokens one by one up to a stop; those behind it count nowhere. Those appended, and the stop."""
        if token_ids and token_ids[0] != NO_TOKEN and seq.first_token_time is None:
            seq.first_token_time = now
        taken: list[int] = []
        stop, history = None, seq.draft_history
        for token_id in token_ids:
            if seq.num_tokens >= seq.length_limit:
                # The sequence arrived full: this step only finds out whether its tokens complete its constraint.
                stop = _COMPLETE if token_id == NO_TOKEN and constraint_end == "" else self._stop_rules.check(seq)
                break
            if token_id == NO_TOKEN:
                stop = self._without_token(constraint_end)
                break
            seq.append_token(token_id)
            taken.append(token_id)
            if history is not None and history.shadow:
                self._lengths.came(history, token_id)
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

    def _without_token(self, constraint_end: str | None) -> Stop:
        """Why a sequence stops that has got no token."""
        if constraint_end is not None:
            return _CONSTRAINT_FAILED if constraint_end else _COMPLETE
        self.num_nan_rows += 1
        return _NOT_A_NUMBER

    def _count_rejected(self, seq: Sequence, drafts: list[int] | None, token_ids: tuple[int, ...]) -> int:
        """Number of the drafts verified by a sequence's step that were not accepted."""
        if not drafts:
            return 0
        accepted = len(token_ids) - 1
        if seq.id in self._forced:
            self.forced_stats.take({(len(drafts), accepted): 1})
        else:
            self.spec_stats.take({(len(drafts), accepted): 1})
            self._lengths.verified(seq, len(drafts), accepted)
        return len(drafts) - accepted


def _with_more(fwd_output: ScheduledBatchOutput) -> set[int]:
    """Sequences of which more than tokens has come."""
    return {*(fwd_output.logprobs or ()), *(fwd_output.constraint_ends or ())}


def _of_tokens(output: RequestOutput, digests: dict[int, int] | None) -> dict[int, int] | None:
    """Digests of what the tokens of an output were drawn from: a step may have accepted drafts behind the last one."""
    if digests is None:
        return None
    end = output.first_pos + len(output.output_tokens)
    return {position: digest for position, digest in digests.items() if position < end}


def _forget_copy(seq: Sequence) -> None:
    """Lets a sequence of which no step has come back compute what the discarded one should have copied."""
    if seq.num_computed_tokens == seq.num_cached_tokens:
        seq.num_computed_tokens = seq.num_cached_tokens = seq.num_cached_blocks * seq.block_size
