"""Acceptance rates of drafts by their position behind the newest token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.engine.speculation.spec_stats import DraftCounter

# Weight of the newest draft in its sequence's average: about eight drafts count, so a hard passage stops drafts soon.
SEQUENCE_WEIGHT: Final = 0.12
# Weight in the average of all sequences, with which a new one starts: it outlasts hard passages.
TOTAL_WEIGHT: Final = 0.01


@dataclass(slots=True)
class DraftRates:
    """Moving averages of acceptance, each given that all drafts before it were accepted.

    Attributes:
        rates: by position; further positions have the last of these rates, and 1 without any.
        counts: number of drafts in each average, as long as it is small.
    """

    rates: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def first(self, count: int) -> list[float]:
        """Rates of the first `count` positions."""
        missing = count - len(self.rates)
        return self.rates[:count] if missing <= 0 else [*self.rates, *(self.rates[-1:] or [1.0]) * missing]

    def gains(self, count: int, doubt: float = 1.0) -> list[float]:
        """Expected accepted tokens of each of the first `count` drafts, if `doubt` of the known rejections happen."""
        return list(accumulate((1 - doubt * (1 - rate) for rate in self.first(count)), mul))

    def learn(self, position: int, is_right: bool, weight: float) -> None:
        """Adds one draft: a plain mean at first, then a moving average of this weight."""
        rates, counts = self.rates, self.counts
        if position == len(rates):
            rates.append(rates[-1] if rates else 1.0)
            counts.append(1)
        counts[position] = count = counts[position] + 1
        share = weight if weight * count >= 1 else 1 / count
        rates[position] += share * ((1.0 if is_right else 0.0) - rates[position])

    def learn_run(self, num_accepted: int, num_drafts: int, weight: float) -> None:
        """Adds one step's verified drafts: the accepted ones and the first rejected one."""
        rates, counts = self.rates, self.counts
        num_learnt = min(num_accepted + 1, num_drafts)
        if num_learnt > len(rates) or counts[num_learnt - 1] * weight < 1:
            for position in range(num_learnt):
                self.learn(position, position < num_accepted, weight)
        else:
            # No position has fewer drafts than the next one, so all of these are moving averages.
            for position in range(num_accepted):
                rates[position] += weight * (1.0 - rates[position])
            if num_learnt > num_accepted:
                rates[num_accepted] -= weight * rates[num_accepted]
        if num_drafts < len(rates):
            # The rate of a position that is not tried moves toward the one before, so that it is tried again.
            rates[num_drafts] += TOTAL_WEIGHT * (rates[num_drafts - 1] - rates[num_drafts])

    def copy(self) -> DraftRates:
        """An independent copy, with which a new sequence starts."""
        return DraftRates(list(self.rates), list(self.counts))


def gains_of(known: Sequence[DraftRates], counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """Expected accepted tokens of each draft, one row a sequence; 0 after its last draft.

    Args:
        known: acceptance of each sequence's drafts.
        counts: number of drafts of each sequence.
    """
    most, rates = max(counts), list[float]()
    for own in known:
        rates += own.rates if len(own.rates) == most else own.first(most)
    gains = np.multiply.accumulate(np.fromiter(rates, np.float64, len(rates)).reshape(-1, most), axis=1)
    if min(counts) < most:
        gains[np.arange(most) >= np.array(counts)[:, None]] = 0.0
    return gains


@dataclass(slots=True)
class DraftHistory:
    """Acceptance of one sequence's drafts.

    Attributes:
        rates: acceptance of its drafts.
        counter: number of verified and accepted drafts.
        shadow: drafts that are only compared with the sequence's next tokens, not verified.
        position: index in `shadow` of the draft that the next token is compared with.
    """

    rates: DraftRates
    counter: DraftCounter = field(default_factory=DraftCounter)
    shadow: list[int] | tuple[int, ...] = ()
    position: int = 0
