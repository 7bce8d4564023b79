"""Durations of steps without prompts, by their number of rows and by whether they verify drafts. Pure, no clock.

A table is measured when the engine starts (cost_probe.py), and corrected while it runs. All steps get slower or
faster together: contexts grow, other programs run. That is told by a level, which follows the newest steps.
The table, which tells steps of different sizes apart, learns where a step has another size than the one before it, and
only what both the level and that one say.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

# A clock may stand still.
_SHORTEST_S: Final = 1e-9
# A step may be interrupted; it counts for no more than so many expected ones, and for no less than so much of one.
_LONGEST: Final = 2.0
# Parts of what was unexpected of a step that the level and the table take over.
_LEVEL_WEIGHT: Final = 0.25
_WEIGHT: Final = 0.4
# Part of what the table has learnt that is forgotten each time that it learns: contexts are short where many sequences
# have begun together, and long where few are left, which is no matter of sizes, and would add up.
_FORGOTTEN: Final = 0.02
# Sizes nearer to each other than this part of theirs are not told apart.
_NEAR: Final = 1 / 16


class StepCosts:
    """Seconds of steps by their number of rows.

    Args:
        table: seconds that decodes of so many rows took, where they were measured.
        verify_s: seconds that the verification of drafts takes, besides its rows.

    Attributes:
        level: of the newest steps, in what the table says.
    """

    def __init__(self, table: Mapping[int, float] | None = None, verify_s: float = 0.0) -> None:
        known = sorted((table or {}).items())
        self._rows = [rows for rows, _ in known]
        # None is shorter than a smaller one, but by what else the machine did.
        self._seconds = [max(_SHORTEST_S, seconds) for _, seconds in known]
        for i in range(len(known) - 2, -1, -1):
            self._seconds[i] = min(self._seconds[i : i + 2])
        # What they were when they came into the table.
        self._first = list(self._seconds)
        self._verify_s = verify_s
        self.level = 1.0
        # Rows of the last step, 0 before the first, and the level that it alone would have told.
        self._last = 0, 1.0

    @property
    def table(self) -> dict[int, float]:
        """Seconds by rows, of the sizes that are told apart."""
        return {rows: self.level * seconds for rows, seconds in zip(self._rows, self._seconds, strict=True)}

    def most_rows(self, rows: int) -> int:
        """Rows up to which a step that needs `rows` may be tried: twice as many as any had; none more before there is
        something to compare with; all where nothing is measured at all."""
        if not self._rows:
            return sys.maxsize
        return max(2 * self._rows[-1], rows + 1) if self._rows[0] <= rows else rows

    def note(self, rows: int, duration_s: float, *, verifies: bool = False) -> None:
        """A step has taken so long."""
        if verifies:
            duration_s -= self.level * self._verify_s
        duration_s = max(duration_s, _SHORTEST_S)
        expected = self.of(rows)
        ratio = duration_s / expected if self._rows else 1.0
        surprise = _bounded(ratio)
        last_rows, last_level = self._last
        if self._is_new(rows):
            place = bisect_left(self._rows, rows)
            self._rows.insert(place, rows)
            self._seconds.insert(place, ((1 + surprise) * expected if place else duration_s) / self.level)
            self._first.insert(place, self._seconds[place])
        else:
            if last_rows and abs(rows - last_rows) > _NEAR * rows:
                self._correct(rows, 1 + _WEIGHT * _common(surprise, _bounded(ratio * self.level / last_level)))
            self.level *= 1 + _LEVEL_WEIGHT * surprise
        self._last = rows, duration_s / (self.of(rows) / self.level)

    def verification(self, rows: int) -> float:
        """Seconds that a step of so many rows takes which verifies drafts."""
        return self.of(rows) + self.level * self._verify_s

    def verifications(self, rows: int, most: int) -> npt.NDArray[np.float64]:
        """`verification` of so many rows and one draft, two drafts, up to `most`."""
        if not self._rows:
            return np.full(most, self.verification(rows))
        sizes, seconds, longest = self._rows, self._seconds, rows + most
        if longest > sizes[-1]:
            sizes, seconds = [*sizes, longest], [*seconds, self._beyond(longest)]
        return self.level * (np.interp(np.arange(rows + 1, longest + 1), sizes, seconds) + self._verify_s)

    def of(self, rows: int) -> float:
        """Seconds that decodes of so many rows take: on a line between what was measured, and beyond it.

        1 where nothing was.
        """
        place = bisect_left(self._rows, rows)
        if place == len(self._rows):
            return self.level * self._beyond(rows) if place else 1.0
        high = self._seconds[place]
        if place == 0 or self._rows[place] == rows:
            return self.level * high
        low, first = self._seconds[place - 1], self._rows[place - 1]
        return self.level * (low + (rows - first) / (self._rows[place] - first) * (high - low))

    def _beyond(self, rows: int) -> float:
        longest = self._seconds[-1]
        if len(self._rows) == 1:
            return longest
        slope = max(0.0, longest - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return longest + slope * (rows - self._rows[-1])

    def _is_new(self, rows: int) -> bool:
        place = bisect_left(self._rows, rows)
        return all(abs(rows - near) > _NEAR * rows for near in self._rows[max(0, place - 1) : place + 1])

    def _correct(self, rows: int, factor: float) -> None:
        """Multiplies what is known of the sizes on both sides, more of the nearer one."""
        for i, (first, seconds) in enumerate(zip(self._first, self._seconds, strict=True)):
            if first != seconds:
                self._seconds[i] = seconds * (first / seconds) ** _FORGOTTEN
        place = bisect_left(self._rows, rows)
        if place in (0, len(self._rows)) or self._rows[place] == rows:
            self._seconds[min(place, len(self._rows) - 1)] *= factor
            return
        share = (rows - self._rows[place - 1]) / (self._rows[place] - self._rows[place - 1])
        self._seconds[place - 1] *= 1 + (1 - share) * (factor - 1)
        self._seconds[place] *= 1 + share * (factor - 1)


def _bounded(ratio: float) -> float:
    """By how much a duration is longer than expected, in parts of that; no more or less than one step may tell."""
    return min(max(ratio, 1 / _LONGEST), _LONGEST) - 1


def _common(first: float, second: float) -> float:
    """As much as both say."""
    return min(first, second, key=abs) if first * second > 0 else 0.0
