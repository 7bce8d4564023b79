"""How far bfloat16 on the native kernels is from float64 on the same weights: no farther than PyTorch's own bfloat16.

The models are `transformers`' in bfloat16 and in float64, of the same bfloat16 checkpoint. Operations are compared with
the exact result: what they return is that, rounded once.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.interface import AttentionMetaData, KernelBackend, KVSpec
from tests.checkpoints import make_checkpoint
from tests.native import backend_or_skip
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "num_hidden_layers": 4},
    "llama": {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "num_hidden_layers": 4, "mlp_bias": True},
}
NUM_PROMPTS = 24
BLOCK_SIZE = 16
# Half a unit in the last place of a bfloat16 (8 bits), relative to the number, at most.
HALF_ULP = 2.0**-8
# Error of float32 sums, relative to the sum of all magnitudes: the square root of 1000 roundings, and a reserve.
FLOAT32_SUMS = 2.0**-19


@pytest.fixture(scope="module")
def native() -> KernelBackend:
    return backend_or_skip("cpu")


def rms(values: torch.Tensor) -> float:
    return math.sqrt(float((values.double() ** 2).mean()))


def prompts() -> list[list[int]]:
    rnd = random.Random(0)
    return [[rnd.randrange(5, 384) for _ in range(rnd.randint(3, 90))] for _ in range(NUM_PROMPTS)]


def transformers_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """[prompts, V] of each prompt's last position, the weights being bfloat16 whatever the dtype."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(dtype).eval()
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts()])


def own_logits(folder: Path, kernels: str) -> torch.Tensor:
    """The same by ours, all prompts in one step."""
    config = Config(model=str(folder), dtype="bfloat16", kernels=kernels, kv_cache_block_size=BLOCK_SIZE)
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    seqs, blocks = [], 0
    for prompt in prompts():
        seq = Sequence(prompt, BLOCK_SIZE, SamplingParams())
        seq.block_table = list(range(blocks, blocks := blocks + seq.num_blocks))
        seqs.append(seq)
    runner.allocate_kv_cache(blocks)
    lengths = [seq.num_tokens for seq in seqs]
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, lengths, sum(lengths))
    return runner.run_model(runner.prepare_model(batch))


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_at_least_as_close_as_pytorchs(
    architecture: str, tmp_path: Path, native: KernelBackend, record_property: Any
) -> None:
    folder = make_checkpoint(tmp_path, architecture, dtype="bfloat16", **MODELS[architecture])
    exact = transformers_logits(folder, torch.float64)
    theirs = rms(transformers_logits(folder, torch.bfloat16).double() - exact)
    ours = rms(own_logits(folder, native.name).double() - exact)
    record_property("error of ours over PyTorch's", ours / theirs)
    assert 0.0 < ours <= theirs, f"{ours / theirs:.3f} of PyTorch's error"
    # The error is one of bfloat16 and not of another formula.
    assert ours < 0.1 * rms(exact)


def random_numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)


def assert_rounded_once(ours: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
    """`size` is the sum of the magnitudes of the terms."""
    assert ours.dtype == torch.bfloat16
    allowed = exact.abs() * HALF_ULP + size * FLOAT32_SUMS
    excess = ((ours.double() - exact).abs() - allowed).max()
    assert float(excess) <= 0.0


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("inner", [64, 1000])
def test_products_are_rounded_once(native: KernelBackend, rows: int, inner: int) -> None:
    x, weight, bias = random_numbers(rows, inner), random_numbers(72, inner, seed=1), random_numbers(72, seed=2)
    ours = native.linear.apply(x, native.linear.pack(weight, bias, torch.bfloat16))
    exact = x.double() @ weight.double().t() + bias.double()
    assert_rounded_once(ours, exact, x.double().abs() @ weight.double().abs().t() + bias.double().abs())
    theirs = functional.linear(x, weight, bias)
    assert rms(ours.double() - exact) <= 1.001 * rms(theirs.double() - exact)


def test_norms_are_as_close_as_pytorchs(native: KernelBackend) -> None:
    """Both round before the weight and after it, as the checkpoints were trained."""
    x, weight = random_numbers(33, 256, scale=3.0), random_numbers(256, seed=1)
    wide = x.double()
    exact = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.double()
    ours = native.elementwise.rms_norm(x, weight, 1e-6)
    narrow = x.float()
    theirs = (narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight
    assert rms(ours.double() - exact) <= 1.001 * rms(theirs.double() - exact)
    assert float(((ours.double() - exact).abs() - exact.abs() * 2.01 * HALF_ULP).max()) <= 0.0


@pytest.mark.parametrize("length", [5, 64, 700])
def test_attention_is_at_least_as_close_as_pytorchs(native: KernelBackend, length: int) -> None:
    heads, kv_heads, width = 4, 2, 64
    q, k, v = (random_numbers(length, n, width, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    blocks = -(-length // BLOCK_SIZE)
    cache = native.kv_cache.allocate(KVSpec(kv_heads, width), 1, blocks, BLOCK_SIZE, torch.bfloat16)
    metadata = AttentionMetaData(
        np.array([0, length]), np.array([length]), np.arange(blocks)[None], np.arange(length, dtype=np.int64)
    )
    metadata.plan = native.attention.plan(metadata, cache, heads)
    native.attention.write(cache, 0, k, v, metadata)
    ours = native.attention.apply(q, cache, 0, metadata, width**-0.5)

    def pytorch(dtype: torch.dtype) -> torch.Tensor:
        qs, ks, vs = (t.to(dtype).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    exact = pytorch(torch.float64)
    assert rms(ours.double() - exact) <= rms(pytorch(torch.bfloat16).double() - exact)
    assert rms(ours.double() - exact) <= 1.1 * rms(exact.to(torch.bfloat16).double() - exact)
