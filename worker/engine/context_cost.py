"""Learns from the steps how much more a prompt token costs behind a long context. Pure.

A token takes one share of the matrix products, whatever precedes it, and attention to every token before it. So a chunk
of a fixed number of tokens takes ever longer as a long prompt goes on, and what decodes beside it waits ever longer for
its next token. Costs here are in tokens without a context: `n` tokens behind `start` others cost
`n + weight * (n * start + n * n / 2)`. The weight is that of a straight line through the seconds per token seen at
contexts of different lengths, one point per power of two, so that it forgets none of them when one kind of work comes
for long.
"""

from __future__ import annotations

import math
from typing import Final

# Attention to 64 tokens costs as much as all of a layer's products only in models far smaller than any that is served.
_MAX_WEIGHT: Final = 1 / 64
# Below this, a million tokens do not cost as much as one.
_MIN_WEIGHT: Final = 1e-6
# Weight of the newest step in the mean of its point, and how much slower than that mean it counts at most.
_NEWEST: Final = 0.25
_MOST_SLOWDOWN: Final = 2.0


class ContextCost:
    """The cost of a prompt's tokens by their context.

    Attributes:
        weight: cost of attention to one token, as a share of a token's other cost; 0 until contexts have been seen.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        # By the power of two of the mean context: that context, and the seconds per token, means both.
        self._points: dict[int, tuple[float, float]] = {}

    def note(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learns from a step.

        Args:
            num_tokens: prompt tokens that it computed.
            num_pairs: pairs of such a token and one that it attends to.
            seconds: what it took.
        """
        if num_tokens <= 0 or seconds <= 0:
            return
        context, per_token = num_pairs / num_tokens, seconds / num_tokens
        place = int(context).bit_length()
        if place in self._points:
            mean_context, mean = self._points[place]
            context = mean_context + _NEWEST * (context - mean_context)
            per_token = mean + _NEWEST * (min(per_token, _MOST_SLOWDOWN * mean) - mean)
        self._points[place] = context, per_token
        self.weight = self._slope()

    def of(self, start: int, num_tokens: int) -> float:
        """Cost of `num_tokens` tokens behind `start` others."""
        return num_tokens + self.weight * (num_tokens * start + num_tokens * num_tokens / 2)

    def most_tokens(self, start: int, wanted: int, cost: float) -> int:
        """As many of `wanted` tokens behind `start` others as cost no more than `cost`."""
        # What one sum gives is not taken for more than the same in another order.
        cost *= 1 + 1e-9
        if self.of(start, wanted) <= cost:
            return wanted
        each = 1 + self.weight * start
        return max(0, int(2 * cost / (each + math.sqrt(each * each + 2 * self.weight * max(0.0, cost)))))

    def _slope(self) -> float:
        """The line that fits best, each point by its relative error: its slope as a share of where it begins."""
        points = [(1 / seconds, context / seconds) for context, seconds in self._points.values()]
        xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
        x, y = (sum(p[i] for p in points) for i in (0, 1))
        begin, slope = yy * x - xy * y, xx * y - xy * x
        if len(points) < 2 or slope <= 0:
            return 0.0
        weight = slope / begin if begin > 0 else _MAX_WEIGHT
        return 0.0 if weight < _MIN_WEIGHT else min(weight, _MAX_WEIGHT)
