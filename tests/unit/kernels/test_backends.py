"""The back ends against plain float64 arithmetic."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.interface import KernelBackend, KVSpec
from kernels.torch_backend import attention
from kernels.torch_backend.attention import PagedKVCache
from kernels.torch_backend.backend import TorchBackend
from tests.unit.kernels.outputs import FIXED_OUTPUTS
from tests.unit.kernels.steps import Rows, metadata, reference_attention, scattered_blocks, stored

pytestmark = [FIXED_OUTPUTS, pytest.mark.each_value]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(backend: KernelBackend, dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, 33), (70, 33), (70,)))
    packed = backend.linear.pack(weight, bias if with_bias else None, dtype)
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)
    out = backend.linear.apply(x, packed)
    assert out.shape == (rows, 70)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_linear_accepts_unaligned_views_and_other_dtypes(backend: KernelBackend) -> None:
    storage = torch.randn(1 + 40 * 24)
    weight = storage[1:].view(40, 24)
    x = torch.randn(17 * 24 + 3)[3:].view(17, 24)
    expected = x.double() @ weight.double().t()
    close(backend.linear.apply(x, backend.linear.pack(weight, None, torch.float32)), expected)
    half = backend.linear.pack(weight, None, torch.bfloat16)
    assert backend.linear.apply(x.bfloat16(), half).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(70, 33), (16, 8), (1, 1)])
def test_rows_of_a_packed_weight(backend: KernelBackend, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    packed, ids = backend.linear.pack(weight, None, dtype), torch.randint(shape[0], (50,))
    assert torch.equal(backend.linear.rows(packed, ids), weight[ids])
    assert backend.linear.rows(packed, ids[:0]).shape == (0, shape[1])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norms(backend: KernelBackend, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 48), (5, 48), (48,)))
    total = x + residual

    def expected(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    close(backend.elementwise.rms_norm(x, weight, 1e-6), expected(x))
    normed, new_residual = backend.elementwise.add_rms_norm(x, residual, weight, 1e-6)
    close(normed, expected(total))
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_and_mul(backend: KernelBackend, dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * 45) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    close(backend.elementwise.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
    close(backend.elementwise.gelu_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_softcap(backend: KernelBackend) -> None:
    x = torch.randn(7, 45) * 40
    close(backend.elementwise.softcap(x, 30.0), 30 * torch.tanh(x.double() / 30))


def test_rope_rotates_half_split_pairs(backend: KernelBackend) -> None:
    q, k, angles = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 1, 4)
    for x, out in zip((q, k), backend.elementwise.rope(q, k, angles.cos(), angles.sin()), strict=True):
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
        close(out, torch.cat((turned.real, turned.imag), -1))


def test_rope_of_a_part_of_the_head_leaves_the_rest(backend: KernelBackend) -> None:
    q, k, angles = torch.randn(3, 4, 12), torch.randn(3, 2, 12), torch.randn(3, 1, 3)
    cos, sin = angles.cos(), angles.sin()
    rotated = backend.elementwise.rope(q[..., :6].contiguous(), k[..., :6].contiguous(), cos, sin)
    for x, part, out in zip((q, k), rotated, backend.elementwise.rope(q, k, cos, sin), strict=True):
        assert torch.equal(out, torch.cat((part, x[..., 6:]), -1))


def filled_cache(
    backend: KernelBackend, lengths: list[int], shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> tuple[PagedKVCache, list[list[int]]]:
    """A cache for (heads, kv_heads, dim) with random keys in layer 1, and each sequence's blocks; NaN elsewhere."""
    heads, kv_heads, dim = shape
    num_blocks = sum(-(-length // block_size) for length in lengths) + 1
    blocks = scattered_blocks(lengths, block_size, num_blocks, seed=heads)
    cache = backend.kv_cache.allocate(KVSpec(kv_heads, dim), 2, num_blocks, block_size, dtype)
    cache.data[:, :, :-1] = torch.nan
    fill = metadata([Rows(0, length, table) for length, table in zip(lengths, blocks, strict=True)], block_size)
    fill.plan = backend.attention.plan(fill, cache, heads)
    k, v = (torch.randn(sum(lengths), kv_heads, dim).to(dtype) for _ in range(2))
    backend.attention.write(cache, 1, k, v, fill)
    return cache, blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 2), (3, 1), (16, 1)])
@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
def test_attention(backend: KernelBackend, dtype: torch.dtype, heads: int, kv_heads: int, block_size: int) -> None:
    check_attention(backend, (heads, kv_heads, 24), block_size, dtype)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (16, 1)])
