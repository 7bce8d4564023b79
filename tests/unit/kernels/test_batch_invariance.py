"""A row's bits: alone or batched, in any order, place, chunking, with prefix hits, with 1, 2 or 3 threads.

Equal bits are compared for each number of threads by itself: the number is part of the numerics class.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from kernels.torch_backend import elementwise
from kernels.torch_backend.backend import TorchBackend
from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.native import backend_or_skip
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

pytestmark = pytest.mark.each_value

BACKEND = TorchBackend()
BLOCK_SIZE = 16
POOL = 120
# Lengths on both sides of row tiles (16), blocks (16), KV tiles (64) and query tiles.
LENGTHS = (1, 17, 40, 65, 130)
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-float32": ("qwen3", "float32", {}),
    "qwen3-bfloat16": ("qwen3", "bfloat16", {}),
    "qwen3-float32-kv-fp8": ("qwen3", "float32", {}),
    "qwen3-bfloat16-kv-float16": ("qwen3", "bfloat16", {}),
    "llama-mha-float32": ("llama", "float32", {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 16}),
    "qwen3-odd-float32": (
        "qwen3",
        "float32",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 50, "intermediate_size": 75},
    ),
    "qwen3-moe-bfloat16": ("qwen3_moe", "bfloat16", {}),
    "glm4-moe-float32": ("glm4_moe", "float32", {}),
    "gpt-oss-float32": ("gpt_oss", "float32", {}),
    "deepseek-v3-float32": ("deepseek_v3", "float32", {}),
    # Prompts on both sides of index_topk: a row's selection must not depend on whether others need one.
    "deepseek-v32-float32": ("deepseek_v32", "float32", {"index_topk": 33}),
    "deepseek-v32-bfloat16": ("deepseek_v32", "bfloat16", {"num_attention_heads": 3, "num_key_value_heads": 3}),
}


KV_DTYPES = {"qwen3-float32-kv-fp8": "fp8", "qwen3-bfloat16-kv-float16": "float16"}
ALWAYS = ("qwen3-float32", "qwen3-bfloat16")
# Threads are crossed with dtypes; odd shapes run on one thread, on native kernels with two.
CASES = [("torch", shape, threads) for shape in SHAPES for threads in (1, 2, 3) if threads == 1 or shape in ALWAYS]
CASES += [("cpu", shape, 2) for shape in SHAPES]
# Shapes differ by what the kernels do, which are few with PyTorch's.
KEPT = {case for case in CASES if case[0] == "cpu" or case[1:] == (CASES[0][1], 1)}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param):
        yield request.param


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(512, 256), (384, 64), (33, 24), (1000, 257), (64, 300)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_rows(dtype: torch.dtype, n: int, k: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    bias = torch.randn(n, generator=generator) if with_bias else None
    packed = BACKEND.linear.pack(torch.randn(n, k, generator=generator), bias, dtype)
    x = torch.randn(70, k, generator=generator).to(dtype)
    alone = torch.cat([BACKEND.linear.apply(row[None], packed) for row in x])
    for count in (1, 2, 15, 16, 17, 70):
        order = torch.randperm(70, generator=generator)[:count]
        assert torch.equal(BACKEND.linear.apply(x[order], packed), alone[order]), f"{count} rows"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 24, 75, 640, 3000])
def test_elementwise_and_norm_rows(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(40, 2 * width, generator=generator) * 6
    weight = torch.randn(2 * width, generator=generator)
    do = BACKEND.elementwise
    operations = (
        do.silu_and_mul,
        do.gelu_and_mul,
        lambda rows: do.softcap(rows, 5.0),
        lambda rows: do.rms_norm(rows, weight, 1e-6),
    )
    for operation in operations:
        alone = torch.cat([operation(row[None]) for row in x])
        for count in (2, 16, 40):
            order = torch.randperm(40, generator=generator)[:count]
            assert torch.equal(operation(x[order]), alone[order])


@pytest.mark.usefixtures("threads")
def test_exp2_of_element_is_independent_of_position() -> None:
    generator = torch.Generator().manual_seed(0)
    x = -torch.rand(elementwise.CHUNK * 3, generator=generator) * 30
    whole = x.clone()
    elementwise.exp2_(whole)
    for start, count in ((1, 64), (5, elementwise.CHUNK), (777, elementwise.LANES * 300)):
        part = x[start : start + count].clone()
        elementwise.exp2_(part)
        assert torch.equal(part, whole[start : start + count])


class Model:
    """A runner and, for each of some sequences, the logits after every position, computed alone, token by token."""

    def __init__(self, folder: Path, kernels: str, dtype: str, kv_cache_dtype: str) -> None:
        model_config = ModelConfig.from_folder(folder)
        config = Config(
            model=str(folder),
            dtype=dtype,
            kernels=kernels,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_block_size=BLOCK_SIZE,
            max_model_len=512,
        )
        self.runner = ModelRunner(config, model_config)
        self.runner.allocate_kv_cache(POOL)
        rnd = random.Random(1)
        shared = [rnd.randrange(model_config.vocab_size) for _ in range(max(LENGTHS))]
        # The last two share a prefix of 50 tokens: three full blocks.
        fresh = [[rnd.randrange(model_config.vocab_size) for _ in range(n)] for n in LENGTHS]
        self.prompts = [shared[:50] + p[50:] if len(p) > 64 else p for p in fresh]
        self.alone = [self._token_by_token(prompt) for prompt in self.prompts]

    def _token_by_token(self, prompt: list[int]) -> list[torch.Tensor]:
        blocks = list(range(-(-len(prompt) // BLOCK_SIZE)))
        return [self.step([(prompt, i, i + 1, blocks)])[0] for i in range(len(prompt))]

    def step(self, work: list[tuple[list[int], int, int, list[int]]]) -> torch.Tensor:
        """Computes rows [start, end) of each (prompt, start, end, blocks); logits of each one's last row."""
        seqs: dict[int, Sequence] = {}
        for prompt, start, end, blocks in work:
            seq = Sequence(prompt[:end], BLOCK_SIZE)
            seq.block_table = blocks
            seq.num_computed_tokens = start
            seqs[seq.id] = seq
        counts = [end - start for _, start, end, _ in work]
        batch = ScheduledBatch(seqs, counts, sum(counts))
        assert all(batch.is_final)
        return self.runner.run_model(self.runner.prepare_model(batch))


