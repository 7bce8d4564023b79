"""Vectors are the pooled hidden states of `transformers`, and a text has the same one to the bit whatever else runs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import MIXED, PREFILL_FIRST, Config
from common.errors import InvalidFieldError
from common.params.pooling import EMBED_PARAMS, LAST, MEAN, Pooling
from common.params.sampling_params import SamplingParams
from kernels.select import CPU_BACKENDS
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.covering import slow_but
from tests.native import backend_or_skip
from tests.parity.test_ranks import BLOCK_SIZE, Ranks
from worker.engine.batch import ScheduledBatch
from worker.engine.executor import PipelinedExecutor
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

pytestmark = pytest.mark.each_value

POOLINGS: tuple[Pooling, ...] = (LAST, MEAN)
MODEL_LEN = 96


def prompts(counts: tuple[int, ...] = (70, 3, 41, 66)) -> list[list[int]]:
    """The last one begins as the first does."""
    rnd = random.Random(3)
    made = [[rnd.randrange(5, 250) for _ in range(count)] for count in counts]
    return [*made[:-1], made[0][:50] + made[-1][50:]]


def engine(folder: Path, kernels: str = "torch", **options: Any) -> LLMEngine:
    values = {"dtype": "float32", "num_kvcache_blocks": 64, "max_num_batched_tokens": 512, **options}
    return LLMEngine(Config(model=str(folder), kernels=kernels, max_model_len=MODEL_LEN, **values))


def bits(vectors: list[Any]) -> list[bytes]:
    return [vector.tobytes() for vector in vectors]


def engines(folder: Path, kernels: str, dtype: str) -> Iterator[LLMEngine]:
    """Engines that answer in chunks, from the cache, after preemptions, and one step ahead."""
    for options in (
        {"max_num_batched_tokens": 31, "scheduling_policy": MIXED, "enable_prefix_caching": True},
        {"scheduling_policy": PREFILL_FIRST, "num_kvcache_blocks": 8, "enable_prefix_caching": True},
        {"max_num_batched_tokens": 64, "scheduling_policy": MIXED, "deferred_output": True},
    ):
        other = engine(folder, kernels, dtype=dtype, **options)
        if options.get("deferred_output"):
            runner = other.core.runner
            assert isinstance(runner, ModelRunner)
            other.core.executor = PipelinedExecutor(runner.launch, time.monotonic)
        yield other
        other.close()


def pooled(ranks: Ranks, members: list[tuple[int, Pooling]]) -> list[bytes]:
    """Vectors of prompts by their numbers, computed in one step."""
    seqs = [Sequence(prompts()[i], BLOCK_SIZE, EMBED_PARAMS, pooling=pooling) for i, pooling in members]
    for place, seq in enumerate(seqs):
        seq.block_table = list(range(10 * place, 10 * place + 10))
    counts = [seq.num_tokens for seq in seqs]
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, counts, sum(counts))
    outputs = ranks.all(lambda rank: ranks.runners[rank].forward(batch))
    # The rank that answers, and it alone.
    assert outputs[1].pooled is None
    assert outputs[0].pooled is not None
    return [outputs[0].pooled[seq.id] for seq in seqs]


@pytest.mark.parametrize("architecture", slow_but({"qwen3", "mixtral", "deepseek_v3"}, ARCHITECTURES))
def test_vectors_equal_transformers(tmp_path: Path, architecture: str) -> None:
    """Vectors of each architecture, in chunks; whole and alone they have the same bits."""
    from transformers import AutoModel

    kernels = backend_or_skip("cpu").name
    folder = make_checkpoint(tmp_path, architecture, num_hidden_layers=2)
    reference: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    chunked, whole = engine(folder, kernels, max_num_batched_tokens=29), engine(folder, kernels)
    for pooling in POOLINGS:
        found = chunked.embed(prompts(), pooling, normalize=False)
        for prompt, vector in zip(prompts(), found, strict=True):
            with torch.inference_mode():
                states = reference(torch.tensor([prompt])).last_hidden_state[0].double()
            expected = states[-1] if pooling == LAST else states.mean(0)
            np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4, rtol=1e-4)
        assert bits(found) == bits([whole.embed([prompt], pooling, normalize=False)[0] for prompt in prompts()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", CPU_BACKENDS)
def test_text_vector_is_equal_in_every_setting(folder: Path, kernels: str, dtype: str) -> None:
    """Alone, beside generating requests, in chunks, from the cache, after a preemption, and one step ahead."""
    kernels = backend_or_skip(kernels).name
    alone = engine(folder, kernels, dtype=dtype)
    for pooling in POOLINGS:
        expected = [bits(alone.embed([prompt], pooling))[0] for prompt in prompts()]
        assert len(set(expected)) == len(expected)
        for other in engines(folder, kernels, dtype):
            for number in range(3):
                other.add_request(prompts()[number], SamplingParams(max_tokens=20, ignore_eos=True))
            for _ in range(2):
                assert bits(other.embed(prompts(), pooling)) == expected


@pytest.mark.parametrize("architecture", ["qwen3", "deepseek_v3"])
def test_ranks_give_equal_bits_in_any_batch(tmp_path: Path, architecture: str) -> None:
    ranks = Ranks(make_checkpoint(tmp_path, architecture, num_hidden_layers=2), 2)
    members = [(i, pooling) for i in range(4) for pooling in POOLINGS]
    assert [pooled(ranks, [member])[0] for member in members] == pooled(ranks, members)
    ranks.close()


def test_library_vectors_are_truncated_with_checkpoint_pooling(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    made = engine(folder, backend_or_skip("cpu").name)
    (last,), (mean,) = (made.embed(["the cat"], pooling) for pooling in POOLINGS)
    assert last.shape == (made.io.model_config.hidden_size,)
    assert float(np.square(last, dtype=np.float64).sum()) == pytest.approx(1.0, abs=1e-6)
    (raw,) = made.embed(["the cat"], normalize=False, dimensions=3)
    np.testing.assert_allclose(made.embed(["the cat"], dimensions=3)[0], raw / np.linalg.norm(raw), rtol=1e-6)
    assert bits(made.embed(["the cat"])) == bits([last])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert bits(made.embed(["the cat"])) == bits([mean])
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    bad: list[tuple[Any, int, str]] = [(None, 1, "pooling"), ("max", 1, "pooling"), (LAST, 0, "dimensions")]
    for pooling, dimensions, path in bad:
        with pytest.raises(InvalidFieldError, match=path):
            made.embed(["the cat"], pooling, dimensions=dimensions)
