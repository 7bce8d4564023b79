"""A whole model on interpreted Triton kernels: its tokens equal PyTorch's, eager and captured.

Float32, in which the interpreter rounds exactly. Captured steps are replayed over the same memory, as graphs do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.config import CompilationConfig, Config
from common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.covering import SAMPLED
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.executor import PipelinedExecutor
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

PROMPTS = [[7, 8, 9], list(range(20, 45)), [99] * 5]
DRAWN = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
MAX_LEN, NUM_TOKENS = 64, 4


@pytest.fixture(
    scope="module",
    params=["qwen3", "deepseek_v3", *(pytest.param(name, marks=SAMPLED) for name in ("gpt_oss", "glm4_moe"))],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=2)


def config(folder: Path, **options: Any) -> Config:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "num_kvcache_blocks": 12,
        "max_num_batched_tokens": 24,
        "enable_prefix_caching": True,
    }
    return Config(model=str(folder), **(settings | options))


class Counted:
    """A runner that counts its calls."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.steps = self.captured = 0

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        return self.launch(batch)()

    def launch(self, batch: ScheduledBatch) -> Callable[[], ScheduledBatchOutput]:
        self.steps += 1
        self.captured += self.runner.captures_graphs and batch.is_plain_decode
        return self.runner.launch(batch)


def answers(settings: Config, max_tokens: int, ahead: bool = False) -> tuple[list[list[int]], Counted]:
    """Tokens of all prompts, the first half of them sampled, and the runner."""
    runner = ModelRunner(settings, ModelConfig.from_folder(settings.model))
    runner.allocate_kv_cache(settings.num_kvcache_blocks)
    runner.capture_graphs()
    counted = Counted(runner)
    engine = LLMEngine(settings, runner=counted)
    if ahead:
        engine.core.executor = PipelinedExecutor(counted.launch, time.monotonic)
    found = generated(engine, max_tokens)
    engine.close()
    return found, counted


def generated(engine: LLMEngine, max_tokens: int) -> list[list[int]]:
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5, **each) for each in _kinds()]
    found = engine.generate(PROMPTS, params, request_ids=["a", "b", "c"])
    return [answer["token_ids"] for answer in found]


def _kinds() -> Iterable[dict[str, Any]]:
    return DRAWN, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 0.5}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    found, _ = answers(config(folder, kernels="torch"), NUM_TOKENS)
    assert len({tuple(tokens) for tokens in found}) == 3
    return found


@pytest.mark.slow
def test_tokens_of_captured_steps_ahead_equal_pytorch(folder: Path, expected: list[list[int]]) -> None:
    sizes = CompilationConfig(cudagraph_capture_sizes=(1, 3))
    found, counted = answers(
        config(folder, kernels="triton", compilation_config=sizes, deferred_output=True), NUM_TOKENS, ahead=True
    )
    assert found == expected
    assert counted.captured >= 2


@pytest.mark.long
def test_two_ranks_captured_and_launched_ahead(tmp_path: Path) -> None:
    """Real processes, which interpret the kernels too."""
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    expected, _ = answers(config(folder, kernels="torch"), NUM_TOKENS)
    sizes = CompilationConfig(cudagraph_capture_sizes=(1, 3))
    options = {"tensor_parallel_size": 2, "deferred_output": True, "compilation_config": sizes}
    with capture_logs() as logs:
        engine = LLMEngine(config(folder, kernels="triton", kv_cache_memory=1 << 24, **options))
    assert "capturing graphs" in [entry.get("stage") for entry in logs]
    try:
        assert generated(engine, NUM_TOKENS) == expected
    finally:
        engine.close()


@pytest.mark.long
def test_eager_tokens_equal_pytorch(folder: Path, expected: list[list[int]]) -> None:
    for invariant in (True, False):
        eager = config(folder, kernels="triton", enforce_eager=True, batch_invariant=invariant)
        found, counted = answers(eager, NUM_TOKENS)
        assert found == expected
        assert counted.captured == 0
