"""The native matrix product: against float64 and PyTorch's own, and a row's bits at every place."""

from __future__ import annotations

from ctypes import CDLL
from functools import partial

import pytest
import torch

from kernels import sampling
from kernels.cpu import linear
from kernels.torch_backend.backend import TorchBackend
from tests.native import select_or_skip

pytestmark = pytest.mark.each_value

# (N, K) on both sides of panels (16), blocks of k (128), tasks (64 columns) and vectors.
SHAPES = [(512, 256), (384, 64), (33, 24), (1000, 257), (64, 1300), (1, 1), (17, 129)]

# The dtype of rows and weights, and the one that the weights are packed in.
DTYPES = [torch.float32, torch.bfloat16]
PACKED = [*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.int8), (torch.bfloat16, torch.int8)]
BLOCK = 128


def drawn(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    shapes = ((n, k), (n,), (rows, k))
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, bias, x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_at_least_as_close_as_pytorch(each_isa: CDLL, dtype: torch.dtype, n: int, k: int, with_bias: bool) -> None:
    weight, bias, x = drawn(n, k, 70, dtype)
    used = bias if with_bias else None
    out = linear.linear(each_isa, x, linear.pack(each_isa, weight, used, dtype))
    assert out.shape == (70, n)
    assert out.dtype == dtype
    exact = x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)
    own = (out.double() - exact).square().mean().sqrt()
    backend = TorchBackend()
    theirs = (backend.linear.apply(x, backend.linear.pack(weight, used, dtype)).double() - exact).square().mean().sqrt()
    # Sums of a few numbers err alike; a quarter of a unit is allowed for them.
    assert own <= theirs * 1.02 + 0.25 * torch.finfo(dtype).eps * exact.abs().mean()


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """float64 [N, K]: the nearest multiples of a scale for each row and block of K, which is a 127th of the largest."""
    n, k = weight.shape
    padded = torch.zeros(n, -(-k // BLOCK) * BLOCK)
    padded[:, :k] = weight.float()
    blocks = padded.view(n, -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    numbers = (blocks / scales.where(scales > 0, 1.0)).round()
    return (numbers.double() * scales.double()).view(n, -1)[:, :k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_weights_are_multiples_of_their_scales(each_isa: CDLL, dtype: torch.dtype, n: int, k: int) -> None:
    """Against float64 over the dequantized weights, and within half a scale of each weight itself."""
    weight, bias, x = drawn(n, k, 20, dtype)
    weight[0, : min(k, BLOCK)] = 0.0
    out = linear.linear(each_isa, x, linear.pack(each_isa, weight, bias, dtype, torch.int8)).double()
    used = dequantized(weight)
    exact = x.double() @ used.t() + bias.double()
    size = x.double().abs() @ used.abs().t() + bias.double().abs()
    eps = torch.finfo(dtype).eps
    assert bool(((out - exact).abs() <= 0.5 * eps * exact.abs() + 1e-5 * size).all())
    blocks = torch.nn.functional.pad(weight.double().abs(), (0, -k % BLOCK)).view(n, -1, BLOCK).amax(2)
    half_scale = (blocks / 254).repeat_interleave(BLOCK, 1)[:, :k]
    assert bool(((used - weight.double()).abs() <= half_scale * 1.001).all())


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_int8_block_with_nan_weight_gives_nan(each_isa: CDLL, number: float) -> None:
    weight, _, x = drawn(20, 300, 3, torch.float32)
    weight[2, 200] = number
    out = linear.linear(each_isa, x, linear.pack(each_isa, weight, None, torch.float32, torch.int8))
    assert out[:, 2].isnan().all()
    assert out[:, :2].isfinite().all()
    assert out[:, 3:].isfinite().all()


def test_int8_weights_near_zero(native: CDLL) -> None:
    """Scales that are rounded much, to a subnormal number or to none."""
    weight = torch.tensor([[190.0, -190.0, 1.0], [60.0, -20.0, 1.0]]) * 2.0**-149
    out = linear.linear(native, torch.eye(3) * 2.0**60, linear.pack(native, weight, None, torch.float32, torch.int8))
    assert torch.equal(out.t() * 2.0**89, torch.tensor([[127.0, -127.0, 1.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(("dtype", "packed_dtype"), PACKED)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_row_bits_are_independent_of_other_rows(
    each_isa: CDLL, dtype: torch.dtype, packed_dtype: torch.dtype, n: int, k: int
) -> None:
    weight, bias, x = drawn(n, k, 80, dtype)
    packed = linear.pack(each_isa, weight, bias, dtype, packed_dtype)
    alone = torch.cat([linear.linear(each_isa, row[None], packed) for row in x])
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 81):
        order = torch.randperm(80, generator=generator)[:count]
        assert torch.equal(linear.linear(each_isa, x[order], packed), alone[order]), f"{count} rows"


@pytest.mark.parametrize(("dtype", "packed_dtype"), PACKED)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_bits_are_independent_of_threads(
    threads: CDLL, dtype: torch.dtype, packed_dtype: torch.dtype, rows: int
) -> None:
    weight, bias, x = drawn(700, 300, rows, dtype)
    outs = []
    for count in (1, 2, 3, 7):
        threads.fissile_set_threads(count)
        outs.append(linear.linear(threads, x, linear.pack(threads, weight, bias, dtype, packed_dtype)))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("dtype", "packed_dtype"), PACKED)
def test_vectors_of_8_and_16_give_equal_bits(native: CDLL, dtype: torch.dtype, packed_dtype: torch.dtype) -> None:
    from kernels.cpu import library

    weight, bias, x = drawn(100, 300, 20, dtype)
    outs = []
    for name in ("avx2", "avx2x16"):
        select_or_skip(native, name)
        outs.append(linear.linear(native, x, linear.pack(native, weight, bias, dtype, packed_dtype)))
    library.select(native)
    assert torch.equal(outs[0], outs[1])


def test_rows_of_a_view_and_weights_of_another_dtype(native: CDLL) -> None:
    weight = torch.randn(1 + 40 * 24)[1:].view(40, 24)
    x = torch.randn(17, 60)[:, 7:31]
    expected = x.double() @ weight.double().t()
    out = linear.linear(native, x, linear.pack(native, weight, None, torch.float32))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    half = linear.pack(native, weight, None, torch.bfloat16)
    assert torch.equal(
        linear.linear(native, x.bfloat16(), half),
        linear.linear(native, x.bfloat16().contiguous(), linear.pack(native, weight.bfloat16(), None, torch.bfloat16)),
    )
    assert torch.equal(
        linear.linear(native, x.t().contiguous().t(), linear.pack(native, weight, None, torch.float32)), out
    )


def test_layout_of_packed_weights(native: CDLL) -> None:
    """Instruction sets share it, and so does a file of packed weights."""
    weight = torch.arange(17 * 5, dtype=torch.float32).view(17, 5)
    single = linear.pack(native, weight, None, torch.float32).panels.view(torch.float32)
    pairs = linear.pack(native, weight, None, torch.bfloat16).panels.view(torch.bfloat16).float()
    padded = torch.zeros(32, 6)
    padded[:17, :5] = weight
    assert torch.equal(single.view(2, 5, 16), padded[:, :5].view(2, 16, 5).transpose(1, 2))
    assert torch.equal(pairs.view(2, 3, 16, 2), padded.view(2, 16, 3, 2).transpose(1, 2))


def test_layout_of_int8_weights(native: CDLL) -> None:
    weight = torch.randn(17, 130)
    panels = linear.pack(native, weight, None, torch.float32, torch.int8).panels.view(2, -1)
    padded = torch.zeros(32, 132)
    padded[:17, :130] = weight
    rest = panels
    for block in (padded[:, :BLOCK], padded[:, BLOCK:]):
        scales = block.abs().amax(1) / 127
        numbers = (block / scales.where(scales > 0, 1.0)[:, None]).round().char()
        size = numbers.shape[1] * 16
        assert torch.equal(rest[:, :64].contiguous().view(torch.float32), scales.view(2, 16))
        assert torch.equal(rest[:, 64 : 64 + size].reshape(2, -1, 16, 4), numbers.view(2, 16, -1, 4).transpose(1, 2))
        rest = rest[:, 64 + size :]
    assert rest.numel() == 0


def test_no_rows(native: CDLL) -> None:
    packed = linear.pack(native, torch.randn(20, 8), None, torch.float32)
    assert linear.linear(native, torch.empty(0, 8), packed).shape == (0, 20)


@pytest.mark.parametrize(("dtype", "packed_dtype"), PACKED)
def test_overflowed_row_gives_nan_without_affecting_others(
    each_isa: CDLL, dtype: torch.dtype, packed_dtype: torch.dtype
) -> None:
    weight, _, x = drawn(40, 30, 9, dtype)
    packed = linear.pack(each_isa, weight, None, dtype, packed_dtype)
    whole = linear.linear(each_isa, x, packed)
    x[4, 7] = torch.nan
    spoiled = linear.linear(each_isa, x, packed)
    assert spoiled[4].isnan().all()
    spoiled[4] = whole[4]
    assert torch.equal(spoiled, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 17, 512, 1700])
def test_argmax_equals_argmax_of_product(each_isa: CDLL, dtype: torch.dtype, columns: int) -> None:
    """Ties everywhere, and a limit at the end of the tokenizer's ids."""
    weight, bias, x = drawn(columns, 9, 40, dtype)
    packed = linear.pack(each_isa, weight.round(), bias.round(), dtype)
    x = x.round()
    x[3], x[4, 2], x[5] = torch.nan, torch.inf, 0.0
    whole = linear.linear(each_isa, x, packed).float().numpy()
    for limit in (1, 16, 513, columns, columns + 9):
        expected = sampling.greedy(whole[:, :limit])
        assert linear.argmax(each_isa, x, packed, limit).tolist() == expected.tolist()


def test_argmax_by_several_threads_and_of_no_rows(threads: CDLL) -> None:
    weight, _, x = drawn(5000, 24, 33, torch.bfloat16)
    packed = linear.pack(threads, weight, None, torch.bfloat16)
    expected = linear.linear(threads, x, packed).float().numpy().argmax(axis=1).tolist()
    for count in (1, 4):
        threads.fissile_set_threads(count)
        assert linear.argmax(threads, x, packed, 5000).tolist() == expected
        assert linear.argmax(threads, x[:0], packed, 5000).tolist() == []


def test_mismatched_shapes_are_refused_before_memory_access(native: CDLL) -> None:
    weight, _, x = drawn(20, 24, 3, torch.float32)
    packed = linear.pack(native, weight, None, torch.float32)
    for multiply in (linear.linear, partial(linear.argmax, limit=20)):
        with pytest.raises(ValueError, match="rows of 23 numbers do not go with a weight of 24"):
            multiply(native, x[:, :23], packed)
    with pytest.raises(ValueError, match=r"torch.float32 cannot be packed as torch.bfloat16"):
        linear.pack(native, weight, None, torch.float32, torch.bfloat16)
