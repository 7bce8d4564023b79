"""Fresh runs: their tests depend only on the seed, and none starts after the time limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
import pytest
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers())
def test_property(number):
    print("drawn", number)

def test_fixed():
    pass

@pytest.mark.long
@given(st.integers())
def test_long_property(number):
    pass

@pytest.mark.long
@pytest.mark.fresh
def test_fresh(fresh_seed):
    print("given", fresh_seed)

@pytest.mark.parametrize("i", range(60))
@pytest.mark.long
@pytest.mark.sampled
def test_sampled(i):
    pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: -\n  fresh: -\n  sampled: -\n")
    return tmp_path


def run(suite: Path, *options: str) -> list[str]:
    """Lines of a run: each test as it ends, and the tests' own output."""
    command = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", *options, "."]
    done = subprocess.run(command, cwd=suite, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("test_suite", "drawn", "given"))]


def environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "HOME": "/nonexistent"}


def names(lines: list[str]) -> list[str]:
    return [line.split("::")[1].split()[0] for line in lines if line.startswith("test_suite")]


def test_fresh_run_depends_only_on_seed(suite: Path) -> None:
    one, again, other = (run(suite, "--fresh", seed, "--hypothesis-seed", seed) for seed in ("1", "1", "2"))
    assert one == again
    assert one != other
    assert {name.split("[")[0] for name in names(one)} == {"test_property", "test_fresh", "test_sampled"}
    assert len(names(one)) == 42
    assert set(names(one)) != set(names(other))


@pytest.mark.slow
def test_without_a_seed_examples_are_the_same_each_time(suite: Path) -> None:
    """Regression: Hypothesis tried numbers of loaded modules, so earlier tests decided the examples."""
    one = run(suite, "-m", "not long")
    (suite / "numbers_of_it.py").write_text("".join(f"n{i} = {i * 7_919_000_001}\n" for i in range(1, 300)))
    (suite / "test_suite.py").write_text(f"import numbers_of_it\n{SUITE}")
    again = run(suite, "-m", "not long")
    assert one == again
    assert names(one) == ["test_property", "test_fixed"]


@pytest.mark.slow
def test_fresh_run_past_time_starts_no_test(suite: Path) -> None:
    assert names(run(suite, "--fresh", "1", "--fresh-seconds", "0")) == []
