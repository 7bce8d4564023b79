"""Every kernel, compiled through the launchers for AMD's and NVIDIA's targets, within what their programs may use."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

from kernels.triton_backend.target import TARGETS
from tests.kernels import cases

AREAS = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
Compiled = tuple[str, list[dict[str, Any]]]


# The first test of a target waits for all its kernels, compiled anew where Triton's cache is empty.
pytestmark = pytest.mark.timeout(900)
# Programs for gfx950 come from the code that makes gfx942's; each target takes 20 s of the processor.
GPUS = ["gfx942", *(pytest.param(target, marks=pytest.mark.long) for target in ("gfx950", "sm_90"))]


@pytest.fixture(scope="module", params=GPUS)
def invariant(request: pytest.FixtureRequest) -> Compiled:
    """Every kernel for one target, with the tiles that keep bits."""
    return compiled_for(request.param, "invariant")


@pytest.fixture(scope="module", params=["gfx942", "gfx950", "sm_90"])
def tuned(request: pytest.FixtureRequest) -> Compiled:
    """Every kernel for one target, with the tiles that are fastest."""
    return compiled_for(request.param, "tuned")


@pytest.mark.parametrize("area", AREAS)
def test_kernels_compile(invariant: Compiled, area: str) -> None:
    check(*invariant, area)


@pytest.mark.long
@pytest.mark.parametrize("area", AREAS)
def test_tuned_kernels_compile(tuned: Compiled, area: str) -> None:
    check(*tuned, area)


def compiled_for(target: str, tiles: str) -> Compiled:
    """The target, and its kernels of all areas; in one process, because its imports take seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_only", target, tiles, *AREAS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target, [json.loads(line) for line in done.stdout.splitlines()]


def check(target: str, kernels: list[dict[str, Any]], area: str) -> None:
    """They fit into shared memory, spill no registers beyond what the case allows, and use matrix instructions."""
    compiled = [kernel for kernel in kernels if kernel["area"] == area]
    wanted = importlib.import_module(f"tests.kernels.cases.{area}").CASES
    assert {kernel["case"] for kernel in compiled} == set(wanted)
    for kernel in compiled:
        case = wanted[kernel["case"]]
        assert kernel["shared"] <= TARGETS[target].shared_bytes, kernel
        assert kernel["spills"] <= dict(case.spills).get(kernel["kernel"], 0), kernel
        assert kernel["uses_matrix"] or kernel["kernel"] not in case.matrix, kernel
