"""Seconds that a model takes for drafts, by rows that it takes in and by drafts that it makes. Pure, no clock.

A table is measured when the engine starts (cost_probe.py). How much longer or shorter proposals are than it says is
learnt while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

# The newest proposals count so much in the level. They count as longer or shorter than expected by no more than so many
# times that: in both directions alike, since the time of their step, which is subtracted, varies as much.
_WEIGHT: Final = 0.1
_MOST_UNEXPECTED: Final = 3.0
# What is left of them at least, of what the table says: from nothing they could not grow again.
_LEAST: Final = 1 / 16


class Proposal(NamedTuple):
    """Work of a model that drafts, in one step.

    Attributes:
        rows: of the step, which it takes in.
        drafting: sequences behind which it drafts.
        longest: most drafts of one of them; 0 if it takes rows in alone.
    """

    rows: int
    drafting: int = 0
    longest: int = 0


class ProposalCosts:
    """Seconds of proposals.

    Args:
        first: of one draft, by the number of sequences; rows that are taken in alone count as these.
        further: of each draft behind the first one, likewise.

    Attributes:
        level: of the newest proposals, in what the table says.
    """

    def __init__(self, first: Mapping[int, float] | None = None, further: Mapping[int, float] | None = None) -> None:
        self._first = sorted((first or {}).items())
        self._further = sorted((further or {}).items())
        self.level = 1.0

    @property
    def are_known(self) -> bool:
        """True if anything was measured."""
        return bool(self._first)

    def of(self, proposal: Proposal) -> float:
        """Seconds that it takes; 0 where nothing was measured."""
        further = max(0, proposal.longest - 1) * _at(self._further, proposal.drafting)
        return self.level * (_at(self._first, proposal.rows) + further)

    def note(self, proposal: Proposal, duration_s: float) -> None:
        """A proposal has taken so long."""
        if (expected := self.of(proposal)) > 0.0:
            unexpected = duration_s / expected - 1
            factor = 1 + _WEIGHT * min(max(unexpected, -_MOST_UNEXPECTED), _MOST_UNEXPECTED)
            self.level = max(_LEAST, factor * self.level)

    def forget(self) -> None:
        """Takes half of what was learnt for over, where proposals took longer than the table says: nobody finds out
        that they no longer do while there are none."""
        self.level = min(self.level, (1.0 + self.level) / 2)


def _at(known: list[tuple[int, float]], size: int) -> float:
    """On a line between what was measured, and beyond it in proportion; 0 where nothing was."""
    below = 0, 0.0
    for at, seconds in known:
        if size <= at:
            # The smallest takes most of its time whatever its size.
            return seconds if not below[0] else below[1] + (size - below[0]) / (at - below[0]) * (seconds - below[1])
        below = at, seconds
    return below[1] * size / below[0] if below[0] else 0.0
