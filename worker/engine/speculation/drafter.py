"""Adds drafts to a step: guesses of a sequence's next tokens, which the step verifies.

Invariants:
- drafts use the budget and the KV blocks that decodes and prompts leave: no request waits for them or is preempted;
- a proposer of the engine drafts for a sequence only when all its tokens are known;
- a sequence never has more drafts than it can still output;
- with deferred output and a draft model, the next step takes tokens and drafts from the step in flight on the device,
  for sequences that need no output for their logits (`_needs_no_output`). It has as many drafts as that step makes, at
  the positions that they have if all drafts of that step are accepted;
- drafts change how many tokens a step outputs, never which.
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
from worker.engine.speculation.draft_controller import DraftController
from worker.engine.speculation.finished_answers import FinishedAnswers
from worker.engine.speculation.forced_text import ForcedText
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.engine.speculation.step_costs import Proposal
from worker.engine.step import Step, StepLimits

# Expected tokens from forced text above which a sequence skips a step and waits: the skipped one and the one in flight.
_WORTH_WAITING: Final = 2.0
# Largest part of a sequence that a draft model may have missed: with more missing, its drafts are rarely right.
_MOST_MISSED: Final = 1 / 2


class Proposer(Protocol):
    """Guesses a sequence's next tokens from its tokens alone."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """At most `most` token ids of the model's vocabulary, right or wrong; empty without a guess."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Frees the proposer's data of an ended sequence; does nothing unless a proposer overrides it."""
        return


def make_answers(spec: SpeculativeConfig | None) -> FinishedAnswers | None:
    """The store of finished answers for prompt lookup; None if the config has none."""
    most = 0 if spec is None else spec.prompt_lookup_finished
    return None if spec is None or most == 0 else FinishedAnswers(most, spec.prompt_lookup_max)


def make_proposer(spec: SpeculativeConfig | None, answers: FinishedAnswers | None) -> Proposer | None:
    """The engine's proposer; None without speculation or with a draft model."""
    if spec is None or spec.method != NGRAM:
        return None
    return NgramProposer(spec.prompt_lookup_min, spec.prompt_lookup_max, answers)


