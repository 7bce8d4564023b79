"""Steps launched after drafts in flight, on interpreted Triton kernels: the tokens of PyTorch's plain decodes.

Tokens stay on the device, and rows are moved there: in eager steps, and in captured steps, which are replayed over the
same memory.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from common.config import CompilationConfig, Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from kernels.triton_backend import plan
from tests.checkpoints import make_checkpoint
from tests.covering import SAMPLED
from tests.parity.late_steps import MOST_DRAFTS, Ahead, answers
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.config.model_config import ModelConfig
from worker.model.model_runner import ModelRunner

PARAMS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 30}]
NUM_TOKENS, NUM_BLOCKS, NUM_STEPS = 24, 12, 6


@pytest.fixture(
    scope="module", params=["qwen3", *(pytest.param(name, marks=SAMPLED) for name in ("deepseek_v3", "gpt_oss"))]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=1)


def runner_of(folder: Path, kernels: str, **options: Any) -> ModelRunner:
    sizes = CompilationConfig(cudagraph_capture_sizes=() if options or kernels == "torch" else (1, 3))
    spec = SpeculativeConfig(MOST_DRAFTS, NGRAM)
    given: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "speculative_config": spec} | options
    config = Config(model=str(folder), kernels=kernels, compilation_config=sizes, **given)
    runner = ModelRunner(config, ModelConfig.from_folder(str(folder)))
    runner.allocate_kv_cache(NUM_BLOCKS)
    runner.capture_graphs()
    return runner


def check(folder: Path, seed: int, **options: Any) -> int:
    """Checks a few steps on tokens of PyTorch's kernels. Returns the number of drafts rejected in flight."""
    found = answers(runner_of(folder, "torch"), PARAMS, NUM_TOKENS, seed)
    runner = runner_of(folder, "triton", **options)
    assert runner.captures_graphs != bool(options)
    runner.sampler.waits_for_tokens = True
    ahead = Ahead(runner, found, random.Random(seed), on_host=False, only_decodes=not options)
    seen = ahead.run(NUM_STEPS)
    assert seen["late drafts"] > 0
    return seen["rejected in flight"]


@pytest.mark.slow
def test_captured(folder: Path) -> None:
    assert check(folder, 0) > 0


@pytest.mark.slow
def test_kernel_by_kernel_beside_prompts(folder: Path) -> None:
    assert check(folder, 1, enforce_eager=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_missing_row_move_is_detected(folder: Path) -> None:
    mutant = Mutant("keys stay", plan, "_move", "plan.seq_lens[: len(num_rejected)].sub_(num_rejected)", "pass")
    with mutant.applied(), pytest.raises(OBJECTIONS):
        check(folder, 0)
