"""Pairwise covers: every two values of two axes meet, in far fewer cases than the full product."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering, pairwise_cover


@pytest.mark.parametrize(("sizes", "most"), [((3, 4, 3, 3), 12), ((3, 3, 2), 9), ((2, 2, 2, 2, 2), 7), ((5,), 5)])
def test_every_pair_is_in_a_case(sizes: tuple[int, ...], most: int) -> None:
    cover = pairwise_cover(sizes)
    assert len(cover) <= most
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in cover} == set(product(range(sizes[i]), range(sizes[j])))


def test_the_others_of_the_full_product_are_long() -> None:
    cases = covering("abc", [1, 2], [True, False])
    assert [case.values for case in cases] == list(product("abc", [1, 2], [True, False]))
    kept = [case for case in cases if not case.marks]
    assert len(kept) == 6
    assert {mark.name for case in cases for mark in case.marks} == {"long", "sampled"}
