"""Every trap's test fails against the engine with the seed's rule, so that it tests that rule and not another."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from tests.unit.mutants import MUTANTS, Mutant
from tests.unit.worker import test_traps

# The mutant of "the batch flags deferred output by a key" would be another class.
_WITHOUT_MUTANT = {"t29"}
_ARGUMENTS = {"t08": ("prefill_first",), "t15": (3,)}


def trap_tests() -> dict[str, Callable[..., None]]:
    return {n[5:8]: f for n, f in inspect.getmembers(test_traps, inspect.isfunction) if n.startswith("test_t")}


def test_every_trap_has_a_mutant() -> None:
    assert {mutant.trap for mutant in MUTANTS} | _WITHOUT_MUTANT == set(trap_tests())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.trap}-{m.name}")
def test_it_fails_against_the_seeds_rule(mutant: Mutant) -> None:
    test = trap_tests()[mutant.trap]
    arguments = _ARGUMENTS.get(mutant.trap, ())
    test(*arguments)
    with mutant.applied(), pytest.raises(BaseException):  # noqa: B017, PT011 - an assertion, or what the mutant breaks
        test(*arguments)
    test(*arguments)
