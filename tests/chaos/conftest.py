"""A fleet for each module of chaos tests, and their figures at the end of the run, so that `make chaos` is a report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.chaos.scale import FULL
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import OPTIONS, simulated_model, wait_workers

_FIGURES = pytest.StashKey[list[str]]()


class Report(Protocol):
    """Takes the figures of one test."""

    def __call__(self, code: str, /, **figures: float | str) -> None:
        """Figures by name, with the unit in the name."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Three simulated workers and a router that gives their sequences up after a second."""
    folder = tmp_path_factory.mktemp("fleet")
    options = ["--lease", "1s", "--worker-wait", "10s"]
    with running_service(folder, model, workers=3, worker_options=OPTIONS, router_options=options) as service:
        wait_workers(service, 3)
        yield service


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    lines = pytestconfig.stash.setdefault(_FIGURES, [])

    def add(code: str, /, **figures: float | str) -> None:
        lines.append(f"{code:4} " + "  ".join(f"{name}={_text(value)}" for name, value in figures.items()))

    return add


def _text(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_FIGURES, [])
    if lines:
        terminalreporter.section(f"chaos figures, {'those of the fault list' if FULL else 'scaled down'}")
        for line in sorted(lines):
            terminalreporter.write_line(line)
