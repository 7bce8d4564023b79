"""Chooses how many drafts of each sequence a step verifies: as many as bring more tokens in the time. Pure, no clock.

It weighs two things that are measured: how often the drafts of a sequence are right, by their position behind the
newest token, and how long a step of so many rows takes (step_costs.py). Drafts that are not verified are compared with
the tokens that come all the same, which costs nothing, so that they are taken up again when they are right. What has
come of the decisions is kept in account (draft_savings.py), which ends drafts that lose more than they should.

Nothing of this can change a token (docs/determinism.md), so it may depend on durations.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Final

from worker.engine.draft_savings import DraftSavings
from worker.engine.sequence import DraftHistory, DraftRates, Sequence
from worker.engine.step_costs import StepCosts

# What the newest verification counts at least in the mean of its sequence, and in that of all.
_WEIGHT: Final = 0.04
_WEIGHT_OF_ALL: Final = 0.01
# Verifications that what is known of all sequences stands for in a new one. Of many sequences those that had luck come
# first, so luck must count little.
_PRIOR: Final = 12
# How much more tokens per second drafts must promise: to begin with them, and to go on.
_LEAST_GAIN: Final = 1.05
_LEAST_FURTHER_GAIN: Final = 1.02
# After so many steps with drafts one is plain: what the others are compared with is measured again. So it is as soon as
# steps take so much more or less than expected, since that may be true of those with drafts alone.
_PLAIN_EVERY: Final = 64
_SURPRISE: Final = 0.1
# Seconds that proposals for a sequence and a decision about them take at most, and the part of a step's time that they
# may take while nothing comes of them.
_EFFORT_S: Final = 30e-6
_MOST_EFFORT: Final = 0.005
# Steps without a look at drafts, at most.
_LONGEST_REST: Final = 63
# A sequence whose drafts a model makes asks for some again after so many tokens without.
_PROBE_EVERY: Final = 64
_NO_RATES: Final[Mapping[int, DraftRates]] = MappingProxyType({})


class DraftLengths:
    """Chooses how many drafts are verified, and learns from what becomes of them.

    Args:
        most: drafts of a sequence and step.
        adapts: False takes all drafts there are.

    Attributes:
        costs: of steps.
    """

    def __init__(self, most: int, *, adapts: bool) -> None:
        self.costs = StepCosts()
        self._adapts = adapts
        self._most = most
        self._savings = DraftSavings()
        # Steps with drafts since the last plain one, and the level of costs (StepCosts) then.
        self._num_steps = 0
        self._plain_level = 1.0
        # Over all sequences: what a new one begins with.
        self._rates = DraftRates()

    def choose(
        self,
        drafts: Mapping[int, list[int]],
        seqs: Mapping[int, Sequence],
        rows: int,
        rates: Mapping[int, DraftRates] = _NO_RATES,
    ) -> dict[int, list[int]]:
        """The drafts that a step verifies, by sequence.

        Args:
            drafts: that there are, by sequence.
            seqs: of the step.
            rows: of the step, without any draft.
            rates: of sequences whose drafts are others than this has learnt from.
        """
        if not self._adapts:
            return dict(drafts)
        if self._compares or not self._savings.allows:
            return {}
        gains = [
            (gain, seq_id)
            for seq_id, own in drafts.items()
            for gain in self._gains(seqs[seq_id], len(own), rates.get(seq_id))
        ]
        gains.sort(key=lambda pair: -pair[0])
        chosen: dict[int, list[int]] = {}
        for _, seq_id in gains[: self._count([gain for gain, _ in gains], len(seqs), rows)]:
            chosen[seq_id] = drafts[seq_id][: len(chosen.get(seq_id, ())) + 1]
        return chosen

    def rest(self, num_seqs: int) -> int:
        """Steps of so many sequences that need no look at drafts behind one that verifies nothing: none where a look
        takes little of a step's time."""
        effort = num_seqs * _EFFORT_S / (_MOST_EFFORT * self.costs.of(num_seqs))
        return min(int(effort), _LONGEST_REST) if self._adapts else 0

    def pays(self, seq: Sequence, num_seqs: int) -> bool:
        """True if drafts of a sequence would be verified in a step of so many, were the others to have none."""
        if not self._adapts:
            return True
        return self._savings.allows and self._count(self._gains(seq, self._most), num_seqs, num_seqs) > 0

    def took(self, num_seqs: int, rows: int, duration_s: float) -> None:
        """A step without prompts has taken so long; those of its drafts that were right are yet to be told."""
        has_drafts = rows > num_seqs
        self.costs.note(rows, duration_s, verifies=has_drafts)
        self._num_steps = self._num_steps + 1 if has_drafts else 0
        if not has_drafts:
            self._plain_level = self.costs.level
        self._savings.step(duration_s, self.costs.of(num_seqs), num_seqs, has_drafts=has_drafts)

    def wanted(self, seq: Sequence, most: int) -> int:
        """Number of drafts that a model is to make for a sequence: one more than pays, or all to find out."""
        history = seq.draft_history
        if not self._adapts or history is None or seq.num_tokens % _PROBE_EVERY == 0:
            return most
        return min(most, history.num_verified + 1) if history.num_verified else 0

    def decided(self, seq: Sequence, drafts: list[int], num_verified: int) -> None:
        """A step verifies so many of the drafts behind the newest token of a sequence."""
        history = self._history(seq)
        if num_verified or not self._compares:
            history.num_verified = num_verified
        if num_verified:
            history.shadow = []
        elif not history.shadow:
            history.shadow, history.place = drafts, 0

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step has verified drafts of a sequence."""
        history = self._history(seq)
        outcome = num_drafts, num_accepted
        history.outcomes[outcome] = history.outcomes.get(outcome, 0) + 1
        self._savings.accepted(num_accepted)
        for position in range(min(num_accepted + 1, num_drafts)):
            self._learn(history, position, is_right=position < num_accepted)

    def came(self, history: DraftHistory, token_id: int) -> None:
        """A token has come where a draft was not verified."""
        is_right = history.shadow[history.place] == token_id
        self._learn(history, history.place, is_right=is_right)
        history.place += 1
        if not is_right or history.place == len(history.shadow):
            history.shadow = []

    @property
    def _compares(self) -> bool:
        """True if the next step is a plain one, to compare those with drafts with."""
        surprise = abs(self.costs.level / self._plain_level - 1)
        return self._num_steps >= _PLAIN_EVERY or (self._num_steps > 0 and surprise > _SURPRISE)

    def _count(self, gains: list[float], num_tokens: float, rows: int) -> int:
        """Number of drafts, the most promising first, with which a step brings most tokens in the time; 0 if hardly
        more than without."""
        shortest = self.costs.of(rows)
        least = _LEAST_FURTHER_GAIN if self._num_steps else _LEAST_GAIN
        best, count = least * num_tokens / shortest, 0
        if num_tokens + sum(gains) <= least * num_tokens:
            return 0
        for i, gain in enumerate(gains[: max(0, self.costs.most_rows(rows) - rows)], 1):
            num_tokens += gain
            # No step is shorter for having more rows.
            shortest = max(shortest, self.costs.verification(rows + i))
            if (rate := num_tokens / shortest) > best:
                best, count = rate, i
        return count

    def _gains(self, seq: Sequence, count: int, known: DraftRates | None = None) -> list[float]:
        """Tokens that each of so many drafts brings on average: what follows a wrong one is for nothing."""
        own = self._rates if seq.draft_history is None else seq.draft_history.rates
        rates = own if known is None else known
        return list(accumulate((rates.of(position) for position in range(count)), mul))

    def _history(self, seq: Sequence) -> DraftHistory:
        if seq.draft_history is None:
            seq.draft_history = DraftHistory(self._rates.prior(_PRIOR))
        return seq.draft_history

    def _learn(self, history: DraftHistory, position: int, *, is_right: bool) -> None:
        history.rates.learn(position, is_right, _WEIGHT)
        self._rates.learn(position, is_right, _WEIGHT_OF_ALL)
