"""Settings of every test run."""

import gc
import logging
import os
import random
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests import fresh
from tests.clients import add_properties
from tests.covering import mark_by_value
from tests.examples import ExampleTiers
from tests.order import longest_first
from tests.skips import Skips, is_strict

# Imports and collection make objects that stay: looking for garbage among them takes a third of their processor time.
gc.disable()
# As in the worker; here it must be set before the first test module imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Workers of tests leave nothing in the user's cache folder.
os.environ["FISSILE_WEIGHTS_CACHE"] = "off"

# A busy machine is no fault of what is tested. The same examples each time: a change is not told of a fault that is not
# its own; those that change come with `--fresh`.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fissile", _PATIENT, derandomize=True)
settings.register_profile("fresh", _PATIENT, database=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of fresh runs."""
    fresh.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Counts skips by reason where reports come together: not in the processes that pytest-xdist starts."""
    settings.load_profile("fissile" if config.option.fresh is None else "fresh")
    if config.option.fresh is None:
        # Hypothesis tries numbers of the modules that happen to be loaded: others in each process of pytest-xdist, and
        # others again with each number that anybody writes anywhere.
        no_constants = Constants()
        providers._get_local_constants = lambda: no_constants
        config.pluginmanager.register(ExampleTiers(config.option.markexpr), "example-tiers")
    else:
        config.pluginmanager.register(fresh.Limit(config.option.fresh_seconds), "fresh-limit")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(is_strict()), "skips-by-reason")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with the files that take long; a fresh run has tests and an order of its own."""
    mark_by_value(items)
    add_properties(items)
    if config.option.fresh is None:
        longest_first(items)
        return
    chosen = fresh.choose(items, config.option.fresh, config.option.fresh_cases)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Starts the garbage collector, without what imports and collection have made: it stays."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def logging_of_one_test() -> Iterator[None]:
    """Ends the logging that a test has set up, by a command for example: later tests collect log lines."""
    was_set_up, handlers, level = structlog.is_configured(), logging.root.handlers[:], logging.root.level
    yield
    if structlog.is_configured() and not was_set_up:
        structlog.reset_defaults()
        logging.captureWarnings(False)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@pytest.fixture
def stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an engine that starts look at its own objects, not once more at those of thousands of tests."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """Seed of a fresh run, and 0 in others, for one test: each has its own numbers."""
    return random.Random(f"{request.config.option.fresh or 0} {request.node.nodeid}").getrandbits(64)
