"""The native kernels on one instruction set after the other, and the pool with more threads than cores."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL

import pytest

from kernels.cpu import library
from tests.native import native_library, select_or_skip


@pytest.fixture(scope="session")
def native() -> CDLL:
    """The library, built by `make setup`; machines without a C++ compiler have none."""
    return native_library()


# Instruction sets whose kernels are all their own; those whose attention is by pairs of bfloat16 or by tiles of them,
# the rest another's.
WHOLE = ["plain", "avx2", "avx2x16", "avx512"]
PAIRED = ["avx512bf16", "amx"]
# Variants of attention, for tests that need one set of vectors.
SOME = ["avx2", *PAIRED]


def selected(native: CDLL, name: str) -> Iterator[CDLL]:
    """The library with an instruction set that this machine can run; afterwards the base set serves, by one thread."""
    select_or_skip(native, name)
    yield native
    native.fissile_set_threads(1)
    library.select(native)


def real_or_emulated(native: CDLL, name: str) -> str:
    """An instruction set of `PAIRED` where the processor has it; elsewhere its emulation, which is slow.

    `test_processor_instructions_equal_emulation` and `test_processor_pair_products_equal_emulation` compare their bits.
    """
    real = library.abilities(native).get(name) == library.Ability.USABLE
    return name if real or name not in PAIRED else f"{name}_emulated"


@pytest.fixture(params=WHOLE)
def each_isa(native: CDLL, request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """The library with one instruction set after the other."""
    yield from selected(native, request.param)


@pytest.fixture(params=[*WHOLE, *PAIRED])
def each_attention(native: CDLL, request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """The library with one way of attention after the other."""
    yield from selected(native, real_or_emulated(native, request.param))


@pytest.fixture(params=SOME)
def some_attention(native: CDLL, request: pytest.FixtureRequest) -> Iterator[CDLL]:
    """A library with one of the instruction sets in SOME."""
    yield from selected(native, real_or_emulated(native, request.param))


@pytest.fixture
def threads(native: CDLL) -> Iterator[CDLL]:
    """The library; whatever a test sets, one thread works afterwards."""
    yield native
    native.fissile_set_threads(1)
