"""Lines of figures are folded to the terminal's width."""

from __future__ import annotations

import io

import pytest

from common.cli.core.console import fitted

FIGURES = (
    "TTFT 8.1 ms, 0.11 ms per token, 256 tokens from 13 (0 cached), length, request 9fbcd345bd7541b6a375f179ace8b88c"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_figures_on_a_terminal_fit_its_width(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stderr", Terminal())
    lines = fitted(FIGURES).splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert " ".join(line.strip() for line in lines) == FIGURES


def test_figures_are_one_line_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert fitted(FIGURES) == FIGURES
