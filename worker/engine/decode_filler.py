"""Fills steps with decodes: the newest token of every running sequence. Drafts come later (speculation/drafter.py).

Invariants:
- the blocks of a decode are reserved before it enters the batch. Victims are the newest of the lowest class, so the
  oldest running sequence of the highest class is never preempted;
- decodes that a step has no place for go first in the next one;
- speculation: how many drafts are accepted decides where the next step begins. A sequence with drafts in flight goes on
  as if all were right where the runner finds out (speculation/drafter.py), and waits for its output elsewhere; so does
  one that will have drafts of this side behind a token in flight.
"""

from __future__ import annotations

from collections import deque

from worker.engine.batch import SequenceColumns
from worker.engine.lifecycle import Lifecycle
from worker.engine.sequence import Sequence, SequenceStatus, SequenceType
from worker.engine.speculation.drafter import Drafter
from worker.engine.step import Step


class DecodeFiller:
    """Decides which sequences a step decodes.

    Args:
        lifecycle: the sequences.
        in_flight: the steps that are being computed, oldest first.
        drafter: says who will have drafts.

    Attributes:
        held: sequences that steps do not decode now (worker/engine/constraint_pace.py).
    """

    def __init__(self, lifecycle: Lifecycle, in_flight: deque[Step], drafter: Drafter) -> None:
        self._lifecycle = lifecycle
        self._blocks = lifecycle.block_manager
        self._in_flight = in_flight
        self._drafter = drafter
        # Decodes that the last step had no place for, in the order in which the next one takes them.
        self._left_out: list[int] = []
        self.held: frozenset[int] = frozenset()

    def fill(self, step: Step, kept: int = 0) -> None:
        """Adds decodes, but for `kept` tokens of the budget, which are for prompts."""
        most = step.budget - kept
        if self._fill_plain(step, most):
            return
        ready = [seq for seq in self._lifecycle.decodes() if self._goes_on(seq)]
        decoding, self._left_out = self._in_turn(ready, most)
        for seq in decoding:
            if seq.num_inflight_drafts and not self._blocks.can_append(seq):
                # Only if all of them are right does it need a further block.
                continue
            # Victims are taken from the end, so none of them is in the step already.
            if seq.status is SequenceStatus.RUNNING and self._make_room(seq, step):
                self._blocks.may_append(seq)
                self._lifecycle.note_growth(seq)
                step.add(seq, 1, SequenceType.DECODE)

    def _fill_plain(self, step: Step, most: int) -> bool:
        """Takes one token of every sequence that can go on, `most` at most; takes nothing and returns False if one
        must be preempted for it."""
        columns = self._lifecycle.decode_columns()
        left_out: list[int] = []
        # Kept while all go on: whoever has seen these columns need not look at them again.
        if (self._in_flight or self.held) and not all(map(self._goes_on, columns.rows)):
            columns = SequenceColumns([seq for seq in columns.rows if self._goes_on(seq)])
        if len(columns.rows) > most:
            rows, left_out = self._in_turn(columns.rows, most)
            columns = SequenceColumns(rows)
        growing = [seq for seq in columns.rows if seq.num_computed_tokens + seq.num_inflight_tokens >= seq.num_slots]
        if len(growing) > self._blocks.num_free_blocks:
            return False
        for seq in growing:
            self._blocks.may_append(seq)
            self._lifecycle.note_growth(seq)
        if columns.rows:
            step.add_decodes(columns)
        self._left_out = left_out
        return True

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

    def _goes_on(self, seq: Sequence) -> bool:
        """True if a decode can be scheduled before the output in flight is there."""
        if seq.id in self.held:
            return False
        if not seq.num_placeholder:
            return True
        most = len(seq.token_ids) + seq.num_placeholder + seq.num_inflight_drafts
        if seq.awaits_output or most >= seq.length_limit:
            return False
        return not self._drafter.expects(seq)

    def _make_room(self, seq: Sequence, step: Step) -> bool:
        """Preempts the newest sequences of the lowest class until `seq` can go on; False when it was itself the one."""
        while not self._blocks.can_append(seq):
            victim = self._lifecycle.running.last()
            self._lifecycle.preempt(victim)
            step.has_preempted = True
            if victim is seq:
                return False
        return True