@pytest.fixture(scope="module", params=slow_but(KEPT, CASES), ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-threads")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    kernels, name, count = request.param
    architecture, dtype, shape = SHAPES[name]
    folder = make_checkpoint(tmp_path_factory.mktemp(name), architecture, num_hidden_layers=2, tokenizer=False, **shape)
    with torch_threads(count):
        backend_or_skip(kernels)
        yield Model(folder, kernels, dtype, KV_DTYPES.get(name, "auto"))


# One of its mixes in each run of a model; the others are of the kind that a fresh run takes some of.
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=(pytest.mark.long, pytest.mark.sampled)) for seed in (1, 2))]
)
def test_logits_of_random_mixes(model: Model, seed: int) -> None:
    """Random chunks of random sequences in random order, blocks scattered, until all are computed."""
    rnd = random.Random(seed)
    blocks = list(range(POOL))
    rnd.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-len(p) // BLOCK_SIZE))] for p in model.prompts]
    done = [0] * len(model.prompts)
    while unfinished := [i for i, prompt in enumerate(model.prompts) if done[i] < len(prompt)]:
        chosen = rnd.sample(unfinished, rnd.randint(1, len(unfinished)))
        ends = [min(len(model.prompts[i]), done[i] + rnd.choice((1, 2, 5, 16, 33, 64, 130))) for i in chosen]
        work = [(model.prompts[i], done[i], end, tables[i]) for i, end in zip(chosen, ends, strict=True)]
        for i, end, logits in zip(chosen, ends, model.step(work), strict=True):
            assert torch.equal(logits, model.alone[i][end - 1]), f"sequence {i} at {end} in a batch of {len(chosen)}"
            done[i] = end


def test_logits_after_a_prefix_hit(model: Model) -> None:
    """The second sequence takes the first one's three full blocks and computes the rest, beside other sequences."""
    first, second = 3, 4
    assert model.prompts[first][:50] == model.prompts[second][:50]
    own = list(range(20, 40))
    model.step([(model.prompts[first], 0, 65, own[:5])])
    hit = own[:3] + own[5:]
    logits = model.step([(model.prompts[second], 48, 130, hit), (model.prompts[1], 0, 17, [50, 51])])
    assert torch.equal(logits[0], model.alone[second][129])
    assert torch.equal(logits[1], model.alone[1][16])


def test_logits_after_copied_block(model: Model) -> None:
    """Another answer takes two full blocks and a copy of the prompt's last block, which has NaN after the prompt."""
    prompt, cache = model.prompts[2], model.runner._kv_cache
    pools = [cache.data] if cache.index is None else [cache.data, cache.index.data]
    for pool in pools:
        pool[:, :, [7, 33]] = torch.nan
    model.step([(prompt, 0, 40, [9, 4, 7])])
    model.runner.kernels.kv_cache.copy_blocks(cache, [(7, 33)])
    logits = model.step([(model.prompts[1], 0, 17, [50, 51]), (prompt, 39, 40, [9, 4, 33])])
    for pool in pools:
        pool[:, :, [7, 33]] = 0
    assert torch.equal(logits[0], model.alone[1][16])
    assert torch.equal(logits[1], model.alone[2][39])


def test_logits_of_many_decodes(model: Model) -> None:
    """More sequences than a group of attention items or a row tile holds, each at another length."""
    prompt = model.prompts[4]
    table = list(range(60, 70))
    model.step([(prompt, 0, 130, table)])
    ends = random.Random(0).sample(range(1, 131), 70)
    logits = model.step([(prompt, end - 1, end, table) for end in ends])
    for row, end in zip(logits, ends, strict=True):
        assert torch.equal(row, model.alone[4][end - 1]), f"decode at {end}"


def test_stale_blocks_have_no_effect(model: Model) -> None:
    """An earlier sequence's content of a block, even NaN, has no effect."""
    cache = model.runner._kv_cache
    pools = [cache.data] if cache.index is None else [cache.data, cache.index.data]
    kept = [pool.clone() for pool in pools]
    for pool in pools:
        pool[:, :, :-1] = torch.nan
    logits = model.step([(model.prompts[3], 0, 65, [9, 4, 7, 2, 5]), (model.prompts[1], 0, 17, [50, 51])])
    for pool, content in zip(pools, kept, strict=True):
        pool.copy_(content)
    assert torch.equal(logits[0], model.alone[3][64])
    assert torch.equal(logits[1], model.alone[1][16])
