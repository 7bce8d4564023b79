"""Property tests, run from fixed seeds while the service has a fault that they are to find."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Test = Callable[..., Any]
_SETTINGS, _SEED = "_hypothesis_internal_use_settings", "_hypothesis_internal_use_seed"


def name_of(test: Test) -> str:
    """Name of the function or machine."""
    return test.func.__name__ if isinstance(test, partial) else test.__name__


def run(test: Test, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs one as pytest does, from a fixed seed, without making a failing example small."""
    # Constants are of the modules that happen to be loaded: with them a seed would stand for other examples each time.
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
    if isinstance(test, type):
        assert issubclass(test, RuleBasedStateMachine)
        monkeypatch.setattr(test, _SEED, 0, raising=False)
        run_state_machine_as_test(test, settings=_quick(test.TestCase.settings))
        return
    function: Any = test.func if isinstance(test, partial) else test
    if hasattr(function, "hypothesis"):
        monkeypatch.setattr(function, _SETTINGS, _quick(getattr(function, _SETTINGS)))
        monkeypatch.setattr(function, _SEED, 0, raising=False)
    test()


def _quick(own: settings) -> settings:
    return settings(own, database=None, phases=[Phase.generate], report_multiple_bugs=False)


def modules_below(package: ModuleType) -> Iterator[ModuleType]:
    """Modules of tests in a package, and in the packages in it."""
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2].startswith("test_"):
            yield importlib.import_module(found.name)


def property_tests(modules: Iterable[ModuleType]) -> set[str]:
    """Names of the property tests and state machines in modules of tests."""
    return {
        name
        for module in modules
        for name, found in vars(module).items()
        if getattr(found, "__module__", None) == module.__name__
        and (hasattr(found, "hypothesis") or (inspect.isclass(found) and issubclass(found, RuleBasedStateMachine)))
    }
