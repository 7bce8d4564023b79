"""Property tests try few examples in `make test`, and all of them in `make test-slow`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.examples import ExampleTiers

DEFAULT = "not long and not slow"
SLOW = "slow and not long"


class Item(SimpleNamespace):
    """A test item of pytest."""

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None

    def add_marker(self, marker: Any) -> None:
        self.marks.add(marker.name)


def item_of(function: Any = None, cls: Any = None, *marks: str) -> Any:
    return Item(obj=function, cls=cls, marks=set(marks))


def num_examples(tiers: ExampleTiers, max_examples: int) -> int:
    """Examples that a run tries for a test with `max_examples`."""
    tried = []

    @settings(max_examples=max_examples, database=None)
    @given(st.integers())
    def test(number: int) -> None:
        tried.append(number)

    run = tiers.pytest_runtest_call(item_of(test))
    next(run)
    test()
    assert list(run) == []
    return len(tried)


@pytest.mark.parametrize(
    ("expression", "expected"), [(DEFAULT, 25), (SLOW, 100), ("not long", 100), ("", 100), ("long", 100)]
)
def test_only_the_default_tier_tries_a_quarter_of_the_examples(expression: str, expected: int) -> None:
    assert num_examples(ExampleTiers(expression), 100) == expected
    assert num_examples(ExampleTiers(expression), 8) == 8


def test_state_machines_get_their_settings_back() -> None:
    class Machine(RuleBasedStateMachine):
        @rule()
        def step(self) -> None: ...

    case: Any = Machine.TestCase
    case.settings = own = settings(max_examples=80, stateful_step_count=7)
    run = ExampleTiers(DEFAULT).pytest_runtest_call(item_of(cls=case))
    next(run)
    assert (case.settings.max_examples, case.settings.stateful_step_count) == (20, 7)
    assert list(run) == []
    assert case.settings is own


@pytest.mark.parametrize(("expression", "expected"), [(DEFAULT, [False] * 3), (SLOW, [True, False, False])])
def test_only_property_tests_without_a_marker_join_the_slow_tier(expression: str, expected: list[bool]) -> None:
    @given(st.integers())
    def test(number: int) -> None: ...

    items = [item_of(test), item_of(test, None, "long"), item_of(lambda: None)]
    ExampleTiers(expression).pytest_collection_modifyitems(items)
    assert ["slow" in item.marks for item in items] == expected
