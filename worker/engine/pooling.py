"""Hidden states of an embedded sequence, put together from its steps.

A mean is of whole numbers: each state is rounded to a multiple of 2^-28, so that the sum has no order, and neither
chunks nor ranks nor what else is in a batch can change a bit of it. The error is less than a float32 has at 1/16.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from common.params.pooling import MEAN, Pooling

# States are below 2^16 behind a norm, and sequences shorter than 2^18 tokens: sums stay below 2^62.
MEAN_SCALE: Final = float(1 << 28)
MEAN_LIMIT: Final = float(1 << 16)

Sums = npt.NDArray[np.int64]


class PooledStates:
    """Takes what steps give of one sequence.

    Invariant: `end` rows from the first one on are in the sum, each once. A step that begins elsewhere is of before a
    preemption, after which the rows come again from the first one on.

    Args:
        pooling: of the sequence.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._values = b""
        self._sums: Sums | None = None
        self._end = 0

    def take(self, start: int, end: int, values: bytes) -> None:
        """Takes what rows [start, end) gave: float32 of the last one, or int64 sums; empty if one is no number."""
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
        """The vector, or the numbers of labels, float32; empty if a state is no number, or too large to be one behind a
        norm."""
        if self._pooling != MEAN:
            return self._values
        if self._sums is None:
            return b""
        return (self._sums / (self._end * MEAN_SCALE)).astype("<f4").tobytes()
