"""Chooses the instruction set of the native kernels: the best one that this machine runs and that passed its
self-check.

The library runs one set at a time, for the whole process. An engine's bits depend on its set, so no other set can be
chosen while a back end lives: a second engine in the process would change the first one's answers. No set is checked
meanwhile either, because a check switches to the plain set. Threads choose one after the other.
"""

from __future__ import annotations

import functools
import threading
import weakref
from ctypes import CDLL
from typing import Protocol

import structlog

from kernels.cpu import self_check
from kernels.cpu.library import AVX2, PLAIN, Ability, LibraryUnavailableError, abilities, base_set, select

AUTO = "auto"
# Values of --cpu-isa; the library has further sets for tests.
CHOICES = (AUTO, "amx", "avx512bf16", "avx512", AVX2, PLAIN)
_log = structlog.get_logger(__name__)


class Holder(Protocol):
    """A back end that uses one instruction set during its whole life."""

    instruction_set: str


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
# Held from the check of the sets in use until the new back end is registered.
_choosing = threading.RLock()


def in_use() -> str | None:
    """Instruction set that the back ends of this process use; None if there are none."""
    return next((holder.instruction_set for holder in list(_holders)), None)


def hold(holder: Holder, library: CDLL, instruction_set: str = AUTO) -> None:
    """Selects the instruction set for a back end, and keeps it unchanged during the life of that back end.

    Raises:
        LibraryUnavailableError: as `take`.
    """
    with _choosing:
        holder.instruction_set = take(library, instruction_set)
        _holders.add(holder)


def take(library: CDLL, instruction_set: str = AUTO) -> str:
    """Selects an instruction set by name, or the best one for "", and returns its name.

    Beside a back end that lives, `auto` is that one's. Those better than AVX2 are checked first, once in a process. Of
    `auto` one that fails is logged and left out.

    Raises:
        LibraryUnavailableError: this machine cannot run the one that was asked for, its check failed, or a back end of
            another one lives in this process.
    """
    with _choosing:
        if (used := in_use()) is not None:
            if instruction_set not in (AUTO, used):
                raise LibraryUnavailableError(
                    f"this process computes by {used} kernels for another engine: {instruction_set} would change its "
                    f"answers; take {used}, or a process of its own"
                )
            return select(library, used)
        chosen = _best(library) if instruction_set == AUTO else instruction_set
        _require(library, chosen)
        return select(library, chosen)


def _require(library: CDLL, name: str) -> None:
    ability = abilities(library).get(name, Ability.ABSENT)
    if ability == Ability.DENIED:
        raise LibraryUnavailableError(f"this processor has {name}, but the operating system does not let it be used")
    if ability == Ability.ABSENT:
        raise LibraryUnavailableError(f"this machine cannot run {name} kernels")
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
