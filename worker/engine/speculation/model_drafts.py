"""Decides when a model makes drafts, behind which sequences and how many. Pure, no clock.

Such a model takes time of its own: it takes in the rows of steps, and makes one draft after the other. So it works only
while drafts bring more tokens in the time than steps without it, by all that is measured (draft_lengths.py): what its
work takes, what steps take, the time between two steps, and how often drafts are right. While it does not work steps
are plain ones, as if there were no such model.

What it has not taken in of a sequence makes its drafts worse, and no token another: a sequence of which that is much is
left alone. A prediction may be wrong, and what it stands on may change. So now and then, when nothing is owed, the
model works for a few steps whatever is predicted, less often where that has brought nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_lengths import DraftLengths
from worker.engine.speculation.proposal_costs import Proposal

# Part of a sequence's tokens that the model need not have taken in.
_MOST_MISSED: Final = 1 / 2
# Plain steps between two looks at what drafts would bring, if no prompt comes.
_LOOK_EVERY: Final = 32
# After so many steps one makes a draft more than pays: how often that is right may be unknown, or have changed.
_MORE_EVERY: Final = 16
# Part of the wrong drafts that a trial takes for wrong; and where none was verified yet.
_DOUBT: Final = 0.5
_FIRST_DOUBT: Final = 0.1
# Steps of a trial, and plain ones between two: at first, and at most.
_TRIAL: Final = 8
_SHORTEST_REST: Final = 64
_LONGEST_REST: Final = 2048


class ModelDrafts:
    """Number of drafts that a model makes.

    Args:
        lengths: what drafts cost and bring.
    """

    def __init__(self, lengths: DraftLengths) -> None:
        self._lengths = lengths
        # True if the last look has found that drafts pay.
        self._pays = False
        # Plain steps left until the next look.
        self._unwatched = 0
        # Steps in which drafts paid.
        self._num_steps = 0
        # Steps left of a trial, and plain ones until the next one.
        self._trial = 0
        self._until_trial = 0
        self._rest = _SHORTEST_REST
        # Sequences of the step in which the last trial ended.
        self._tried_with = 0

    @property
    def takes_prompts(self) -> bool:
        """True if the model takes in the rows of prompts: also where drafts do not pay yet, since without these there
        can be none behind them."""
        return self._pays or self._lengths.may_take_in or not self._lengths.adapts

    def rests(self, *, has_prompts: bool) -> bool:
        """True if the next step makes no drafts, whatever its sequences; asked once for each step.

        What the model does not take in of a prompt it never does, so drafts behind it are decided now.
        """
        self._unwatched = 0 if has_prompts else max(0, self._unwatched - 1)
        self._until_trial -= self._unwatched > 0
        return self._unwatched > 0

    def plan(self, most: Mapping[int, int], seqs: Mapping[int, Sequence], num_seqs: int) -> dict[int, int]:
        """Number of drafts that a step makes behind each sequence; none if the model does not work in it.

        Args:
            most: drafts that a sequence has slots for, and wants.
            seqs: the sequences.
            num_seqs: of the step.
        """
        lengths = self._lengths
        if not lengths.adapts:
            return dict(most)
        fit = {seq_id: count for seq_id, count in most.items() if has_taken_in(seqs[seq_id])}
        if lengths.compares:
            return {}
        if not fit:
            self._unwatched = _LOOK_EVERY
            return {}
        count = self._number(fit, seqs, num_seqs)
        self._pays = count > 0
        self._unwatched = 0 if count or lengths.drafts else _LOOK_EVERY
        return {seq_id: min(own, count) for seq_id, own in fit.items()} if count else {}

    def _number(self, most: Mapping[int, int], seqs: Mapping[int, Sequence], num_seqs: int) -> int:
        """Most drafts of a sequence; 0 for a plain step."""
        if not self._lengths.may_propose(Proposal(num_seqs, len(most), max(most.values())), num_seqs):
            self._end_trial(num_seqs)
            return 0
        if count := self._best(most, seqs, num_seqs, doubt=1.0):
            self._trial, self._rest = 0, _SHORTEST_REST
            self._num_steps += 1
            return count + (self._num_steps % _MORE_EVERY == 0 and self._lengths.affords_more(len(most)))
        return self._tried(most, seqs, num_seqs)

    def _tried(self, most: Mapping[int, int], seqs: Mapping[int, Sequence], num_seqs: int) -> int:
        """Drafts of a trial's step, as many as would bring most if they were wrong half as often, or hardly ever where
        nobody knows yet; 0 without a trial."""
        if 2 * num_seqs <= self._tried_with:
            # Where fewer sequences decode drafts bring more: the last trial says little, and its rest may be long.
            self._until_trial, self._rest, self._tried_with = 0, _SHORTEST_REST, 0
        if self._trial == 0:
            self._until_trial -= 1
            if self._until_trial > 0 or not self._lengths.owes_nothing:
                return 0
            self._trial = _TRIAL
        doubt = _DOUBT if self._lengths.knows_rates else _FIRST_DOUBT
        if (count := self._best(most, seqs, num_seqs, doubt)) == 0:
            self._lengths.proposals.forget()
        self._trial -= 1
        if count == 0 or self._trial == 0:
            self._end_trial(num_seqs)
        return count

    def _end_trial(self, num_seqs: int) -> None:
        """Begins a rest, longer than the one before."""
        if self._trial or self._until_trial <= 0:
            self._tried_with = num_seqs
            self._trial, self._until_trial = 0, self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)

    def _best(self, most: Mapping[int, int], seqs: Mapping[int, Sequence], num_seqs: int, doubt: float) -> int:
        """Most drafts of a sequence with which steps bring most tokens in the time; 0 if hardly more than without.

        Args:
            most: drafts of each sequence.
            seqs: the sequences.
            num_seqs: of the step.
            doubt: part of the wrong drafts that are taken for wrong.
        """
        lengths = self._lengths
        gains = {seq_id: lengths.gains(seqs[seq_id], own, doubt=doubt) for seq_id, own in most.items()}
        best, count = lengths.least_gain * num_seqs / lengths.plain_s(num_seqs), 0
        tokens, rows = float(num_seqs), num_seqs
        for number in range(1, max(most.values()) + 1):
            for own in gains.values():
                if number <= len(own):
                    tokens, rows = tokens + own[number - 1], rows + 1
            seconds = lengths.drafting_s(rows, Proposal(rows, len(most), number))
            if (rate := tokens / seconds) > best:
                best, count = rate, number
        return count


def has_taken_in(seq: Sequence) -> bool:
    """True if the model has taken in most of a sequence."""
    return seq.num_missed <= _MOST_MISSED * seq.num_tokens
