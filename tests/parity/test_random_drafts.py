"""Random cases of tests/parity/random_drafts.py, in a process for each instruction set."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kernels.cpu import library
from tests.e2e.service import REPOSITORY
from tests.native import native_library, processor_flags, reason_to_skip

INSTRUCTION_SETS = ("avx512bf16", "avx512", "avx2", "avx2x16", "amx_emulated", "amx", "plain")


def check(isa: str, seed: int, cases: int) -> None:
    ability = library.abilities(native_library()).get(isa, library.Ability.ABSENT)
    if reason := reason_to_skip(ability, isa, processor_flags()):
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.parity.random_drafts", "--seed", str(seed), "--cases", str(cases)]
    run = subprocess.run(
        [*command, "--cpu-isa", isa], cwd=REPOSITORY, capture_output=True, text=True, timeout=1500, check=False
    )
    assert run.returncode == 0, run.stderr
    # The last line, after the engines' log lines.
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["cpu_isa"] == isa
    assert seen["workloads"] > 0
    assert seen["drafts"] > seen["right"]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_streams_equal_plain_decoding(isa: str) -> None:
    check(isa, 1, 1)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_many_cases(isa: str, seed: int) -> None:
    check(isa, seed, 5)
