"""Every kernel, compiled through the launchers for AMD's and NVIDIA's targets, within what their programs may use."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys

import pytest

from kernels.triton_backend.target import TARGETS
from tests.kernels import cases

AREAS = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_kernels_compile(target: str, area: str) -> None:
    check(target, area)


@pytest.mark.long
@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_tuned_kernels_compile(target: str, area: str) -> None:
    check(target, area, "tuned")


def check(target: str, area: str, *options: str) -> None:
    """They fit into shared memory, spill no registers beyond what the case allows, and use matrix instructions."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_only", target, area, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = importlib.import_module(f"tests.kernels.cases.{area}").CASES
    assert {kernel["case"] for kernel in compiled} == set(wanted)
    for kernel in compiled:
        case = wanted[kernel["case"]]
        assert kernel["shared"] <= TARGETS[target].shared_bytes, kernel
        assert kernel["spills"] <= dict(case.spills).get(kernel["kernel"], 0), kernel
        assert kernel["uses_matrix"] or kernel["kernel"] not in case.matrix, kernel