def test_attention_with_a_window_and_sinks(
    backend: KernelBackend, window: int, with_sinks: bool, heads: int, kv_heads: int
) -> None:
    sinks = torch.linspace(-3.0, 3.0, heads) if with_sinks else None
    check_attention(backend, (heads, kv_heads, 16), 16, torch.float32, window, sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_attention_with_softcap(backend: KernelBackend, dtype: torch.dtype, softcap: float) -> None:
    check_attention(backend, (6, 2, 24), 16, dtype, 100, softcap=softcap)


def test_attention_with_extreme_sinks(backend: KernelBackend) -> None:
    sinks = torch.tensor([-1e4, 0.0, 30.0, 1e4])
    check_attention(backend, (4, 2, 16), 16, torch.float32, sinks=sinks)


def check_attention(
    backend: KernelBackend,
    shape: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    heads, _, dim = shape
    lengths, counts = [1, 70, 64, 129, 200], [1, 3, 64, 1, 66]
    cache, blocks = filled_cache(backend, lengths, shape, block_size, dtype)
    step_rows = [Rows(length - n, length, table) for length, n, table in zip(lengths, counts, blocks, strict=True)]
    step = metadata(step_rows, block_size)
    step.plan = backend.attention.plan(step, cache, heads)
    padded = sum(counts) + 5
    q = torch.randn(padded, heads, dim).to(dtype)
    out = backend.attention.apply(q, cache, 1, step, dim**-0.5, window=window, sinks=sinks, softcap=softcap)
    begin = 0
    for row in step_rows:
        keys, values = stored(cache, 1, row.blocks, row.end)
        part = slice(begin, begin + row.count)
        close(out[part], reference_attention(q[part], keys, values, row.start, dim**-0.5, window, sinks, softcap))
        begin += row.count
    assert not out[begin:].any()
    assert cache.data[0, :, :-1].isnan().all(), "another layer was written"
    assert not cache.data[:, :, -1].any(), "the zero block was written"


@pytest.mark.parametrize("window", [None, 70])
def test_panels_do_not_change_bits(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    backend = TorchBackend()
    cache = backend.kv_cache.allocate(KVSpec(2, 16), 1, 40, 16, torch.float32)
    cache.data[:, :, :-1].normal_()
    step = metadata([Rows(100, 300, list(range(19))), Rows(7, 20, [20, 21])], 16)
    q = torch.randn(213, 4, 16)
    outputs = []
    for panel_bytes in (32 << 20, 20_000, 1):
        monkeypatch.setattr(attention, "PANEL_BYTES", panel_bytes)
        step.plan = backend.attention.plan(step, cache, 4)
        outputs.append(backend.attention.apply(q, cache, 0, step, 0.25, window=window, sinks=torch.ones(4)))
    assert len(step.plan.attention(window).panels) > 10
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("window", [1, 30, 64, 130])
def test_chunks_do_not_change_bits_in_a_window_with_sinks(backend: KernelBackend, window: int) -> None:
    cache, (blocks,) = filled_cache(backend, [300], (6, 2, 16), 16, torch.float32)
    q, sinks = torch.randn(300, 6, 16), torch.randn(6)

    def attend(start: int, end: int) -> torch.Tensor:
        step = metadata([Rows(start, end, blocks)], 16)
        step.plan = backend.attention.plan(step, cache, 6)
        return backend.attention.apply(q[start:end], cache, 1, step, 0.25, window=window, sinks=sinks)

    whole = attend(0, 300)
    for start, end in pairwise((0, 1, 2, 37, 64, 65, 128, 190, 299, 300)):
        assert torch.equal(attend(start, end), whole[start:end]), f"rows {start} to {end}"


def test_window_skips_earlier_tiles() -> None:
    backend = TorchBackend()
    cache = backend.kv_cache.allocate(KVSpec(1, 8), 1, 70, 16, torch.float32)
    step = metadata([Rows(1000, 1001, list(range(63)))], 16)
    plan = backend.attention.plan(step, cache, 8)
    assert sum(plan.attention(None).panels[0].tile_counts) == 16
    assert sum(plan.attention(64).panels[0].tile_counts) == 2
    assert sum(plan.attention(41).panels[0].tile_counts) == 1


def test_cache_size_equals_request(backend: KernelBackend) -> None:
    cache = backend.kv_cache.allocate(KVSpec(2, 8), 3, 10, 16, torch.bfloat16)
    # One block more than asked: the zeros for positions past a sequence's end.
    assert cache.data.nbytes == 2 * 3 * (10 + 1) * 16 * 2 * 8 * 2
