"""The native matrix product: against float64 and PyTorch's own, and a row's bits wherever it stands."""

from __future__ import annotations

from ctypes import CDLL

import numpy as np
import pytest
import torch

from kernels.cpu import linear
from kernels.torch_backend import TorchBackend

# (N, K) on both sides of panels (16), blocks of k (128), tasks (64 columns) and vectors.
SHAPES = [(512, 256), (384, 64), (33, 24), (1000, 257), (64, 1300), (1, 1), (17, 129)]


def drawn(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    shapes = ((n, k), (n,), (rows, k))
    weight, bias, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, bias, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    theirs = (backend.linear(x, backend.pack_linear(weight, used, dtype)).double() - exact).square().mean().sqrt()
    # Sums of a few numbers err alike; a quarter of a unit is allowed for them.
    assert own <= theirs * 1.02 + 0.25 * torch.finfo(dtype).eps * exact.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_other_rows(each_isa: CDLL, dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias, x = drawn(n, k, 80, dtype)
    packed = linear.pack(each_isa, weight, bias, dtype)
    alone = torch.cat([linear.linear(each_isa, row[None], packed) for row in x])
    generator = torch.Generator().manual_seed(1)
    for count in range(1, 81):
        order = torch.randperm(80, generator=generator)[:count]
        assert torch.equal(linear.linear(each_isa, x[order], packed), alone[order]), f"{count} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_bits_do_not_depend_on_the_threads(threads: CDLL, dtype: torch.dtype, rows: int) -> None:
    weight, bias, x = drawn(700, 300, rows, dtype)
    outs = []
    for count in (1, 2, 3, 7):
        threads.fissile_set_threads(count)
        outs.append(linear.linear(threads, x, linear.pack(threads, weight, bias, dtype)))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_of_8_and_16_give_the_same_bits(native: CDLL, dtype: torch.dtype) -> None:
    from kernels.cpu import library

    weight, bias, x = drawn(100, 300, 20, dtype)
    outs = []
    for name in ("avx2", "avx2x16"):
        try:
            library.select(native, name)
        except library.LibraryUnavailableError as error:
            pytest.skip(str(error))
        outs.append(linear.linear(native, x, linear.pack(native, weight, bias, dtype)))
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


def test_the_layout_of_packed_weights(native: CDLL) -> None:
    """Instruction sets share it, and so does a file of packed weights."""
    weight = torch.arange(17 * 5, dtype=torch.float32).view(17, 5)
    single = linear.pack(native, weight, None, torch.float32).panels
    pairs = linear.pack(native, weight, None, torch.bfloat16).panels.float()
    padded = torch.zeros(32, 6)
    padded[:17, :5] = weight
    assert torch.equal(single, padded[:, :5].view(2, 16, 5, 1).transpose(1, 2))
    assert torch.equal(pairs, padded.view(2, 16, 3, 2).transpose(1, 2))


def test_no_rows(native: CDLL) -> None:
    packed = linear.pack(native, torch.randn(20, 8), None, torch.float32)
    assert linear.linear(native, torch.empty(0, 8), packed).shape == (0, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_overflowed_shows_and_spoils_no_other(each_isa: CDLL, dtype: torch.dtype) -> None:
    weight, _, x = drawn(40, 30, 9, dtype)
    packed = linear.pack(each_isa, weight, None, dtype)
    whole = linear.linear(each_isa, x, packed)
    x[4, 7] = torch.nan
    spoiled = linear.linear(each_isa, x, packed)
    assert spoiled[4].isnan().all()
    spoiled[4] = whole[4]
    assert torch.equal(spoiled, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 17, 512, 1700])
def test_argmax_is_that_of_the_product(each_isa: CDLL, dtype: torch.dtype, columns: int) -> None:
    """Ties everywhere, and a limit, which is where the tokenizer's ids end."""
    weight, bias, x = drawn(columns, 9, 40, dtype)
    packed = linear.pack(each_isa, weight.round(), bias.round(), dtype)
    x = x.round()
    x[3], x[4, 2], x[5] = torch.nan, torch.inf, 0.0
    whole = linear.linear(each_isa, x, packed).float().numpy()
    for limit in (1, 16, 513, columns, columns + 9):
        expected = np.where(np.isnan(whole), -np.inf, whole)[:, :limit].argmax(axis=1)
        assert linear.argmax(each_isa, x, packed, limit).tolist() == expected.tolist()


def test_argmax_by_several_threads_and_of_no_rows(threads: CDLL) -> None:
    weight, _, x = drawn(5000, 24, 33, torch.bfloat16)
    packed = linear.pack(threads, weight, None, torch.bfloat16)
    expected = linear.linear(threads, x, packed).float().numpy().argmax(axis=1).tolist()
    for count in (1, 4):
        threads.fissile_set_threads(count)
        assert linear.argmax(threads, x, packed, 5000).tolist() == expected
        assert linear.argmax(threads, x[:0], packed, 5000).tolist() == []
