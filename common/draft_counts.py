"""Drafts of speculation by their place behind a token: how many were verified, and how many of these were right.

Place 0 is directly behind a token of the model, place 1 behind a draft there, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

# Verified ones, and accepted ones.
Counts: TypeAlias = tuple[int, int]


def by_place(outcomes: Mapping[tuple[int, int], int]) -> tuple[Counts, ...]:
    """Counts of each place.

    Args:
        outcomes: how often a step has verified so many drafts of which so many were accepted.
    """
    places = range(max((num_drafts for num_drafts, _ in outcomes), default=0))
    return tuple(
        (
            sum(times for (num_drafts, _), times in outcomes.items() if num_drafts > place),
            sum(times for (_, num_accepted), times in outcomes.items() if num_accepted > place),
        )
        for place in places
    )


def add_counts(total: list[Counts], further: Iterable[Counts]) -> None:
    """Adds counts by place to others, which may have fewer places."""
    for place, (verified, accepted) in enumerate(further):
        if place == len(total):
            total.append((0, 0))
        before = total[place]
        total[place] = before[0] + verified, before[1] + accepted
