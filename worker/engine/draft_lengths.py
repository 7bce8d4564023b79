"""Chooses how many drafts of each sequence a step verifies: as many as bring more tokens in the time. Pure, no clock.

It weighs two things that are measured while the engine runs: how often the drafts of a sequence are right, by their
position behind the newest token, and how long a step of so many rows takes. What is not measured yet counts as good, so
that it is tried; what was tried and does not pay stops. Drafts that are not verified are compared with the tokens that
come all the same, which costs nothing, so that they are taken up again when they are right.

Nothing of this can change a token (docs/determinism.md), so it may depend on durations.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Final

from worker.engine.sequence import DraftHistory, DraftRates, Sequence

# What the newest verification counts at least in the mean of its sequence, and in that of all.
_WEIGHT: Final = 0.07
_WEIGHT_OF_ALL: Final = 0.01
# Verifications that what is known of all sequences stands for in a new one.
_PRIOR: Final = 4
# What the newest step counts: other programs make steps longer, nothing makes them shorter.
_WEIGHT_OF_SHORTER: Final = 0.3
_WEIGHT_OF_LONGER: Final = 0.03
# Steps without drafts behind a decision that drafts do not pay.
_REST: Final = 3
# A clock may stand still.
_SHORTEST_S: Final = 1e-9
# A step may be interrupted; it counts for no more than so many usual ones.
_LONGEST: Final = 2.0
# What is left of a duration that was not measured, with each step; and of one that was measured fewer times than
# _MANY: the first steps of a size are slower.
_TRUST: Final = 0.999
_TRUST_OF_FEW: Final = 0.985
_MANY: Final = 3
# How much more tokens per second drafts must promise.
_LEAST_GAIN: Final = 1.05
# A sequence whose drafts a model makes asks for some again after so many tokens without.
_PROBE_EVERY: Final = 64
# Numbers of rows that are measured apart; more are measured in eighths of a power of two.
_FINE: Final = 16
_NO_RATES: Final[Mapping[int, DraftRates]] = MappingProxyType({})


class StepCosts:
    """Durations of steps without prompts, by their number of rows.

    What was measured long ago is taken for a little less, so that it is measured again: contexts change.
    """

    def __init__(self) -> None:
        # By number of rows: seconds, the number of the step that was the last one, and how many there were.
        self._measured: dict[int, tuple[float, int, int]] = {}
        self._rows: list[int] = []
        self._num_steps = 0

    def most_rows(self, rows: int) -> int:
        """Rows up to which a step that needs `rows` may be tried: twice as many as any had; none more before there is
        something to compare with; all where nothing is measured at all."""
        if not self._rows:
            return sys.maxsize
        return max(2 * self._rows[-1], rows + 1) if self._rows[0] <= rows else rows

    def note(self, rows: int, duration_s: float) -> None:
        """A step has taken so long."""
        self._num_steps += 1
        key, duration_s = _bucket(rows), max(duration_s, _SHORTEST_S)
        if key not in self._measured:
            self._measured[key] = duration_s, self._num_steps, 1
            self._rows = sorted(self._measured)
            return
        mean, _, count = self._measured[key]
        usual = _WEIGHT_OF_SHORTER if duration_s < mean else _WEIGHT_OF_LONGER
        weight = max(usual, 1 - self._trust(key))
        mean += weight * (min(duration_s, _LONGEST * mean) - mean)
        self._measured[key] = mean, self._num_steps, count + 1

    def of(self, rows: int) -> float:
        """Seconds that a step of so many rows takes: on a line between what was measured, and beyond it."""
        place = bisect_right(self._rows, rows)
        if place == 0:
            return self._known(self._rows[0]) if self._rows else 1.0
        low = self._rows[place - 1]
        if _bucket(rows) == low:
            return self._known(low)
        if place == len(self._rows):
            return self._beyond(rows)
        high = self._rows[place]
        shorter = self._known(low)
        return shorter + (rows - low) / (high - low) * (self._known(high) - shorter)

    def _known(self, key: int) -> float:
        return self._measured[key][0] * self._trust(key)

    def _trust(self, key: int) -> float:
        """Part that is left of a duration that was not measured for some steps."""
        _, step, count = self._measured[key]
        return (_TRUST if count >= _MANY else _TRUST_OF_FEW) ** (self._num_steps - step)

    def _beyond(self, rows: int) -> float:
        high = self._rows[-1]
        longest = self._known(high)
        if len(self._rows) == 1:
            return longest
        low = self._rows[-2]
        return longest + max(0.0, longest - self._known(low)) / (high - low) * (rows - high)


def _bucket(rows: int) -> int:
    if rows <= _FINE:
        return rows
    grain = 1 << (rows.bit_length() - 4)
    return rows // grain * grain


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

    @property
    def rest(self) -> int:
        """Steps that need no decision behind one that verifies nothing."""
        return _REST if self._adapts else 0

    def pays(self, seq: Sequence) -> bool:
        """True if drafts of a sequence would be verified, were it alone in its step."""
        return not self._adapts or self._count(self._gains(seq, self._most), 1, 1) > 0

    def wanted(self, seq: Sequence, most: int) -> int:
        """Number of drafts that a model is to make for a sequence: one more than pays, or all to find out."""
        history = seq.draft_history
        if not self._adapts or history is None or seq.num_tokens % _PROBE_EVERY == 0:
            return most
        return min(most, history.num_verified + 1) if history.num_verified else 0

    def decided(self, seq: Sequence, drafts: list[int], num_verified: int) -> None:
        """A step verifies so many of the drafts behind the newest token of a sequence."""
        history = self._history(seq)
        history.num_verified = num_verified
        if num_verified:
            history.shadow = []
        elif not history.shadow:
            history.shadow, history.place = drafts, 0

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step has verified drafts of a sequence."""
        history = self._history(seq)
        history.num_drafts += num_drafts
        history.num_accepted += num_accepted
        for position in range(min(num_accepted + 1, num_drafts)):
            self._learn(history, position, is_right=position < num_accepted)

    def came(self, history: DraftHistory, token_id: int) -> None:
        """A token has come where a draft was not verified."""
        is_right = history.shadow[history.place] == token_id
        self._learn(history, history.place, is_right=is_right)
        history.place += 1
        if not is_right or history.place == len(history.shadow):
            history.shadow = []

    def _count(self, gains: list[float], num_tokens: float, rows: int) -> int:
        """Number of drafts, the most promising first, with which a step brings most tokens in the time; 0 if hardly
        more than without."""
        shortest = self.costs.of(rows)
        best, count = _LEAST_GAIN * num_tokens / shortest, 0
        if num_tokens + sum(gains) <= _LEAST_GAIN * num_tokens:
            return 0
        for i, gain in enumerate(gains[: max(0, self.costs.most_rows(rows) - rows)], 1):
            num_tokens += gain
            # No step is shorter for having more rows: it was measured long ago, or by luck.
            shortest = max(shortest, self.costs.of(rows + i))
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
