"""Drafts of speculation by their position behind a token: how many were verified, and how many of these were right.

Position 0 is directly behind a token of the model, position 1 behind a draft there, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

# Verified ones, and accepted ones.
Counts: TypeAlias = tuple[int, int]


def add_counts(total: list[Counts], further: Iterable[Counts]) -> None:
    """Adds counts by position to others, which may have fewer positions."""
    for position, (verified, accepted) in enumerate(further):
        if position == len(total):
            total.append((0, 0))
        before = total[position]
        total[position] = before[0] + verified, before[1] + accepted
