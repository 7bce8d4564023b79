"""Kernels are interpreted in this process; compiled kernels run in processes of their own."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings


@pytest.fixture(scope="session", params=[True, False], ids=["invariant", "tuned"])
def settings(request: pytest.FixtureRequest) -> Settings:
    """Both kinds of tiles."""
    return Settings(TARGETS[INTERPRETER], batch_invariant=request.param)
