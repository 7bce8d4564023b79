"""Settings of every test run."""

import os

import pytest
from hypothesis import settings

from tests.order import longest_first
from tests.skips import Skips, is_strict

# As in the worker; here it must be set before the first test module imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Workers of tests leave nothing in the user's cache folder.
os.environ["FISSILE_WEIGHTS_CACHE"] = "off"

# A busy machine is no fault of what is tested.
settings.register_profile("fissile", deadline=None)
settings.load_profile("fissile")


def pytest_configure(config: pytest.Config) -> None:
    """Counts skips by reason where reports come together: not in the processes that pytest-xdist starts."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(is_strict()), "skips-by-reason")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that take long."""
    longest_first(items)
