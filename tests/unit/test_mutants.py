"""Each trap's test fails for the engine with the wrong rule, so it tests that rule and no other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.unit.mutants import MUTANTS, OBJECTIONS, Mutant
from tests.unit.worker.engine import test_traps
from tests.unit.worker.model import test_model_traps
from worker.engine.core import EngineDeadError
from worker.model.model_runner import ModelRunner

_ARGUMENTS = {"t08": ("prefill_first",), "t15": (3,), "t42": (0.3,)}
# The step raises in another thread, which ends the engine, perhaps after a delay.
_BREAKS = {"t42": EngineDeadError}
_ARGUMENTS_OF_MUTANTS = {"t42": (60.0,)}


def trap_tests() -> dict[str, Callable[..., None]]:
    modules = [*vars(test_traps).items(), *vars(test_model_traps).items()]
    return {name[5:8]: f for name, f in modules if name.startswith("test_t") and inspect.isfunction(f)}


def test_every_trap_has_a_mutant() -> None:
    assert {mutant.trap for mutant in MUTANTS} == set(trap_tests())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return test_model_traps.make_runner(make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.trap}-{m.name}")
def test_each_trap_test_fails_for_its_mutant(mutant: Mutant, model: ModelRunner) -> None:
    test = trap_tests()[mutant.trap]
    arguments: tuple[Any, ...] = (model,) if mutant.trap == "t45" else _ARGUMENTS.get(mutant.trap, ())
    test(*arguments)
    with mutant.applied(), pytest.raises(_BREAKS.get(mutant.trap, OBJECTIONS)):
        test(*_ARGUMENTS_OF_MUTANTS.get(mutant.trap, arguments))
    test(*arguments)
