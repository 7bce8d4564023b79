"""Percentiles and summaries. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of 100 of the values lie, linear between the two nearest ones.

    With n values the k-th smallest (k from 0) stands at 100 * k / (n - 1) percent: definition 7 of Hyndman and Fan
    (1996), the default of numpy. Few values say little of high percentiles: below 100 of them p99 lies between the
    largest two.

    Args:
        ordered: values in ascending order, at least one.
        percent: from 0 to 100.
    """
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    below, above = ordered[low], ordered[high]
    # Rounding must not move the result beyond the two values.
    return min(max(below + (above - below) * (place - low), below), above)


@dataclass(frozen=True, slots=True)
class Summary:
    """Distribution of values, in their own unit.

    Attributes:
        count: of values, at least 1.
        mean: the arithmetic mean.
        p50: half of them are at most this; as `percentile` defines it.
        p90: likewise for 90 %.
        p99: likewise for 99 %.
        max: the largest.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Summary | None:
        """Summary of values times `scale`, in any order; None when there are none."""
        if not values:
            return None
        ordered = sorted(value * scale for value in values)
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])

    def shown(self) -> tuple[float, ...]:
        """Mean, p50, p90, p99 and max."""
        return self.mean, self.p50, self.p90, self.p99, self.max
