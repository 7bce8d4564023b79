"""The native kernels on one instruction set after the other, and the pool with more threads than cores."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL

import pytest

from kernels.cpu import library


@pytest.fixture(scope="session")
def native() -> CDLL:
    """The library, built by `make setup`; machines without a C++ compiler have none."""
    try:
        return library.load()
    except library.LibraryUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["plain", "avx2", "avx2x16", "avx512"])
def each_isa(native: CDLL, request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """The library with one instruction set that this machine can run."""
    try:
        library.select(native, request.param)
    except library.LibraryUnavailableError as error:
        pytest.skip(str(error))
    yield native
    library.select(native)


@pytest.fixture
def threads(native: CDLL) -> Iterator[CDLL]:
    """The library; whatever a test sets, one thread works afterwards."""
    yield native
    native.fissile_set_threads(1)
