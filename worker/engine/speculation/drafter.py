"""Fills what is left of a step's budget with drafts: tokens behind the newest one that the step verifies.

Invariants:
- drafts take what decodes and prompts leave of the budget, and of the blocks: nobody waits for them, or is preempted;
- behind a sequence there are drafts of this side when all of its tokens are known; and no more drafts than it can
  still put out;
- with deferred output a runner that drafts knows the newest tokens and drafts first. So the next step may take both
  from it, for sequences whose logits follow from no more than these (`_needs_no_output`): as many drafts as the step in
  flight makes, at the positions where they stand if all that it verifies are right;
- which drafts there are changes how many tokens a step brings, never which.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Final, Protocol

from common.params.config_parts import NGRAM, SpeculativeConfig
from kernels.no_token import NO_TOKEN
from worker.engine.batch import ScheduledBatch
from worker.engine.lifecycle import Lifecycle
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_lengths import DraftLengths
from worker.engine.speculation.finished_answers import FinishedAnswers
from worker.engine.speculation.forced_text import ForcedText
from worker.engine.speculation.model_drafts import ModelDrafts
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.engine.speculation.proposal_costs import Proposal
from worker.engine.step import Step, StepLimits

# Tokens that a step without a sequence must save it: its own, and the one in flight.
_WORTH_WAITING: Final = 2.0


class Proposer(Protocol):
    """Proposes what may come behind a sequence, from its tokens alone."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """At most `most` token ids of the model's vocabulary, which may be wrong; none where there is no guess."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Frees the proposer's data of an ended sequence; does nothing unless a proposer overrides it."""
        return


def make_answers(spec: SpeculativeConfig | None) -> FinishedAnswers | None:
    """The finished answers that a proposer looks through; None where it does not."""
    most = 0 if spec is None else spec.prompt_lookup_finished
    return None if spec is None or most == 0 else FinishedAnswers(most, spec.prompt_lookup_max)


def make_proposer(spec: SpeculativeConfig | None, answers: FinishedAnswers | None) -> Proposer | None:
    """The proposer of a config; None where there is no speculation, or the runner proposes."""
    if spec is None or spec.method != NGRAM:
        return None
    return NgramProposer(spec.prompt_lookup_min, spec.prompt_lookup_max, answers)


class Drafter:
    """Decides which drafts a step verifies, and for which sequences the runner proposes the next ones.

    Args:
        limits: of a step.
        lifecycle: the sequences.
        proposer: proposes on this side, in front of what the runner proposes; None for nobody.
        lengths: how many drafts pay.
        in_runner: True if the runner proposes.
        is_deferred: True if steps are scheduled before the tokens of the one before are there.

    Attributes:
        proposer: as above.
        lengths: as above.
    """

    def __init__(
        self,
        limits: StepLimits,
        lifecycle: Lifecycle,
        proposer: Proposer | None,
        lengths: DraftLengths,
        *,
        in_runner: bool,
        is_deferred: bool = False,
    ) -> None:
        self._limits = limits
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._model = ModelDrafts(lengths) if in_runner else None
        self._is_deferred = is_deferred
        # Drafts that the newest step makes, by sequence.
        self._coming: Mapping[int, int] = {}
        self._rest = 0
        self._forced = ForcedText()
        # Steps left without forced text, after a step in which none of it was worth its time.
        self._forced_rest = 0
        self.proposer = proposer
        self.lengths = lengths

    def forget(self, seq: Sequence) -> None:
        """Frees the forced text and the proposer's data of an ended sequence."""
        self._forced.forget(seq)
        if self.proposer is not None:
            self.proposer.forget(seq)

    def fill(self, step: Step) -> None:
        """Adds drafts to the decodes of a step, in their order."""
        if not self._limits.mtp_k and not self._forced:
            return
        decodes = step.decodes()
        drafts = guessed = self._guessed(decodes)
        if forced := self._forced_runs(decodes, guessed):
            both = {**guessed, **forced}
            drafts = {seq.id: both[seq.id] for seq in decodes if seq.id in both}
        if not drafts:
            return
        rates = {seq_id: self._forced.rates(step.seqs[seq_id]) for seq_id in forced}
        chosen = self.lengths.choose(drafts, step.seqs, self._limits.max_num_batched_tokens - step.budget, rates)
        fitting = self._fit(chosen, step)
        own = guessed
        if forced or self._is_deferred:
            known = ((seq_id, found) for seq_id, found in guessed.items() if found[0] != NO_TOKEN)
            own = {seq_id: found for seq_id, found in known if seq_id not in forced}
        self.lengths.decided(own, step.seqs, fitting)
        if fitting:
            step.verify(fitting)
            step.forced = forced.keys() & fitting.keys()
        if forced and not step.forced:
            self._forced_rest = self.lengths.rest(len(decodes))
        if guessed:
            self._rest = 0 if chosen else self.lengths.rest(len(decodes))

    def _fit(self, drafts: Mapping[int, list[int]], step: Step) -> dict[int, list[int]]:
        """As many of these drafts as there is budget and room for; their sequences get slots for them."""
        budget, seqs, fitting = step.budget, step.seqs, dict[int, list[int]]()
        for seq_id, own in drafts.items():
            seq, count = seqs[seq_id], len(own)
            if count > budget or seq.num_computed_tokens + seq.num_inflight_tokens + 1 + count > seq.num_slots:
                count = min(count, budget, self._room(seq))
                if count <= 0:
                    continue
                self._reserve(seq, 1 + count)
            fitting[seq_id] = own if count == len(own) else own[:count]
            budget -= count
        return fitting

    def note_forced(self, batch: ScheduledBatch, runs: Mapping[int, tuple[int, list[int]]]) -> None:
        """Takes what a step has brought of texts that grammars force (`ScheduledBatchOutput.forced_token_ids`), and
        compares what was known with the tokens that have come."""
        if not runs and not self._forced:
            return
        for seq in batch.columns.rows:
            self._forced.come(seq)
            # A sequence that was aborted during the step is forgotten already.
            if seq.id in runs and not seq.is_finished:
                first, token_ids = runs[seq.id]
                self._forced.note(seq, first, tuple(token_ids))

    def ask(self, batch: ScheduledBatch) -> None:
        """Notes in a batch how many drafts of each sequence the runner is to propose, whose KV has slots; and the
        tokens behind chunks, which a draft model takes in; nothing if it does not work in this step."""
        if self._model is None:
            return
        if self._is_deferred:
            batch.drafts_in_flight = {seq.id: count for seq in batch.columns.rows if (count := seq.num_inflight_drafts)}
        wanted: dict[int, int] = {}
        has_prompts = batch.total_seqs_num_prefill > 0
        if not self._model.rests(has_prompts=has_prompts):
            wanted = self._model.plan(self._most_made(batch), self._lifecycle.live, batch.total_seqs_num)
        batch.feeds_draft_model = bool(wanted) or (has_prompts and self._model.takes_prompts)
        self._note_missed(batch)
        if not batch.feeds_draft_model:
            return
        for i, seq in enumerate(batch.columns.rows):
            if not batch.is_final[i] and batch.context_lens[i] < len(seq.token_ids):
                batch.next_token_ids[seq.id] = seq.token_ids[batch.context_lens[i]]
            if most := wanted.get(seq.id, 0):
                needed = batch.num_scheduled_tokens[i] + most - 1
                self._reserve(seq, min(needed, seq.length_limit - 1 - seq.next_position))
        batch.want_drafts(wanted)

    def launched(self, batch: ScheduledBatch) -> None:
        """Notes a launched step, before its output counts as in flight.

        Also notes which of its sequences have to wait for that output.
        """
        drafts, self._coming = batch.scheduled_spec_decode_tokens, batch.drafts_wanted
        seqs = batch.columns.by_id
        for seq_id, own in drafts.items():
            seqs[seq_id].num_inflight_drafts += len(own)
        may_go_on = self._model is not None and self._is_deferred
        for seq_id in chain(drafts, self._coming):
            seq = seqs[seq_id]
            seq.awaits_output = not (may_go_on and self._needs_no_output(seq))

    def took(self, batch: ScheduledBatch, duration_s: float, wall_s: float | None) -> None:
        """Learns what a step took.

        Args:
            batch: that it has computed.
            duration_s: that this took.
            wall_s: since the end of the step before it; None if there was none just before.
        """
        proposal = None
        if batch.feeds_draft_model:
            made = batch.drafts_wanted
            proposal = Proposal(batch.total_tokens_num, len(made), max(made.values(), default=0))
        if batch.total_seqs_num_prefill:
            self.lengths.took_prompts(proposal, batch.total_seqs_num_decode, batch.total_tokens_num_decode)
        else:
            self.lengths.took(batch.total_seqs_num, batch.total_tokens_num, duration_s, wall_s, proposal)
        if self._is_deferred:
            # Those that there are for the next step are made by the one behind this.
            self.lengths.are_made = bool(self._coming)

    def _most_made(self, batch: ScheduledBatch) -> dict[int, int]:
        """Most drafts that can be made behind each sequence of a step."""
        found = {}
        for i, seq in enumerate(batch.columns.rows):
            if batch.is_final[i] and seq.pooling is None:
                # The step brings one token at least, and so does the next one.
                most = min(self._most(seq), seq.length_limit - seq.num_tokens - seq.num_placeholder - 2)
                if most > 0:
                    found[seq.id] = most
        return found

    @staticmethod
    def _note_missed(batch: ScheduledBatch) -> None:
        """Counts the tokens that the draft model does not take in, since a sequence's first row."""
        if batch.is_plain_decode:
            for seq in () if batch.feeds_draft_model else batch.columns.rows:
                seq.num_missed += 1
            return
        for i, seq in enumerate(batch.columns.rows):
            if batch.num_computed_tokens[i] == seq.num_cached_tokens:
                seq.num_missed = 0
            if not batch.feeds_draft_model:
                seq.num_missed += batch.num_scheduled_tokens[i]

    def expects(self, seq: Sequence) -> bool:
        """True if a sequence whose newest token is in flight will have drafts behind it, as far as can be told."""
        if self._forced and self._forced_rest == 0 and self._waits_for_forced(seq):
            return True
        most = self._most(seq)
        if self.proposer is None or most == 0 or self._rest > 0 or not (found := self.proposer.propose(seq, most)):
            return False
        if not (pays := self.lengths.pays(seq, max(1, self._lifecycle.num_decoding))):
            self.lengths.decided({seq.id: found}, {seq.id: seq}, ())
        return pays

    def _most(self, seq: Sequence) -> int:
        """Most drafts of a sequence in a step."""
        own = seq.sampling_params.num_drafts
        return self._limits.mtp_k if own is None else min(own, self._limits.mtp_k)

    def _room(self, seq: Sequence) -> int:
        """Drafts that a sequence has blocks for, or would get."""
        return seq.num_slots + self._blocks.num_free_blocks * self._blocks.block_size - seq.next_position - 1

    @staticmethod
    def _needs_no_output(seq: Sequence) -> bool:
        """True if a sequence with a runner's drafts in flight can go on before it is known how many are right: what
        changes its logits otherwise, or names them, is made from tokens and positions on the host."""
        return not seq.logits_every and len(seq.token_ids) + seq.num_placeholder >= seq.steered_until

    def _waits_for_forced(self, seq: Sequence) -> bool:
        """True if tokens behind the one in flight bring more than the step that passes until it is there."""
        return sum(self._forced.rates(seq).gains(len(self._forced.of(seq)))) > _WORTH_WAITING

    def _guessed(self, decodes: list[Sequence]) -> dict[int, list[int]]:
        """Drafts that are proposed for the sequences that a step decodes, unless it does not pay now."""
        if not self._limits.mtp_k:
            return {}
        if self._rest > 0 and self._model is None:
            self._rest -= 1
            return {}
        has_any = self.proposer is not None or bool(self._coming) or any(seq.spec_token_ids for seq in decodes)
        guessed = self._proposed(decodes) if has_any else {}
        if self.proposer is not None and decodes and not guessed:
            self._rest = self.lengths.rest(len(decodes))
        return guessed

    def _forced_runs(self, decodes: list[Sequence], guessed: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Forced text per sequence, unless the proposer's draft is longer and starts with the same tokens."""
        found: dict[int, list[int]] = {}
        if not self._forced or self._forced_rest > 0:
            self._forced_rest = max(0, self._forced_rest - 1)
            return found
        for seq in decodes:
            run = [] if seq.num_placeholder else self._forced.of(seq)[: max(0, seq.length_limit - seq.num_tokens - 1)]
            own = guessed.get(seq.id, [])
            if run and (len(own) <= len(run) or own[: len(run)] != run):
                found[seq.id] = run
        return found

    def _proposed(self, decodes: list[Sequence]) -> dict[int, list[int]]:
        """Drafts that there are behind the newest tokens; those of the runner are for this step alone."""
        proposed: dict[int, list[int]] = {}
        most, propose = self._limits.mtp_k, None if self.proposer is None else self.proposer.propose
        for seq in decodes:
            own = seq.spec_token_ids
            if own:
                seq.spec_token_ids = []
            left, wanted = seq.length_limit - len(seq.token_ids) - 1, seq.sampling_params.num_drafts
            if seq.num_placeholder:
                left -= seq.num_placeholder + seq.num_inflight_drafts
                if (count := min(left, self._coming.get(seq.id, 0))) > 0:
                    proposed[seq.id] = [NO_TOKEN] * count
                continue
            count = most if left > most else left
            if wanted is not None:
                count = min(count, wanted)
            if count <= 0:
                continue
            if found := (propose is not None and propose(seq, count)) or own[:count]:
                proposed[seq.id] = found
        return proposed

    def _reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Gives a sequence slots for so many tokens from its next one on, as far as blocks are free."""
        if seq.next_position + num_tokens <= seq.num_slots:
            return
        free = self._blocks.num_free_blocks * self._blocks.block_size
        self._lifecycle.append_slots(seq, min(num_tokens, seq.num_slots + free - seq.next_position))
