"""Every architecture on two ranks, tensor- and expert-parallel, equals itself on one; ranks are threads here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from common.config import Config
from tests.checkpoints import make_checkpoint
from tests.quantizers import Scheme, Stored, write_safetensors
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner
from worker.model.sharding import Alone, Shard

BLOCK_SIZE = 16
MXFP4 = Scheme({}, (1, 32), "fp4", "U8", "_blocks", "_scales")
PROMPT = list(range(7, 77))
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": "qwen2"},
    "mistral": {"architecture": "mistral", "sliding_window": 30},
    "phi3": {"architecture": "phi3", "tie_word_embeddings": False},
    "granite": {"architecture": "granite", "attention_bias": True},
    "smollm3": {"architecture": "smollm3", "mlp_bias": True},
    "qwen3-one-kv-head": {"architecture": "qwen3", "num_key_value_heads": 1, "tie_word_embeddings": False},
    "gemma2": {"architecture": "gemma2", "attention_bias": True},
    "gemma3-one-kv-head": {"architecture": "gemma3_text", "num_key_value_heads": 1},
    "olmo2": {"architecture": "olmo2", "attention_bias": True},
    "olmo3-one-kv-head": {"architecture": "olmo3", "num_key_value_heads": 1},
    "qwen2-moe": {"architecture": "qwen2_moe"},
    "qwen3-moe": {"architecture": "qwen3_moe", "decoder_sparse_step": 2},
    "mixtral": {"architecture": "mixtral", "sliding_window": 30},
    "glm4-moe": {"architecture": "glm4_moe", "attention_bias": True},
    "gpt-oss": {"architecture": "gpt_oss"},
    "deepseek-v2": {"architecture": "deepseek_v2"},
    "deepseek-v3": {"architecture": "deepseek_v3"},
    "deepseek-v32": {"architecture": "deepseek_v32"},
}


@dataclass
class RankExchange:
    """What the ranks of one group hand each other."""

    size: int
    given: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=60)


@dataclass
class ThreadCollectives(Alone):
    """Collectives of ranks that are threads."""

    exchange: RankExchange
    rank: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x), dim=-1)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        # What one rank does with its own afterwards is no other's business.
        self.exchange.given[self.rank] = x.clone()
        self.exchange.barrier.wait()
        parts = [self.exchange.given[rank] for rank in range(self.exchange.size)]
        self.exchange.barrier.wait()
        return parts


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), tokenizer=False, **CHECKPOINTS[request.param])


def logits(folder: Path, shard: Shard) -> torch.Tensor:
    """float32 [2, V], of a chunk of the prompt and of the rest."""
    config = Config(model=str(folder), dtype="float32", kv_cache_block_size=BLOCK_SIZE, max_model_len=128)
    runner = ModelRunner(config, ModelConfig.from_folder(folder), shard=shard)
    runner.allocate_kv_cache(8)
    rows = []
    for start, end in ((0, 40), (40, len(PROMPT))):
        seq = Sequence(PROMPT[:end], BLOCK_SIZE)
        seq.block_table = list(range(8))
        seq.num_computed_tokens = start
        batch = ScheduledBatch({seq.id: seq}, [end - start], end - start)
        rows.append(runner.run_model(runner.prepare_model(batch))[0])
    return torch.stack(rows)


def on_ranks(folder: Path, size: int, expert_parallel: bool) -> list[torch.Tensor]:
    """What each rank computes."""
    exchange = RankExchange(size)
    shards = [Shard(rank, size, ThreadCollectives(exchange, rank), expert_parallel) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda shard: logits(folder, shard), shards))


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor-parallel", "expert-parallel"])
def test_two_ranks_equal_one(folder: Path, expert_parallel: bool) -> None:
    whole = logits(folder, Shard())
    first, second = on_ranks(folder, 2, expert_parallel)
    assert torch.equal(first, second), "the ranks disagree"
    error = (first - whole).abs().max() / whole.abs().max()
    assert error < 1e-4, f"relative error {error:.1e}"


def test_only_rank_0_fetches_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have the tokens on their devices."""
    folder = make_checkpoint(tmp_path, "qwen3", tokenizer=False, num_hidden_layers=1)
    config = Config(model=str(folder), dtype="float32", kernels="torch", kv_cache_block_size=BLOCK_SIZE)
    fetched: list[int] = []

    def run(shard: Shard) -> dict[int, tuple[int, ...]]:
        runner = ModelRunner(config, ModelConfig.from_folder(folder), shard=shard)
        runner.allocate_kv_cache(8)
        fetch = runner.kernels.sampling.fetch

        def counted(ids: torch.Tensor) -> Callable[[], list[int]]:
            fetched.append(shard.rank)
            return fetch(ids)

        monkeypatch.setattr(runner.kernels.sampling, "fetch", counted)
        seq = Sequence(PROMPT, BLOCK_SIZE)
        seq.block_table = list(range(8))
        return runner.forward(ScheduledBatch({0: seq}, [len(PROMPT)], len(PROMPT))).token_ids

    exchange = RankExchange(2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, [Shard(rank, 2, ThreadCollectives(exchange, rank)) for rank in range(2)])
    assert list(first.values()) == list(second.values())
    assert fetched == [0]


