"""The back ends that run on this machine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import instruction_sets, library
from kernels.interface import KernelBackend
from kernels.select import CPU_BACKENDS
from tests.native import backend_or_skip


@pytest.fixture(scope="session", params=list(CPU_BACKENDS))
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    """Each back end; skips those that this machine cannot run."""
    return backend_or_skip(request.param)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Random numbers of a test do not depend on the tests before it."""
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def _engines_keep_their_instruction_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test of kernels takes any set; an engine that lives in this process computes by its own afterwards."""
    used = instruction_sets.in_use()
    native = None if used is None else library.load()
    monkeypatch.setattr(instruction_sets, "_holders", weakref.WeakSet())
    yield
    if native is not None:
        library.select(native, used)
