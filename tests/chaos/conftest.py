"""The figures that chaos tests measure are printed at the end of the run, so that `make chaos` is a report."""

from __future__ import annotations

from typing import Protocol

import pytest

from tests.chaos.scale import FULL

_FIGURES = pytest.StashKey[list[str]]()


class Report(Protocol):
    """Takes the figures of one test."""

    def __call__(self, code: str, /, **figures: float | str) -> None:
        """Figures by name, with the unit in the name."""


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
