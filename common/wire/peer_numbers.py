"""Clamps numbers of a peer before they enter arithmetic and bounded protobuf fields.

Each number may fit a field while their sum does not: protobuf then raises ValueError where the sum is written. The
error hits all receivers of the sum, not the peer that sent the number.
"""

from __future__ import annotations

import math
from typing import Final

UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1
# More than any true count of tokens or microseconds; 65,536 of them add up to less than 2^57.
MOST_COUNTED: Final = 2**41


def as_uint32(value: float) -> int:
    """The nearest number that a uint32 holds."""
    return _within(value, UINT32_MAX)


def as_uint64(value: float) -> int:
    """The nearest number that a uint64 holds."""
    return _within(value, UINT64_MAX)


def counted(value: int) -> int:
    """A peer's count, clamped to 0 to MOST_COUNTED."""
    return _within(value, MOST_COUNTED)


def rate(value: float) -> float:
    """A peer's rate; 0, which means unknown, unless it is finite and positive."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _within(value: float, most: int) -> int:
    # Both comparisons are false for NaN, which becomes 0.
    return round(value) if 0 <= value <= most else most if value > most else 0
