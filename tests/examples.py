"""Number of examples of property tests: few in `make test`, all in `make test-slow` and wherever no tier is chosen.

A property test without a marker runs in both tiers. Which one runs follows from the expression given to `pytest -m`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings

# Share of a test's examples that `make test` tries, and the least number of them.
_SHARE: Final = 4
_LEAST: Final = 10
_SETTINGS: Final = "_hypothesis_internal_use_settings"


class ExampleTiers:
    """Plugin that gives property tests the examples of the tier that runs.

    Args:
        expression: of `pytest -m`; empty for all tests.
    """

    def __init__(self, expression: str) -> None:
        self._in_default = _selects(expression, ())
        self._in_slow = _selects(expression, ("slow",))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Adds unmarked property tests to the slow tier, when that runs alone."""
        if self._in_slow and not self._in_default:
            for item in items:
                if _settings_owner(item) is not None and not item.get_closest_marker("long"):
                    item.add_marker(pytest.mark.slow)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Runs a property test with fewer examples, when the default tier runs alone."""
        owner = _settings_owner(item)
        if owner is None or not self._in_default or self._in_slow:
            return (yield)
        with _fewer_examples(*owner):
            return (yield)


def _selects(expression: str, marks: Sequence[str]) -> bool:
    """True if `pytest -m expression` runs a test with these markers."""

    def has_mark(name: str, /, **_: object) -> bool:
        return name in marks

    return not expression or Expression.compile(expression).evaluate(has_mark)


def _settings_owner(item: pytest.Item) -> tuple[Any, str] | None:
    """Object and attribute with a property test's settings; None for other tests."""
    cls: Any = getattr(item, "cls", None)
    if isinstance(getattr(cls, "settings", None), settings):
        return cls, "settings"
    function = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    return (function, _SETTINGS) if hasattr(function, _SETTINGS) else None


@contextmanager
def _fewer_examples(owner: Any, name: str) -> Iterator[None]:
    own: settings = getattr(owner, name)
    setattr(owner, name, settings(own, max_examples=min(own.max_examples, max(_LEAST, own.max_examples // _SHARE))))
    try:
        yield
    finally:
        setattr(owner, name, own)
