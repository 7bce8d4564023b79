"""Numbers that a peer has sent, on their way into arithmetic and into fields with a bound.

A sum of numbers that each fit a field need not fit it: protobuf then raises ValueError wherever the sum is written.
That costs all those who are told of the sum, not the peer who sent the number.
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
    """A peer's count, no more than can be true."""
    return _within(value, MOST_COUNTED)


def rate(value: float) -> float:
    """A peer's rate; 0, which means unknown, for what is none."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _within(value: float, most: int) -> int:
    # NaN is below nothing and above nothing.
    return round(value) if 0 <= value <= most else most if value > most else 0