def in_mxfp4(folder: Path, worth_folder: Path) -> None:
    """Quantizes a float32 gpt-oss in place, in the hub's layout; the other folder gets the dequantized weights."""
    stored: dict[str, Stored] = {}
    worths = load_file(folder / "model.safetensors")
    for name, tensor in list(worths.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = ("F32", tensor)
            continue
        # [E, inputs, outputs] in float, [E, outputs, blocks of 32 inputs, 16 bytes] on the hub.
        experts = [MXFP4.quantize("", np.ascontiguousarray(expert.T)) for expert in tensor]
        blocks, scales = (np.stack([made[suffix][1] for made, _ in experts]) for suffix in ("_blocks", "_scales"))
        stored[f"{name}_blocks"] = ("U8", blocks.reshape(*scales.shape, 16))
        stored[f"{name}_scales"] = ("U8", scales)
        worths[name] = np.ascontiguousarray(np.stack([worth for _, worth in experts]).transpose(0, 2, 1))
    shutil.copytree(folder, worth_folder)
    save_file(worths, worth_folder / "model.safetensors")
    write_safetensors(folder / "model.safetensors", stored)
    config = json.loads((folder / "config.json").read_text())
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("size", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_gpt_oss_in_mxfp4_equals_dequantized(tmp_path: Path, size: int, expert_parallel: bool) -> None:
    folder = make_checkpoint(tmp_path / "quantized", "gpt_oss", tokenizer=False, num_hidden_layers=2)
    in_mxfp4(folder, tmp_path / "worth")
    expected = on_ranks(tmp_path / "worth", size, expert_parallel)
    for actual, one in zip(on_ranks(folder, size, expert_parallel), expected, strict=True):
        assert torch.equal(actual, one)


def test_more_ranks_than_experts_and_than_kv_heads(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path, "mixtral", tokenizer=False, num_local_experts=3, num_key_value_heads=2, num_hidden_layers=1
    )
    whole = logits(folder, Shard())
    for part in on_ranks(folder, 4, expert_parallel=True):
        assert (part - whole).abs().max() / whole.abs().max() < 1e-4


def test_indivisible_experts_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mixtral", tokenizer=False, intermediate_size=33, num_hidden_layers=1)
    with pytest.raises(ModelError, match="the experts' intermediate size 33 is not a multiple of tensor_parallel_size"):
        logits(folder, Shard(0, 2))


def test_expert_shares_are_contiguous_and_cover_all() -> None:
    for size, experts in ((1, 5), (2, 5), (3, 8), (4, 3), (8, 128)):
        parts = [Shard(rank, size, expert_parallel=True).expert_part(experts) for rank in range(size)]
        assert [i for part in parts for i in range(experts)[part]] == list(range(experts))
        lengths = [part.stop - part.start for part in parts]
        assert max(lengths) - min(lengths) <= 1
