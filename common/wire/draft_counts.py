"""Drafts of speculation by their position behind a token: how many were verified, and how many of these were right.

Position 0 is directly behind a token of the model, position 1 behind a draft there, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TypeAlias

# Verified ones, and accepted ones.
Counts: TypeAlias = tuple[int, int]


class DraftCounter:
    """Counts what steps have verified."""

    __slots__ = ("_with_accepted", "_with_drafts")

    def __init__(self) -> None:
        # Verifications by how many drafts they had, and by how many were accepted.
        self._with_drafts = [0]
        self._with_accepted = [0]

    def count(self, num_drafts: int, num_accepted: int, times: int = 1) -> None:
        """A step has verified so many drafts of a sequence, of which so many were accepted."""
        if num_drafts >= len(self._with_drafts):
            more = [0] * (num_drafts + 1 - len(self._with_drafts))
            self._with_drafts += more
            self._with_accepted += more
        self._with_drafts[num_drafts] += times
        self._with_accepted[num_accepted] += times

    @property
    def by_position(self) -> tuple[Counts, ...]:
        """Counts of each position."""
        drafts, accepted = (
            list(accumulate(reversed(counts[1:])))[::-1] for counts in (self._with_drafts, self._with_accepted)
        )
        return tuple(zip(drafts, accepted, strict=True))


def add_counts(total: list[Counts], further: Iterable[Counts]) -> None:
    """Adds counts by position to others, which may have fewer positions."""
    for position, (verified, accepted) in enumerate(further):
        if position == len(total):
            total.append((0, 0))
        before = total[position]
        total[position] = before[0] + verified, before[1] + accepted
