"""Fills what is left of a step's budget with drafts: tokens behind the newest one that the step verifies.

Invariants:
- drafts take what decodes and prompts leave of the budget, and of the blocks: nobody waits for them, or is preempted;
- a sequence drafts when all of its tokens are known, and no further than it can still put out;
- which drafts there are changes how many tokens a step brings, never which.
"""

from __future__ import annotations

from typing import Protocol

from common.config import Config
from common.config_parts import NGRAM, SpeculativeConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.draft_lengths import DraftLengths
from worker.engine.lifecycle import Lifecycle
from worker.engine.ngram_proposer import NgramProposer
from worker.engine.sequence import Sequence
from worker.engine.step import Step, StepLimits


class Proposer(Protocol):
    """Proposes what may come behind a sequence, from its tokens alone."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """At most `most` token ids of the model's vocabulary, which may be wrong; none where there is no guess."""
        ...


def make_proposer(config: Config) -> Proposer | None:
    """The proposer of a config; None where there is no speculation, or the runner proposes."""
    spec = config.speculative_config
    return _ngrams(spec) if spec is not None and spec.method == NGRAM else None


def _ngrams(spec: SpeculativeConfig) -> NgramProposer:
    return NgramProposer(spec.prompt_lookup_min, spec.prompt_lookup_max)


class Drafter:
    """Decides which drafts a step verifies, and for which sequences the runner proposes the next ones.

    Args:
        limits: of a step.
        lifecycle: the sequences.
        proposer: proposes on this side, in front of what the runner proposes; None for nobody.
        lengths: how many drafts pay.
        in_runner: True if the runner proposes.

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
    ) -> None:
        self._limits = limits
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._in_runner = in_runner
        self._rest = 0
        self.proposer = proposer
        self.lengths = lengths

    def fill(self, step: Step) -> None:
        """Adds drafts to the decodes of a step, in their order."""
        if not self._limits.mtp_k:
            return
        if self._rest > 0 and not self._in_runner:
            self._rest -= 1
            return
        decodes = step.decodes()
        drafts = {seq.id: found for seq in decodes if (found := self._drafts(seq))}
        if not drafts:
            return
        chosen = self.lengths.choose(drafts, step.seqs, self._limits.max_num_batched_tokens - step.budget)
        budget, fitting = step.budget, dict[int, list[int]]()
        for seq in decodes:
            if own := chosen.get(seq.id, [])[: max(0, min(budget, self._room(seq)))]:
                fitting[seq.id] = own
                budget -= len(own)
                self._reserve(seq, 1 + len(own))
            if seq.id in drafts:
                self.lengths.decided(seq, drafts[seq.id], len(own))
        if fitting:
            step.verify(fitting)
        self._rest = 0 if chosen else self.lengths.rest

    def ask(self, batch: ScheduledBatch) -> None:
        """Notes in a batch how many drafts of each sequence the runner is to propose, whose KV has slots; and the
        tokens behind chunks, which a draft model takes in."""
        if not self._in_runner:
            return
        for i, seq in enumerate(batch.columns.rows):
            if not batch.is_final[i] and batch.context_lens[i] < len(seq.token_ids):
                batch.next_token_ids[seq.id] = seq.token_ids[batch.context_lens[i]]
            if not batch.is_final[i] or seq.pooling is not None:
                continue
            # The step brings one token at least, and so does the next one.
            own = self.lengths.wanted(seq, self._most(seq))
            most = min(own, seq.length_limit - seq.num_tokens - seq.num_placeholder - 2)
            if most > 0:
                needed = batch.num_scheduled_tokens[i] + most - 1
                self._reserve(seq, min(needed, seq.length_limit - 1 - seq.next_position))
                batch.drafts_wanted[seq.id] = most

    def expects(self, seq: Sequence) -> bool:
        """True if a sequence whose newest token is in flight will have drafts behind it, as far as can be told."""
        most = self._most(seq)
        if self.proposer is None or most == 0 or not (found := self.proposer.propose(seq, most)):
            return False
        if not (pays := self.lengths.pays(seq)):
            self.lengths.decided(seq, found, 0)
        return pays

    def _most(self, seq: Sequence) -> int:
        """Most drafts of a sequence in a step."""
        own = seq.sampling_params.num_drafts
        return self._limits.mtp_k if own is None else min(own, self._limits.mtp_k)

    def _room(self, seq: Sequence) -> int:
        """Drafts that a sequence has blocks for, or would get."""
        return seq.num_slots + self._blocks.num_free_blocks * self._blocks.block_size - seq.num_tokens

    def _drafts(self, seq: Sequence) -> list[int]:
        """Drafts that there are behind the newest token; those of the runner are for this step alone."""
        own, seq.spec_token_ids = seq.spec_token_ids, []
        most = min(self._most(seq), seq.length_limit - seq.num_tokens - 1)
        if seq.num_placeholder or most <= 0:
            return []
        found = self.proposer.propose(seq, most) if self.proposer is not None else []
        return found or own[:most]

    def _reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Gives a sequence slots for so many tokens from its next one on, as far as blocks are free."""
        free = self._blocks.num_free_blocks * self._blocks.block_size
        self._blocks.may_append(seq, min(num_tokens, seq.num_slots + free - seq.next_position))
        self._lifecycle.note_growth(seq)
