"""Every kernel, compiled through the launchers for AMD's and NVIDIA's targets, within what their programs may use."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from typing import Any, Final

import pytest

from kernels.triton_backend.target import TARGETS
from tests.covering import SAMPLED
from tests.kernels import cases

AREAS = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
MARKS: Final = {
    **dict.fromkeys(("experts", "latent"), SAMPLED),
    **dict.fromkeys(("linear", "attention", "sampling"), (pytest.mark.slow,)),
}
# Those whose compilation takes longest are left to fresh runs; so are gfx950, whose programs come from the code that
# makes gfx942's, and sm_90.
SOME = [pytest.param(area, marks=MARKS.get(area, ())) for area in AREAS]
GPUS = ["gfx942", *(pytest.param(target, marks=SAMPLED) for target in ("gfx950", "sm_90"))]

# A test compiles all kernels of its area if Triton's cache is empty.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("area", SOME)
def test_kernels_compile(target: str, area: str) -> None:
    """Compiles with the batch-invariant tiles."""
    check(target, compiled_for(target, "invariant", area), area)


@pytest.mark.slow
@pytest.mark.parametrize("area", ["linear", "attention"])
def test_kernels_compile_where_tiles_agree(area: str) -> None:
    """Compiles with the tiles by rows that an H200 uses."""
    check("sm_90", compiled_for("sm_90", "agreeing", area), area)


@pytest.mark.long
@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("area", AREAS)
def test_tuned_kernels_compile(target: str, area: str) -> None:
    """Compiles with the fastest tiles."""
    check(target, compiled_for(target, "tuned", area), area)


def compiled_for(target: str, tiles: str, area: str) -> list[dict[str, Any]]:
    """The kernels of an area, compiled for one target in a separate process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_only", target, tiles, area]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(target: str, kernels: list[dict[str, Any]], area: str) -> None:
    """Kernels fit into shared memory, spill no registers beyond the case's limit, and use matrix instructions."""
    compiled = [kernel for kernel in kernels if kernel["area"] == area]
    assert compiled == kernels
    wanted = importlib.import_module(f"tests.kernels.cases.{area}").CASES
    assert {kernel["case"] for kernel in compiled} == set(wanted)
    for kernel in compiled:
        case = wanted[kernel["case"]]
        assert kernel["shared"] <= TARGETS[target].shared_bytes, kernel
        assert kernel["spills"] <= dict(case.spills).get(kernel["kernel"], 0), kernel
        assert kernel["uses_matrix"] or kernel["kernel"] not in case.matrix, kernel
