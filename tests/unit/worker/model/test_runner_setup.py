"""The KV pool of a worker: its memory is touched at the start if enough is free."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.config import Config
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig, ModelError
from worker.model import runner_setup
from worker.model.model_runner import ModelRunner

BLOCKS = 40


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    folder = make_checkpoint(tmp_path, num_hidden_layers=2)
    return ModelRunner(Config(model=str(folder)), ModelConfig.from_folder(folder))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give memory as it is touched")
@pytest.mark.parametrize(("times_the_pool", "is_taken"), [(2.0, True), (1.99, False)])
def test_pool_memory_is_touched_given_twice_its_size(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, times_the_pool: float, is_taken: bool
) -> None:
    pool = BLOCKS * runner.kv_block_bytes
    monkeypatch.setattr(runner_setup, "available_memory", lambda _mapped: int(times_the_pool * pool))
    told: list[tuple[int, int]] = []
    runner_setup.allocate(runner, BLOCKS)
    runner_setup.take_kv_memory(runner, BLOCKS, lambda done, total: told.append((done, total)))
    # One more block holds the zeros for positions past a sequence's end.
    whole = pool + runner.kv_block_bytes
    assert told == [(whole, whole)] * is_taken
    runner_setup.warm_up(runner)


def test_oversized_pool_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ModelError, match="lower --kv-cache-memory"):
        runner_setup.allocate(runner, 1 << 44)
