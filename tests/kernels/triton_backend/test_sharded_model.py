"""A mixture of experts on two ranks, on interpreted Triton kernels: every network is summed over the ranks once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import pytest
import torch

from common.config import Config
from tests.checkpoints import make_checkpoint
from tests.kernels.dense_layers import relative
from tests.kernels.triton_backend.test_quantized_checkpoints import logits
from tests.unit.worker.model.test_sharded_models import RankExchange, ThreadCollectives
from worker.config.model_config import ModelConfig
from worker.model.model_runner import ModelRunner
from worker.model.sharding import Shard


@dataclass
class TakingTurns(ThreadCollectives):
    """One of the ranks, which are threads, computes at a time: the interpreter of kernels serves one thread."""

    turn: Lock

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.turn.release()
        try:
            return super()._all(x)
        finally:
            self.turn.acquire()


def on_ranks(folder: Path, size: int, expert_parallel: bool) -> list[torch.Tensor]:
    """What each rank computes."""
    exchange, turn = RankExchange(size), Lock()

    def computed(rank: int) -> torch.Tensor:
        with turn:
            return on_rank(folder, Shard(rank, size, TakingTurns(exchange, rank, turn), expert_parallel))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(computed, range(size)))


def on_rank(folder: Path, shard: Shard, kernels: str = "triton") -> torch.Tensor:
    """Logits float32 [2, V] of two prompts."""
    config = Config(model=str(folder), kernels=kernels, dtype="float32", max_model_len=64)
    runner = ModelRunner(config, ModelConfig.from_folder(folder), shard=shard)
    runner.allocate_kv_cache(4)
    return logits(runner)


@pytest.mark.parametrize("expert_parallel", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_ranks_equal_one(expert_parallel: bool, tmp_path: Path) -> None:
    """A dense layer, then one with experts."""
    folder = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, num_hidden_layers=2, decoder_sparse_step=2)
    whole = on_rank(folder, Shard(), "torch")
    for found in on_ranks(folder, 2, expert_parallel):
        assert relative(found, whole) < 1e-5
