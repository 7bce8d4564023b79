"""KV caches in dtypes narrower than the model's: stored numbers, and reads of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import float8
from kernels.interface import IndexSpec, KernelBackend, KVSpec
from tests.quantizers import fp8_table, nearest
from tests.unit.kernels.steps import Rows, metadata, scattered_blocks

pytestmark = pytest.mark.each_value

NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@pytest.mark.parametrize(("dtype", "fnuz"), [(torch.float8_e4m3fn, False), (torch.float8_e4m3fnuz, True)])
def test_every_byte_is_widened_to_its_value(dtype: torch.dtype, fnuz: bool) -> None:
    out = torch.empty(16, 16)
    float8.widen(torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype), out)
    assert np.array_equal(out.numpy().ravel(), fp8_table(fnuz), equal_nan=True)


def test_fp8_is_the_nearest_number_and_never_infinite() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator) * torch.logspace(-4, 3, 20_000)
    values[:6] = torch.tensor([448.0, 464.1, 1e9, -torch.inf, torch.inf, -449.0])
    out = torch.empty(20_000)
    float8.widen(float8.saturated(values, torch.float8_e4m3fn), out)
    table = fp8_table()
    best = np.abs(table[nearest(values.numpy(), table)] - np.clip(values.numpy(), -448, 448))
    assert np.array_equal(np.abs(out.numpy() - np.clip(values.numpy(), -448, 448)), best)
    assert out[:6].tolist() == [448.0, 448.0, 448.0, -448.0, 448.0, -448.0]
    assert torch.isnan(float8.saturated(torch.tensor([torch.nan]), torch.float8_e4m3fn).float()).all()


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_float16_is_never_infinite(model_dtype: torch.dtype) -> None:
    stored = float8.saturated(torch.tensor([1e9, -1e9, 1.0]).to(model_dtype), torch.float16)
    assert stored.tolist() == [65504.0, -65504.0, 1.0]


def test_cache_dtype_may_be_wider_than_model() -> None:
    numbers = torch.tensor([65504.0, -1.5], dtype=torch.float16)
    assert float8.saturated(numbers, torch.bfloat16).tolist() == [65536.0, -1.5]
    assert float8.saturated(numbers, torch.float32).tolist() == [65504.0, -1.5]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("latent", [False, True])
def test_attention_reads_rounded_cache(
    backend: KernelBackend, dtype: torch.dtype, model_dtype: torch.dtype, latent: bool
) -> None:
    """Equal to a float32 cache of the rounded numbers, to the bit if sums have one order.

    The native kernels add products of bfloat16 keys in an order of their own.
    """
    heads, dim, block_size, lengths = 1 if latent else 2, 24, 16, [5, 64, 150]
    spec = KVSpec(heads, dim, latent_value_dim=16 if latent else 0)
    blocks = scattered_blocks(lengths, block_size, 20, seed=1)
    step = metadata([Rows(0, n, b) for n, b in zip(lengths, blocks, strict=True)], block_size)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(lengths), 4, dim, generator=generator).to(model_dtype)
    k, v = (torch.randn(sum(lengths), heads, dim, generator=generator) * 3 for _ in range(2))
    k[::7] *= 1000.0
    # Scores of up to 5: at 5000 float32 has so few fraction bits that weights differ by 0.05 % with the order.
    scale = 2e-4

    def attention(cache_dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = backend.kv_cache.allocate(spec, 1, 20, block_size, cache_dtype)
        # What an earlier sequence may have left.
        float8.raw(cache.data)[:, :, :-1] = 0x7F if cache_dtype.itemsize == 1 else torch.nan
        step.plan = backend.attention.plan(step, cache, q.shape[1])
        if latent:
            backend.latent_attention.write(cache, 0, k[:, 0], step)
            return backend.latent_attention.apply(q, cache, 0, step, scale, None)
        backend.attention.write(cache, 0, k, v, step)
        return backend.attention.apply(q, cache, 0, step, scale)

    actual = attention(dtype, k.to(model_dtype), v.to(model_dtype))
    rounded = [float8.saturated(x.to(model_dtype), dtype).float() for x in (k, v)]
    expected = attention(torch.float32, *rounded)
    if backend.name == "cpu" and dtype == torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=1e-4 if model_dtype == torch.float32 else 1e-2, atol=1e-2)
    else:
        assert torch.equal(actual, expected)
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *NARROW])
@pytest.mark.parametrize("latent", [False, True])
def test_block_copies_run_in_order(backend: KernelBackend, dtype: torch.dtype, latent: bool) -> None:
    spec = KVSpec(1, 8, latent_value_dim=6, index=IndexSpec(2, 4, 3)) if latent else KVSpec(2, 8)
    cache = backend.kv_cache.allocate(spec, 3, 5, 4, dtype)
    pools = [cache.data, cache.index.data] if latent else [cache.data]
    before = []
    for pool in pools:
        pool.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
        before.append(pool.view(torch.uint8).clone())
    backend.kv_cache.copy_blocks(cache, [(0, 3), (3, 4), (1, 0), (2, 2)])
    for pool, old in zip(pools, before, strict=True):
        expected = old[:, :, [1, 1, 2, 0, 0, *range(5, old.shape[2])]]
        assert torch.equal(pool.view(torch.uint8), expected)
