"""Hidden states of an embedded sequence, combined from its steps.

A mean is a sum of integers: each state is rounded to a multiple of 2^-28, so the order of the sum does not matter. So
neither chunks nor ranks nor other sequences in a batch change a bit of it. The error is less than that of a float32 at
1/16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from common.params.pooling import MEAN, Pooling

# Behind a norm, states are below 2^16. Sequences are shorter than 2^18 tokens, so sums stay below 2^62.
MEAN_SCALE: Final = float(1 << 28)
MEAN_LIMIT: Final = float(1 << 16)

Sums = npt.NDArray[np.int64]


class PooledStates:
    """Hidden states that the steps of one sequence have returned so far.

    Invariant: the sum has the first `_end` rows, each once. A step that begins elsewhere was scheduled before a
    preemption, after which the rows are computed again from the first one on.

    Args:
        pooling: pooling of the sequence.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._values = b""
        self._sums: Sums | None = None
        self._end = 0

    def take(self, start: int, end: int, values: bytes) -> None:
        """Adds the states of rows [start, end): float32 of the last one, or int64 sums; empty if one is no number."""
        if self._pooling != MEAN:
            self._values = values
            return
        if start == 0:
            self._sums, self._end = np.zeros(len(values) // 8, np.int64), 0
        if start != self._end:
            return
        self._end = end
        is_number = self._sums is not None and len(values) > 0
        self._sums = self._sums + np.frombuffer(values, "<i8") if is_number else None

    def finish(self) -> bytes:
        """The vector, or a number for each label, float32; empty if a state was no number or too large."""
        if self._pooling != MEAN:
            return self._values
        if self._sums is None:
            return b""
        return (self._sums / (self._end * MEAN_SCALE)).astype("<f4").tobytes()
