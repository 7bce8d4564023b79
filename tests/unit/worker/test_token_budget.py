"""How many tokens a worker's step has when nobody says: by what will probably compute them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import token_budget
from common.token_budget import ON_CPU, ON_GPU
from worker import app

DEMO = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "checkpoint"


def budget(*arguments: str) -> int:
    given = app.worker.make_context("worker", ["--model", str(DEMO), *arguments]).params
    del given["log_level"]
    return app.worker_options(**given).config.max_num_batched_tokens


@pytest.mark.parametrize(
    ("arguments", "without_gpu", "with_gpu"),
    [
        ((), ON_CPU, ON_GPU),
        (("--kernels", "cpu"), ON_CPU, ON_CPU),
        (("--kernels", "torch"), ON_CPU, ON_CPU),
        (("--kernels", "triton"), ON_GPU, ON_GPU),
        (("--kernels", "aiter"), ON_GPU, ON_GPU),
        (("--simulate", "mi300x-llama-8b"), ON_GPU, ON_GPU),
        (("--max-num-seqs", "700"), 700, ON_GPU),
        (("--max-num-batched-tokens", "77"), 77, 77),
    ],
)
def test_the_budget_of_a_step(
    arguments: tuple[str, ...], without_gpu: int, with_gpu: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path / "kfd"
    monkeypatch.setattr(token_budget, "DEVICES", (device,))
    assert budget(*arguments) == without_gpu
    device.touch()
    assert budget(*arguments) == with_gpu
