"""Lags of an event loop (`router/telemetry/loop_lag.py`), counted by class."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from router.telemetry.loop_lag import MAX_COUNTED_S

# Upper bounds of the classes: 0.1 ms to 10 s, each 1.2 times the previous one.
BOUNDS_S: Final = tuple(1e-4 * 1.2**i for i in range(64))


class LagHistogram:
    """Counts of lags by class.

    Attributes:
        counts: one per bound, of lags up to it and above the bound before; the last one counts all above.
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.counts = list(counts) or [0] * (len(BOUNDS_S) + 1)

    def record(self, lag_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, lag_s)] += 1

    def since(self, earlier: LagHistogram) -> LagHistogram:
        """The counts since `earlier`, an older copy of this histogram."""
        return LagHistogram([now - then for now, then in zip(self.counts, earlier.counts, strict=True)])

    def quantile(self, q: float) -> float:
        """The upper bound of the class that holds quantile `q`, seconds; 0 without counts."""
        left = q * sum(self.counts)
        for count, bound in zip(self.counts, (*BOUNDS_S, MAX_COUNTED_S), strict=True):
            left -= count
            if count and left <= 0:
                return bound
        return 0.0