class Drafter:
    """Decides which drafts a step verifies, and how many a draft model makes.

    Args:
        limits: limits of a step.
        lifecycle: the sequences.
        proposer: proposer of the engine, whose drafts replace a draft model's; None for none.
        controller: chooses the number of drafts.
        in_runner: True if the runner has a draft model.
        is_deferred: True if a step is scheduled before the output of the step before is known.

    Attributes:
        proposer: as above.
        controller: as above.
    """

    def __init__(
        self,
        limits: StepLimits,
        lifecycle: Lifecycle,
        proposer: Proposer | None,
        controller: DraftController,
        *,
        in_runner: bool,
        is_deferred: bool = False,
    ) -> None:
        self._limits = limits
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._in_runner = in_runner
        self._is_deferred = is_deferred
        # Number of drafts that the newest step makes, by sequence.
        self._coming: Mapping[int, int] = {}
        self._rest = 0
        self._forced = ForcedText()
        # Steps left without a look for forced text, after one that verified none.
        self._forced_rest = 0
        self.proposer = proposer
        self.controller = controller

    def forget(self, seq: Sequence) -> None:
        """Frees the forced text and the proposer's data of an ended sequence."""
        self._forced.forget(seq)
        if self.proposer is not None:
            self.proposer.forget(seq)

    def fill(self, step: Step) -> None:
        """Adds drafts to a step's decodes."""
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
        chosen = self.controller.choose(drafts, step.seqs, self._limits.max_num_batched_tokens - step.budget, rates)
        fitting = self._fit(chosen, step)
        own = guessed
        if forced or self._is_deferred:
            known = ((seq_id, found) for seq_id, found in guessed.items() if found[0] != NO_TOKEN)
            own = {seq_id: found for seq_id, found in known if seq_id not in forced}
        self.controller.decided(own, step.seqs, fitting)
        if fitting:
            step.verify(fitting)
            step.forced = forced.keys() & fitting.keys()
        if forced and not step.forced:
            self._forced_rest = self.controller.rest(len(decodes))
        if guessed:
            self._rest = 0 if chosen else self.controller.rest(len(decodes))

    def _fit(self, drafts: Mapping[int, list[int]], step: Step) -> dict[int, list[int]]:
        """Returns the drafts that fit the budget and the free blocks, and reserves their slots."""
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
        """Adds a step's forced text (`ScheduledBatchOutput.forced_token_ids`); compares the known one with new tokens.

        Args:
            batch: the step.
            runs: first position and token ids of forced text, by sequence.
        """
        if not runs and not self._forced:
            return
        for seq in batch.columns.rows:
            self._forced.come(seq)
            # A sequence that was aborted during the step is forgotten already.
            if seq.id in runs and not seq.is_finished:
                first, token_ids = runs[seq.id]
                self._forced.note(seq, first, tuple(token_ids))

    def ask(self, batch: ScheduledBatch) -> None:
        """Sets how many drafts a draft model makes for each sequence of a batch, and reserves slots for them.

        For each chunk of a prompt it also sets the token after it, which the draft model computes.
        """
        if not self._in_runner:
            return
        if self._is_deferred:
            batch.drafts_in_flight = {seq.id: count for seq in batch.columns.rows if (count := seq.num_inflight_drafts)}
        has_prompts = batch.total_seqs_num_prefill > 0
        wanted: dict[int, int] = {}
        if self.controller.looks(has_prompts=has_prompts):
            wanted = self.controller.plan(self._most_made(batch), self._lifecycle.live, batch.total_seqs_num)
        batch.feeds_draft_model = bool(wanted) or (has_prompts and self.controller.takes_prompts(batch.total_seqs_num))
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
        may_go_on = self._in_runner and self._is_deferred
        for seq_id in chain(drafts, self._coming):
            seq = seqs[seq_id]
            seq.awaits_output = not (may_go_on and self._needs_no_output(seq))

    def took(self, batch: ScheduledBatch, duration_s: float, wall_s: float | None) -> None:
        """Adds a step's duration.

        Args:
            batch: the step.
            duration_s: seconds that it took.
            wall_s: seconds since the end of the step before; None if there was none right before.
        """
        proposal = None
        if batch.feeds_draft_model:
            made = batch.drafts_wanted
            proposal = Proposal(batch.total_tokens_num, len(made), max(made.values(), default=0))
        if batch.total_seqs_num_prefill:
            num_decodes, decode_rows = batch.total_seqs_num_decode, batch.total_tokens_num_decode
            self.controller.note_prompts(duration_s, proposal, num_decodes, decode_rows)
        else:
            self.controller.note_step(batch.total_seqs_num, batch.total_tokens_num, duration_s, wall_s, proposal)
        if self._is_deferred:
            # With deferred output, the drafts for the next step are made by the step still in flight.
            self.controller.are_made = bool(self._coming)

    def _most_made(self, batch: ScheduledBatch) -> dict[int, int]:
        """Most drafts that a draft model can make for each sequence of a step."""
        found = {}
        for i, seq in enumerate(batch.columns.rows):
            if batch.is_final[i] and seq.pooling is None and seq.num_missed <= _MOST_MISSED * seq.num_tokens:
                # This step and the next one output at least one token each.
                most = min(self._most(seq), seq.length_limit - seq.num_tokens - seq.num_placeholder - 2)
                if most > 0:
                    found[seq.id] = most
        return found

    @staticmethod
    def _note_missed(batch: ScheduledBatch) -> None:
        """Counts the tokens of each sequence that the draft model does not compute."""
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
        """True if a sequence with a token in flight will probably have drafts once that is known."""
        if self._forced and self._forced_rest == 0 and self._waits_for_forced(seq):
            return True
        most = self._most(seq)
        if self.proposer is None or most == 0 or self._rest > 0 or not (found := self.proposer.propose(seq, most)):
            return False
        if not (pays := self.controller.pays(seq, max(1, self._lifecycle.num_decoding))):
            self.controller.decided({seq.id: found}, {seq.id: seq}, ())
        return pays

    def _most(self, seq: Sequence) -> int:
        """Most drafts of a sequence in a step."""
        own = seq.sampling_params.num_drafts
        return self._limits.mtp_k if own is None else min(own, self._limits.mtp_k)

    def _room(self, seq: Sequence) -> int:
        """Number of drafts for which a sequence has slots or could get some."""
        return seq.num_slots + self._blocks.num_free_blocks * self._blocks.block_size - seq.next_position - 1

    @staticmethod
    def _needs_no_output(seq: Sequence) -> bool:
        """True if a sequence's next step needs no output of the one in flight.

        Penalties, masks and digests of logits need it: the host makes them from tokens and positions.
        """
        return not seq.logits_every and len(seq.token_ids) + seq.num_placeholder >= seq.steered_until

    def _waits_for_forced(self, seq: Sequence) -> bool:
        """True if forced text gains more tokens than the step that the sequence skips to wait for it."""
        return sum(self._forced.rates(seq).gains(len(self._forced.of(seq)))) > _WORTH_WAITING

    def _guessed(self, decodes: list[Sequence]) -> dict[int, list[int]]:
        """Proposed drafts by sequence; empty while looks for drafts rest."""
        if not self._limits.mtp_k:
            return {}
        if self._rest > 0 and not self._in_runner:
            self._rest -= 1
            return {}
        has_any = self.proposer is not None or bool(self._coming) or any(seq.spec_token_ids for seq in decodes)
        guessed = self._proposed(decodes) if has_any else {}
        if self.proposer is not None and decodes and not guessed:
            self._rest = self.controller.rest(len(decodes))
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
        """Drafts of the proposer or, without one, of the draft model, by sequence."""
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
        """Reserves slots for the next `num_tokens` tokens of a sequence, as far as blocks are free."""
        if seq.next_position + num_tokens <= seq.num_slots:
            return
        free = self._blocks.num_free_blocks * self._blocks.block_size
        self._lifecycle.append_slots(seq, min(num_tokens, seq.num_slots + free - seq.next_position))
