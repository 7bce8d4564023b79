"""Covers: every value, or every two values of two axes, in far fewer cases than the full product."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.covering import cover, covering, pairwise_cover, slow_but, values_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("sizes", "most"), [((3, 4, 3, 3), 12), ((3, 3, 2), 9), ((2, 2, 2, 2, 2), 7), ((5,), 5)])
def test_every_pair_is_in_a_case(sizes: tuple[int, ...], most: int) -> None:
    cover = pairwise_cover(sizes)
    assert len(cover) <= most
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in cover} == set(product(range(sizes[i]), range(sizes[j])))


def test_covering_marks_all_but_a_cover_slow_or_long() -> None:
    cases = covering("abc", [1, 2], [True, False])
    assert [case.values for case in cases] == list(product("abc", [1, 2], [True, False]))
    tiers = [{mark.name for mark in case.marks} for case in cases]
    kept = [case.values for case, marks in zip(cases, tiers, strict=True) if not marks]
    assert len(kept) == 3
    assert [set(axis) for axis in zip(*kept, strict=True)] == [set("abc"), {1, 2}, {True, False}]
    assert tiers.count({"slow"}) == 3
    assert tiers.count({"long", "sampled"}) == 6


def test_cover_uses_values_evenly() -> None:
    chosen = cover(list(product(range(6), range(2))), values_of)
    assert len(chosen) == 6
    assert Counter(second for _, second in chosen) == {0: 3, 1: 3}


def test_kept_values_must_be_parameters() -> None:
    slow = slow_but({"b"}, ["a", "b", "c"])
    assert slow[1] == "b"
    assert [[mark.name for mark in case.marks] for case in (slow[0], slow[2])] == [["slow"], ["slow"]]
    with pytest.raises(AssertionError, match="'d'"):
        slow_but({"d"}, ["a"])


SUITE = """
import pytest

@pytest.fixture(params=["x", "y"])
def given(request):
    pass

@pytest.mark.each_value
@pytest.mark.parametrize("a", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("b", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_cases(given, a, b):
    pass

@pytest.mark.each_value
def test_alone():
    pass
"""


def test_each_value_mark_keeps_a_cover_fast(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: -\n  slow: -\n  each_value: -\n")

    def names(marks: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", marks]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "HOME": "/nonexistent"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return [line.partition("::")[2] for line in done.stdout.splitlines() if line.startswith("test_suite")]

    assert names("not long and not slow") == ["test_cases[x-1-1]", "test_cases[y-2-2]", "test_alone"]
    assert len(names("slow and not long")) == 10
    assert len(names("long")) == 6
