"""The simulated engine's pool is the preset's, and it runs at the preset's speed on real time."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from common.config import Config
from common.errors import InvalidFieldError
from tests.e2e.simulated import simulated_model
from tests.unit.worker.session.support import FACTS
from worker.config.model_config import ModelConfig
from worker.engine.sequence import Sequence
from worker.engine_factory import BuiltEngine, EngineOptions, build_engine
from worker.progress import StartProgress
from worker.simulation.presets import cost_model


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig.from_folder(simulated_model(tmp_path_factory.mktemp("model")))


def build(model_config: ModelConfig, preset: str, **options: object) -> BuiltEngine:
    config = replace(Config(enable_prefix_caching=True), **options)  # type: ignore[arg-type]
    return build_engine(EngineOptions(config, model_config, simulate=cost_model(preset)), StartProgress())


@pytest.mark.parametrize(
    ("preset", "options", "blocks"),
    [
        ("instant", {}, 16_384),
        ("mi300x-llama-8b", {}, 1_195_831 // 16),  # (0.9 * 192e9 - 16.06e9) / 131072 tokens
        ("mi300x-llama-8b", {"gpu_memory_utilization": 0.5}, (96 * 10**9 - 16_059_990_016) // 131_072 // 16),
        ("mi300x-llama-8b", {"kv_cache_block_size": 64}, 1_195_831 // 64),
        ("mi300x-llama-8b", {"kv_cache_memory": 1 << 30}, (1 << 30) // 131_072 // 16),
        # The checkpoint's own: K and V of 2 layers, 2 heads of 16, float32; no more than 512 sequences of 2048 tokens.
        ("instant", {"kv_cache_memory": 1 << 20}, (1 << 20) // (2 * 2 * 2 * 16 * 4) // 16),
        ("instant", {"kv_cache_memory": 1 << 34}, 512 * 2048 // 16),
    ],
)
def test_simulated_pool_size_follows_preset(
    model_config: ModelConfig, preset: str, options: dict[str, float], blocks: int
) -> None:
    built = build(model_config, preset, **options)
    core, facts = built.core, FACTS.loaded(built.core.config, built.describe())
    assert facts.total_blocks == core.load().total_blocks == blocks
    assert facts.max_model_len == 2048


def test_no_room_beside_the_weights(model_config: ModelConfig) -> None:
    with pytest.raises(InvalidFieldError, match="no memory for a KV cache"):
        build(model_config, "mi300x-llama-70b", gpu_memory_utilization=0.7)


def test_steps_take_configured_time(model_config: ModelConfig) -> None:
    core = build(model_config, "fixed:20ms").core
    core.add_group([Sequence([1, 2, 3], 16)])
    start = time.perf_counter()
    for _ in range(5):
        core.step()
    assert time.perf_counter() - start >= 0.1
