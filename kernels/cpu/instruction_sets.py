"""Chooses the instruction set that serves: the best one that this machine can run and that passed its check."""

from __future__ import annotations

import functools
from ctypes import CDLL

import structlog

from kernels.cpu import self_check
from kernels.cpu.library import AVX2, PLAIN, Ability, LibraryUnavailableError, abilities, base_set, select

AUTO = "auto"
# Values of --cpu-isa; the library has further sets for tests.
CHOICES = (AUTO, "amx", "avx512bf16", "avx512", AVX2, PLAIN)
_log = structlog.get_logger(__name__)


def take(library: CDLL, instruction_set: str = AUTO) -> str:
    """Selects the one called `instruction_set`, or the best one; which it is.

    Those better than AVX2 are checked first, once in a process. Of `auto` one that fails is logged and left out.

    Raises:
        LibraryUnavailableError: this machine can not run the one that was asked for, or its check failed.
    """
    chosen = _best(library) if instruction_set == AUTO else instruction_set
    _require(library, chosen)
    return select(library, chosen)


def _require(library: CDLL, name: str) -> None:
    ability = abilities(library).get(name, Ability.ABSENT)
    if ability == Ability.DENIED:
        raise LibraryUnavailableError(f"this processor has {name}, but the operating system does not let it be used")
    if ability == Ability.ABSENT:
        raise LibraryUnavailableError(f"this machine can not run {name} kernels")
    if (fault := _fault(library, name)) is not None:
        raise LibraryUnavailableError(f"the {name} kernels failed their check: {fault}")


@functools.cache
def _best(library: CDLL) -> str:
    for name, ability in abilities(library).items():
        if ability in (Ability.ABSENT, Ability.TESTED):
            continue
        try:
            _require(library, name)
        except LibraryUnavailableError as error:
            _log.warning("a better instruction set is not used", reason=str(error))
        else:
            return name
    return base_set(library)


@functools.cache
def _fault(library: CDLL, name: str) -> str | None:
    return None if name in (AVX2, PLAIN) else self_check.fault(library, name)
