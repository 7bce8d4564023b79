"""Random configurations of each architecture, see tests/parity/random_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import ARCHITECTURES
from tests.native import backend_or_skip
from tests.parity.random_models import DRAWS, NUMBERS, check

# One with each way of attention, of positions and of experts.
QUICK = ("gemma2", "olmo3", "phi3", "qwen2_moe", "deepseek_v2")
CASES = [(architecture, number) for number in range(NUMBERS) for architecture in ARCHITECTURES]


def test_every_architecture_has_random_configurations() -> None:
    assert set(DRAWS) == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("architecture", "number"),
    [pytest.param(*case, marks=() if case[1] == 0 and case[0] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_random_configuration(tmp_path: Path, architecture: str, number: int) -> None:
    backend_or_skip("cpu")
    check(architecture, number, tmp_path)
