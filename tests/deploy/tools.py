"""The programs that check deploy/, from their own environment (`make setup` makes it)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venv-deploy" / "bin"
TIMEOUT_S = 180


def tool(name: str) -> Path:
    """Path of a program; skips the test where it could not be installed."""
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: make setup does so where its package can be had")
    return path


def run(command: Sequence[str | Path], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end in the root of the checkout."""
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
