"""Fresh examples: what `make test-fresh` tries beside the fixed ones of the other runs, others for each seed.

Property tests run with the seed's examples, tests marked `fresh` with inputs drawn by it, and of the cases that are
long only because there are so many (`covering`) a sample. All of it follows from the seed, which the run prints. Time
cuts off the end alone: a test that has not begun by then does not run, which changes nothing for the others.
"""

from __future__ import annotations

import random
import time

import pytest


def add_options(parser: pytest.Parser) -> None:
    """Options of a fresh run."""
    group = parser.getgroup("fresh", "examples that change from run to run (make test-fresh)")
    group.addoption("--fresh", type=int, metavar="SEED", help="run the tests with fresh examples, of this seed")
    group.addoption("--fresh-cases", type=int, default=40, help="so many of the tests marked sampled (default: 40)")
    group.addoption("--fresh-seconds", type=float, default=240.0, help="begin no test after so long (default: 240)")


def choose(items: list[pytest.Item], seed: int, cases: int) -> list[pytest.Item]:
    """The tests of a fresh run, `cases` of the marked ones among them, in an order of its own."""
    draw = random.Random(seed)
    fresh = [item for item in items if item.get_closest_marker("fresh") or _is_property(item)]
    sampled = [item for item in items if item.get_closest_marker("sampled")]
    chosen = [*fresh, *draw.sample(sampled, min(cases, len(sampled)))]
    draw.shuffle(chosen)
    return chosen


def _is_property(item: pytest.Item) -> bool:
    """True if Hypothesis draws the examples of a test that other runs have too."""
    function = getattr(item, "obj", None)
    return bool(getattr(function, "is_hypothesis_test", False)) and item.get_closest_marker("long") is None


class Limit:
    """Lets no test begin after the run's time is over."""

    def __init__(self, seconds: float) -> None:
        """The time begins with the first test."""
        self._seconds = seconds
        self._end: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Takes the place of a test that is too late."""
        if self._end is None:
            self._end = time.monotonic() + self._seconds
        return True if time.monotonic() >= self._end else None
