"""Cases of which each pair of values comes in one of a few; the others of the full product are long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]
# Marks of a case that `make test` leaves to fresh runs, each of which takes some of them, and to the long form.
SAMPLED = (pytest.mark.long, pytest.mark.sampled)
Places = tuple[int, ...]


def covering(*axes: Sequence[Any]) -> list[Any]:
    """The full product of the axes as parameters of a test, all but a pairwise cover of it marked `long` and `sampled`.

    A fault that shows for one value of an axis, or for two values of different axes together, shows in the cover. For
    tests whose single case is itself a loop over many steps.
    """
    chosen = set(pairwise_cover([len(axis) for axis in axes]))
    return [
        pytest.param(*values, marks=() if places in chosen else SAMPLED)
        for places, values in zip(product(*(range(len(axis)) for axis in axes)), product(*axes), strict=True)
    ]


def pairwise_cover(sizes: Sequence[int]) -> list[Places]:
    """Few cases of axes of these sizes, in which every two values of two axes meet; always the same ones."""
    cases = list(product(*map(range, sizes)))
    missing: set[tuple[int, ...]] = set().union(*map(_pairs, cases))
    cover = []
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        cover.append(best)
    return cover


def _pairs(case: Places) -> set[tuple[int, int, int, int]]:
    """Pairs of a case: two axes and the place in each."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}
