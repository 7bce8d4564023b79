"""How a worker fills its steps when nobody says: by what will probably compute them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import step_defaults
from common.config import Config
from common.step_defaults import BUDGET_ON_CPU, BUDGET_ON_GPU
from worker import app

DEMO = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "checkpoint"


def config(*arguments: str) -> Config:
    given = app.worker.make_context("worker", ["--model", str(DEMO), *arguments]).params
    del given["log_level"]
    return app.worker_options(**given).config


@pytest.mark.parametrize(
    ("arguments", "without_gpu", "with_gpu"),
    [
        ((), BUDGET_ON_CPU, BUDGET_ON_GPU),
        (("--kernels", "cpu"), BUDGET_ON_CPU, BUDGET_ON_CPU),
        (("--kernels", "torch"), BUDGET_ON_CPU, BUDGET_ON_CPU),
        (("--kernels", "triton"), BUDGET_ON_GPU, BUDGET_ON_GPU),
        (("--kernels", "aiter"), BUDGET_ON_GPU, BUDGET_ON_GPU),
        (("--simulate", "mi300x-llama-8b"), BUDGET_ON_GPU, BUDGET_ON_GPU),
        (("--max-num-seqs", "700"), 700, BUDGET_ON_GPU),
        (("--max-num-batched-tokens", "77"), 77, 77),
    ],
)
def test_the_budget_of_a_step(
    arguments: tuple[str, ...], without_gpu: int, with_gpu: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path / "kfd"
    monkeypatch.setattr(step_defaults, "DEVICES", (device,))
    assert config(*arguments).max_num_batched_tokens == without_gpu
    device.touch()
    assert config(*arguments).max_num_batched_tokens == with_gpu


@pytest.mark.parametrize(
    ("arguments", "without_gpu", "with_gpu"),
    [
        ((), "mixed", "prefill_first"),
        (("--kernels", "cpu"), "mixed", "mixed"),
        (("--kernels", "triton"), "prefill_first", "prefill_first"),
        (("--simulate", "mi300x-llama-8b"), "prefill_first", "prefill_first"),
        (("--scheduling-policy", "prefill_first"), "prefill_first", "prefill_first"),
        (("--scheduling-policy", "mixed", "--kernels", "triton"), "mixed", "mixed"),
    ],
)
def test_the_policy(
    arguments: tuple[str, ...], without_gpu: str, with_gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path / "nvidiactl"
    monkeypatch.setattr(step_defaults, "DEVICES", (device,))
    assert config(*arguments).scheduling_policy == without_gpu
    device.touch()
    assert config(*arguments).scheduling_policy == with_gpu
