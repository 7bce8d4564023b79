"""Seconds of decode steps by number of rows, and of a draft model's work. Pure, no clock.

The tables are measured when the engine starts (cost_probe.py). One level scales them: contexts grow, other programs
run, and both lengthen all steps alike. Only plain steps change the level, so steps with drafts are compared with it.
Steps of more rows than were measured are learnt, as are all of an engine that drafts forced grammar text alone.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

# Weight of the newest plain step in the level and in the time between steps: a changed speed is known after ten steps.
_WEIGHT: Final = 0.25
# Shortest duration of a step, because a clock may stand still.
_SHORTEST_S = sys.float_info.epsilon


class Proposal(NamedTuple):
    """A draft model's work in one step.

    Attributes:
        rows: rows of the step, all of which the model computes.
        drafting: number of sequences that get drafts.
        longest: most drafts of one sequence; 0 if the model only computes the rows.
    """

    rows: int
    drafting: int = 0
    longest: int = 0


class StepCosts:
    """Measured durations of steps.

    Args:
        decodes: seconds of a decode step by its rows.
        verify_s: seconds that verification adds to a step of as many rows.
        first: seconds of a draft model's first draft, and of computing the step's rows, by number of rows.
        further: seconds of each further draft, by number of sequences.

    Attributes:
        level: duration of recent plain steps relative to the table.
        between_s: seconds between two steps.
    """

    def __init__(
        self,
        decodes: Mapping[int, float] | None = None,
        verify_s: float = 0.0,
        first: Mapping[int, float] | None = None,
        further: Mapping[int, float] | None = None,
    ) -> None:
        self._rows, self._seconds = _lists(decodes)
        # Most rows of a measured step.
        self._measured = self._rows[-1] if self._rows else 0
        self._verify_s = verify_s
        self._first, self._further = _lists(first), _lists(further)
        self.level = 1.0
        self.between_s = 0.0

    @property
    def table(self) -> dict[int, float]:
        """Seconds of a decode step by its rows, as measured or learnt."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def note(self, rows: int, duration_s: float, *, is_verifying: bool = False) -> None:
        """Adds a step without a draft model's work to the sizes beyond the measured ones, which are learnt."""
        if rows <= self._measured:
            return
        place, seconds = bisect_left(self._rows, rows), duration_s / self.level - is_verifying * self._verify_s
        if place == len(self._rows) or self._rows[place] != rows:
            self._rows.insert(place, rows)
            self._seconds.insert(place, max(_SHORTEST_S, seconds))
        else:
            known = self._seconds[place]
            self._seconds[place] += _WEIGHT * (min(max(_SHORTEST_S, seconds), 2 * known) - known)

    def note_plain(self, num_seqs: int, duration_s: float, wall_s: float | None) -> None:
        """Adds a plain step to the level, and the time between it and the step before."""
        # A step may be interrupted: it counts as at most a plain one longer than expected.
        longest_s = 2 * self.plain_s(num_seqs)
        if num_seqs <= self._measured:
            ratio = max(_SHORTEST_S, min(duration_s, longest_s)) / (self.level * self.decode(num_seqs))
            self.level *= 1 + _WEIGHT * (ratio - 1)
        if wall_s is not None and self._rows:
            between_s = min(max(0.0, wall_s - duration_s), longest_s)
            self.between_s += _WEIGHT * (between_s - self.between_s)

    def most_rows(self, rows: int) -> int:
        """Most rows that a step of `rows` rows may get with drafts: twice as many as any had, all without a table."""
        if not self._rows:
            return sys.maxsize
        return max(2 * self._rows[-1], rows + 1) if self._rows[0] <= rows else rows

    def decode(self, rows: int) -> float:
        """Seconds of a decode step of `rows` rows by the table alone; 1 without a table."""
        return _interpolated(self._rows, self._seconds, rows) if self._rows else 1.0

    def plain_s(self, num_seqs: int) -> float:
        """Seconds from one plain step of `num_seqs` sequences to the next."""
        return self.level * self.decode(num_seqs) + self.between_s

    def making_s(self, proposal: Proposal | None) -> float:
        """Seconds of a draft model's work; 0 without measurements."""
        if proposal is None or not self._first[0]:
            return 0.0
        further_s = max(0, proposal.longest - 1) * _interpolated(*self._further, proposal.drafting)
        return self.level * (_interpolated(*self._first, proposal.rows) + further_s)

    def drafting_s(self, rows: int, proposal: Proposal | None = None) -> float:
        """Seconds from a step that verifies drafts, and makes others, to the next one."""
        return self.level * (self.decode(rows) + self._verify_s) + self.making_s(proposal) + self.between_s

    def longer(self, rows: int, most: int) -> npt.NDArray[np.float64]:
        """Factors by which 1, 2, ... `most` drafts lengthen a step of `rows` rows and the time to the next one."""
        if not self._rows:
            return np.ones(most)
        sizes, seconds, longest = self._rows, self._seconds, rows + most
        if longest > sizes[-1]:
            sizes, seconds = [*sizes, longest], [*seconds, self.decode(longest)]
        more_s = np.interp(np.arange(rows + 1, longest + 1), sizes, seconds) + (self._verify_s - self.decode(rows))
        # Learnt sizes need not be in order, but no step is shorter for more rows.
        return 1.0 + self.level * np.maximum.accumulate(np.maximum(0.0, more_s)) / self.plain_s(rows)


def _lists(known: Mapping[int, float] | None) -> tuple[list[int], list[float]]:
    """Sizes in order and their seconds, none of which is longer than that of a larger size."""
    sizes = sorted(known or {})
    seconds = [max(_SHORTEST_S, known[size]) for size in sizes] if known else []
    # A longer step of fewer rows was interrupted when it was measured.
    return sizes, list(accumulate(reversed(seconds), min))[::-1]


def _interpolated(sizes: list[int], seconds: list[float], size: int) -> float:
    """Seconds of a size: on a line between measured ones, on the last line beyond them."""
    place = bisect_left(sizes, size)
    if place == 0 or (place < len(sizes) and sizes[place] == size) or len(sizes) == 1:
        return seconds[min(place, len(sizes) - 1)]
    high = min(place, len(sizes) - 1)
    slope = (seconds[high] - seconds[high - 1]) / (sizes[high] - sizes[high - 1])
    return seconds[high] + slope * (size - sizes[high])
