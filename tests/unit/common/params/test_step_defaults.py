"""Default step sizes of a worker, by its probable device."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config
from common.params import step_defaults
from common.params.step_defaults import BUDGET_ON_CPU, BUDGET_ON_GPU
from worker.cli import worker
from worker.cli.worker_options import worker_options

DEMO = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "checkpoint"


def config(*arguments: str) -> Config:
    given = worker.worker.make_context("worker", ["--model", str(DEMO), *arguments]).params
    del given["log_level"]
    return worker_options(**given).config


BESIDE_DECODES = BUDGET_ON_CPU + Config.max_num_seqs
ON_CPU, ON_GPU = (BESIDE_DECODES, "mixed"), (BUDGET_ON_GPU, "prefill_first")


@pytest.mark.parametrize(
    ("arguments", "without_gpu", "with_gpu"),
    [
        ((), ON_CPU, ON_GPU),
        (("--kernels", "cpu"), ON_CPU, ON_CPU),
        (("--kernels", "torch"), ON_CPU, ON_CPU),
        (("--kernels", "triton"), ON_GPU, ON_GPU),
        (("--kernels", "aiter"), ON_GPU, ON_GPU),
        (("--simulate", "mi300x-llama-8b"), ON_GPU, ON_GPU),
        (("--max-num-seqs", "700"), (BUDGET_ON_CPU + 700, "mixed"), ON_GPU),
        (("--max-num-batched-tokens", "77"), (77, "mixed"), (77, "prefill_first")),
        (
            ("--scheduling-policy", "prefill_first"),
            (BESIDE_DECODES, "prefill_first"),
            (BUDGET_ON_GPU, "prefill_first"),
        ),
        (
            ("--scheduling-policy", "mixed", "--kernels", "triton"),
            (BUDGET_ON_GPU, "mixed"),
            (BUDGET_ON_GPU, "mixed"),
        ),
    ],
)
@pytest.mark.parametrize("device_name", ["kfd", "nvidiactl"])
def test_budget_and_policy(
    arguments: tuple[str, ...],
    without_gpu: tuple[int, str],
    with_gpu: tuple[int, str],
    device_name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    device = tmp_path / device_name
    monkeypatch.setattr(step_defaults, "DEVICES", tuple(tmp_path / path.name for path in step_defaults.DEVICES))
    for expected in (without_gpu, with_gpu):
        taken = config(*arguments)
        assert (taken.max_num_batched_tokens, taken.scheduling_policy) == expected
        device.touch()
