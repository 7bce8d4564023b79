"""Fills steps with prompts: running ones go on, waiting ones are admitted.

Invariants:
- admission is first come, first served within a priority class, higher classes first: a prompt that finds no blocks
  blocks those behind it;
- all blocks of a prompt are reserved when it is admitted, so that its chunks cannot run out of them;
- nobody is admitted in a step that preempts, else a newcomer would get the victim's blocks;
- at most `max_num_seqs` run;
- a prompt whose next block, or tail, another one is computing waits for it, and is passed over;
- likewise one whose grammar is being compiled.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from worker.engine.lifecycle import Lifecycle
from worker.engine.prefill_meter import PrefillMeter
from worker.engine.prefix_followers import PrefixFollowers
from worker.engine.sequence import Sequence, SequenceType
from worker.engine.step import Step, StepLimits

# Most waiting sequences that a step looks at, and cached prefix blocks after which it admits no further sequence.
# Looking up and taking a block costs 1 us, and running sequences wait for it. A step behind a long one once admitted
# all 64 followers of a prompt of 100,000 tokens, which took 459 ms.
_MOST_LOOKED_AT: Final = 1024
_MOST_LOOKUPS: Final = 4096


class PromptFiller:
    """Decides which prompt tokens a step computes.

    Args:
        limits: of a step.
        lifecycle: the sequences.
        followers: who waits for a prefix that another computes.
        meter: cuts chunks.
    """

    def __init__(
        self, limits: StepLimits, lifecycle: Lifecycle, followers: PrefixFollowers, meter: PrefillMeter
    ) -> None:
        self._limits = limits
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._prefixes = lifecycle.block_manager.prefixes
        self._followers = followers
        self._meter = meter

    def fill(self, step: Step) -> None:
        """Adds chunks of prompts, as far as the step's budget goes."""
        for seq in self._lifecycle.prefilling.values():
            wanted = min(seq.num_tokens - seq.next_position, step.budget)
            if num_tokens := self._meter.cut(step, seq.next_position, wanted):
                self._add(step, seq, num_tokens)
        if self._lifecycle.waiting and not step.has_preempted:
            self._admit(step)

    def share(self) -> int:
        """Tokens of a step that decodes leave to prompts: a share, or less where the prompts need no more."""
        share, lifecycle = self._limits.min_prefill_tokens, self._lifecycle
        if lifecycle.num_decoding <= self._limits.max_num_batched_tokens - share:
            return 0
        unfinished = lifecycle.unfinished_tokens
        if unfinished < share and self._may_admit():
            unfinished += lifecycle.waiting.num_tokens
        return min(share, unfinished)

    def _may_admit(self) -> bool:
        """True if the sequence at the front finds a place and blocks."""
        lifecycle = self._lifecycle
        if not lifecycle.waiting or len(lifecycle.running) >= self._limits.max_num_seqs:
            return False
        head = lifecycle.waiting.first()
        return not head.num_inflight_tokens and self._blocks.can_allocate(head, None, lifecycle.num_growing)

    def _admit(self, step: Step) -> None:
        lifecycle = self._lifecycle
        places = self._limits.max_num_seqs - len(lifecycle.running)
        if step.budget <= 0 or places <= 0:
            return
        lookups = _MOST_LOOKUPS
        # One block is kept free for each sequence that may need a further one, else a preempted sequence would be
        # admitted again only to be preempted again.
        for seq in list(islice(lifecycle.waiting, _MOST_LOOKED_AT)):
            if step.budget <= 0 or lookups <= 0 or places <= 0:
                break
            if seq.num_inflight_tokens:
                # Preempted with a step in flight: its late token belongs to what has to be computed.
                break
            if seq.waits_for_grammar:
                continue
            # If this very step computes its next block, it hits that next step instead of computing it again.
            if self._followers.follows(seq, step.fronts):
                continue
            cached = self._prefixes.cached_blocks(seq)
            lookups -= len(cached) + 1
            if self._followers.is_computing(self._prefixes.hittable_hash(seq, len(cached)), step):
                continue
            start = self._prefixes.num_cached_tokens(seq, cached)
            num_tokens = self._meter.cut(step, start, self._chunk(seq.num_tokens - start, step))
            if num_tokens == 0 or not self._blocks.can_allocate(seq, cached, lifecycle.num_growing):
                break
            places -= 1
            if (copy := lifecycle.start(seq, cached)) is not None:
                step.block_copies.append(copy)
            self._add(step, seq, num_tokens)

    def _chunk(self, remaining: int, step: Step) -> int:
        """Number of the `remaining` prompt tokens that fit the step. Steps without decodes are cut to whole prompts,
        but for prompts that are longer than any step."""
        if remaining <= step.budget:
            return remaining
        return step.budget if self._limits.mixes or remaining > self._limits.max_num_batched_tokens else 0

    def _add(self, step: Step, seq: Sequence, num_tokens: int) -> None:
        start = seq.next_position
        step.computing.update(self._prefixes.hashes_in(seq, start, start + num_tokens))
        self._followers.note_front(step.fronts, seq, start)
        step.prefill_cost -= self._meter.context_cost.of(start, num_tokens)
        step.add(seq, num_tokens, SequenceType.PREFILL)
