"""Few of many cases: each value in one of them (`make test`), each pair of values (`make test-slow`), or all (long).

A fault that shows for one value of a parameter shows in a cover of values, one that needs two values of different
parameters together in a cover of pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

# Marks of a case that neither cover has: fresh runs take some of them, the long form all.
SAMPLED = (pytest.mark.long, pytest.mark.sampled)
# Marker of tests with many cases, which leaves a cover of values to `make test`.
EACH_VALUE = "each_value"
Places = tuple[int, ...]
Case = TypeVar("Case")


def covering(*axes: Sequence[Any]) -> list[Any]:
    """The full product of the axes as parameters of a test.

    Beside a cover of values the others of a cover of pairs are marked `slow`, and all others `long` and `sampled`.

    For tests whose single case is itself a loop over many steps.
    """
    pairs = pairwise_cover([len(axis) for axis in axes])
    values = cover(pairs, values_of)

    def marks(places: Places) -> tuple[pytest.MarkDecorator, ...]:
        if places in values:
            return ()
        return (pytest.mark.slow,) if places in pairs else SAMPLED

    return [
        pytest.param(*chosen, marks=marks(places))
        for places, chosen in zip(product(*(range(len(axis)) for axis in axes)), product(*axes), strict=True)
    ]


def slow_but(kept: Set[Any], values: Collection[Any]) -> list[Any]:
    """Values as parameters of a test, marked `slow` but for those that are kept."""
    assert kept <= set(values), f"not among the values: {set(kept) - set(values)}"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def mark_by_value(items: Sequence[pytest.Item]) -> None:
    """Marks cases of tests marked `each_value` as slow, but for a cover of the values of their parameters."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(EACH_VALUE) and not _is_left_out(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = set(map(id, cover(cases, _parameters)))
        for item in cases:
            if id(item) not in kept:
                item.add_marker(pytest.mark.slow)


def _is_left_out(item: pytest.Item) -> bool:
    """True if a case is marked by itself."""
    return any(item.get_closest_marker(name) for name in ("slow", "long"))


def _parameters(item: pytest.Item) -> Set[Hashable]:
    """Values of a case: of each parametrization the id in the case's name; of a test without any its own."""
    ids: Sequence[str] = getattr(getattr(item, "callspec", None), "_idlist", ())
    return set(enumerate(ids)) or {item.nodeid}


def pairwise_cover(sizes: Sequence[int]) -> list[Places]:
    """Few cases of axes of these sizes, in which every two values of two axes meet; always the same ones."""
    return cover(list(product(*map(range, sizes))), _pairs)


def cover(cases: Sequence[Case], parts: Callable[[Case], Set[Hashable]]) -> list[Case]:
    """Few of the cases, which together have the parts of all; always the same ones.

    Of those that bring as many parts the one comes whose parts the others have least often.
    """
    having = [parts(case) for case in cases]
    missing: set[Hashable] = set().union(*having)
    used: Counter[Hashable] = Counter()
    chosen = []
    while missing:
        best = max(
            range(len(cases)), key=lambda i: (len(having[i] & missing), -sum(used[part] for part in having[i]), -i)
        )
        missing -= having[best]
        used.update(having[best])
        chosen.append(cases[best])
    return chosen


def values_of(case: Places) -> Set[Hashable]:
    """Values of a case: an axis and the place in it."""
    return set(enumerate(case))


def _pairs(case: Places) -> Set[Hashable]:
    """Pairs of a case: two axes and the place in each."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}
