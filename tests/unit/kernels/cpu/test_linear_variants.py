"""Products by instructions for bfloat16: the kernels on emulated instructions anywhere, on real ones where they are.

Weights and rows are bfloat16, so that the exact product is known; what the emulation leaves out is the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL

import pytest
import torch

from kernels.cpu import elementwise, experts, library, linear
from kernels.interface import ExpertWeights
from tests.native import select_or_skip

pytestmark = pytest.mark.each_value

BF16 = torch.bfloat16
# (N, K): whole and broken panels (16), tasks (4 and 8 panels), steps of 32 k, more than the 512 that are done at once.
SHAPES = [(1, 1), (16, 32), (33, 24), (50, 129), (130, 545), (72, 1031)]
# Blocks of 128 that share a scale, groups of 4; few rows take eight panels at once, four, or one.
INT8_SHAPES = [(1, 1), (33, 24), (50, 129), (130, 397), (72, 512), (200, 264)]
# Up to 17, what a step of few sequences has with drafts: on both sides of VDPBF16PS's tiles, of 12 rows, with int8 in
# registers of 8, and more panels at once up to 6 and 4. Either side of 16 rows (a tile of AMX), 32 (two) and 256 (a
# task), and of VDPBF16PS's 24 and 72.
COUNTS = [*range(1, 18), 24, 25, 31, 32, 33, 48, 65, 72, 73, 80]


@pytest.fixture(params=["amx_emulated", "avx512bf16_emulated", "amx", "avx512bf16"])
def variant(native: CDLL, request: pytest.FixtureRequest) -> Iterator[CDLL]:
    select_or_skip(native, request.param)
    yield native
    library.select(native)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 16, 33, 80])
def test_within_one_rounding_of_float64(variant: CDLL, n: int, k: int, rows: int) -> None:
    weight, bias, x = drawn(n, k), drawn(n), drawn(rows, k)
    out = linear.linear(variant, x, linear.pack(variant, weight, bias, BF16)).double()
    exact = x.double() @ weight.double().t() + bias.double()
    scale = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert ((out - exact).abs() <= exact.abs() * 2**-8 + scale * 2**-20).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_row_bits_are_independent_of_other_rows(variant: CDLL, n: int, k: int) -> None:
    packed, x = linear.pack(variant, drawn(n, k), None, BF16), drawn(80, k)
    whole = linear.linear(variant, x, packed)
    generator = torch.Generator().manual_seed(1)
    for count in COUNTS:
        order = torch.randperm(80, generator=generator)[:count]
        assert torch.equal(linear.linear(variant, x[order], packed), whole[order]), f"{count} rows"


@pytest.mark.parametrize(("n", "k"), INT8_SHAPES)
def test_int8_weights_are_exact_and_rows_do_not_depend_on_others(variant: CDLL, n: int, k: int) -> None:
    """Against the dequantized int8 weights, to float32 accuracy."""
    weight, bias, x = drawn(n, k), drawn(n), drawn(80, k)
    packed = linear.pack(variant, weight, bias, BF16, torch.int8)
    meant = linear.linear(variant, torch.eye(k), linear.pack(variant, weight, None, torch.float32, torch.int8)).t()
    whole = linear.linear(variant, x, packed)
    exact = x.double() @ meant.double().t() + bias.double()
    scale = x.double().abs() @ meant.double().abs().t() + bias.double().abs()
    assert ((whole.double() - exact).abs() <= exact.abs() * 2**-8 + scale * 2**-20).all()
    generator = torch.Generator().manual_seed(1)
    for count in COUNTS:
        order = torch.randperm(80, generator=generator)[:count]
        assert torch.equal(linear.linear(variant, x[order], packed), whole[order]), f"{count} rows"


@pytest.mark.parametrize("packed_dtype", [BF16, torch.int8])
@pytest.mark.parametrize(("columns", "inner"), [(20, 40), (137, 545), (40, 2100)])
def test_rows_beyond_one_task(variant: CDLL, columns: int, inner: int, packed_dtype: torch.dtype) -> None:
    """Broken panels and steps of 32 k, tasks that follow each other, more than the 2048 k that AMX does at once."""
    packed, x = linear.pack(variant, drawn(columns, inner), None, BF16, packed_dtype), drawn(600, inner)
    whole = linear.linear(variant, x, packed)
    parts = torch.cat([linear.linear(variant, x[row : row + 37], packed) for row in range(0, 600, 37)])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("packed_dtype", [BF16, torch.int8])
def test_bits_are_independent_of_threads(variant: CDLL, packed_dtype: torch.dtype) -> None:
    packed, x = linear.pack(variant, drawn(300, 200), None, BF16, packed_dtype), drawn(50, 200)
    outs = []
    for count in (1, 2, 5):
        variant.fissile_set_threads(count)
        outs.append(linear.linear(variant, x, packed))
    variant.fissile_set_threads(1)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_of_a_view_heads_and_no_rows(variant: CDLL) -> None:
    weight, x = drawn(3, 20, 24), drawn(9, 3 * 31).view(9, 3, 31)[:, :, 5:29]
    out = linear.head_linear(variant, x, linear.pack_heads(variant, weight, BF16))
    for head in range(3):
        packed = linear.pack(variant, weight[head], None, BF16)
        assert torch.equal(linear.linear(variant, x[:, head], packed), out[:, head])
        assert torch.equal(linear.linear(variant, x[:, head].contiguous(), packed), out[:, head])
    assert linear.linear(variant, torch.empty(0, 24, dtype=BF16), packed).shape == (0, 20)


def test_experts_with_any_number_of_rows(variant: CDLL) -> None:
    """A row's experts among other rows, where an expert gets from no row to more than a tile of them."""
    weights = [ExpertWeights(drawn(80, 48 + e)[:, :48] / 7, drawn(48, 40 + e)[:, :40] / 7) for e in range(3)]
    packed = experts.pack(variant, iter(weights), 0, None, BF16)
    x, shares = drawn(60, 48), torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    ids = torch.stack([torch.arange(60) % 3, torch.full((60,), 2)], 1).where(torch.arange(60)[:, None] % 5 > 0, 1)
    whole = experts.moe(variant, x, ids, shares, packed)
    for rows in (slice(0, 1), slice(3, 20), slice(7, 60)):
        assert torch.equal(experts.moe(variant, x[rows], ids[rows], shares[rows], packed), whole[rows])
    library.select(variant, library.PLAIN)
    plain = experts.moe(variant, x, ids, shares, packed)
    torch.testing.assert_close(whole, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))


@pytest.mark.parametrize("packed_dtype", [BF16, torch.int8])
@pytest.mark.parametrize("columns", [64, 320, 40])
def test_product_with_activation_has_bits_of_two_operations(
    variant: CDLL, columns: int, packed_dtype: torch.dtype
) -> None:
    """40 columns are no whole panels of gates; more than 256 rows are two tasks."""
    packed = linear.pack(variant, drawn(columns, 96) / 4, drawn(columns), BF16, packed_dtype)
    for rows in (1, 16, 17, 40, 300):
        x = drawn(rows, 96)
        expected = elementwise.silu_and_mul(variant, linear.linear(variant, x, packed))
        assert torch.equal(linear.gated_linear(variant, x, packed), expected), f"{rows} rows"


@pytest.mark.parametrize("packed_dtype", [BF16, torch.int8])
@pytest.mark.parametrize("lines", [3, 4, 7])
def test_rows_read_in_place_have_bits_of_copied_rows(variant: CDLL, lines: int, packed_dtype: torch.dtype) -> None:
    """Rows an odd and an even number of lines apart, with NaN after the last one and beside them."""
    inner = 96
    packed = linear.pack(variant, drawn(64, inner) / 4, None, BF16, packed_dtype)
    for rows in (1, 5, 16, 17, 33, 48):
        memory = linear.aligned(48 * lines * 64).view(BF16).view(48, lines * 32)
        memory[:] = torch.nan
        memory[:rows, :inner] = drawn(rows, inner)
        x = memory[:rows, :inner]
        # Off by two bytes, they are copied.
        apart = linear.aligned(rows * inner * 2 + 2).view(BF16)[1:].view(rows, inner)
        apart[:] = x
        assert torch.equal(linear.gated_linear(variant, x, packed, 48), linear.gated_linear(variant, apart, packed)), (
            f"{rows} rows"
        )


def test_float32_bits_equal_base_set(variant: CDLL) -> None:
    weight, x = drawn(40, 30).float(), drawn(9, 30).float()
    outs = []
    for name in (None, "avx2"):
        if name is not None:
            library.select(variant, name)
        outs.append(linear.linear(variant, x, linear.pack(variant, weight, None, torch.float32)))
    assert torch.equal(outs[0], outs[1])


def test_overflowed_row_gives_nan_without_affecting_others(variant: CDLL) -> None:
    packed, x = linear.pack(variant, drawn(40, 45), None, BF16), drawn(20, 45)
    whole = linear.linear(variant, x, packed)
    x[4, 7] = torch.nan
    spoiled = linear.linear(variant, x, packed)
    assert spoiled[4].isnan().all()
    spoiled[4] = whole[4]
    assert torch.equal(spoiled, whole)


def test_denormals_are_zeros(variant: CDLL) -> None:
    """As the instructions do, whatever the thread's own mode."""
    tiny = torch.full((1, 64), 1e-39).to(BF16)
    assert tiny.ne(0).all()
    out = linear.linear(variant, tiny, linear.pack(variant, torch.full((16, 64), 1e9), None, BF16))
    assert out.eq(0).all()


@pytest.mark.parametrize("packed_dtype", [BF16, torch.int8])
def test_denormal_bias_is_equal_for_few_and_many_rows(variant: CDLL, packed_dtype: torch.dtype) -> None:
    packed = linear.pack(variant, torch.zeros(20, 40), torch.full((20,), 3e-39), BF16, packed_dtype)
    whole = linear.linear(variant, drawn(40, 40), packed)
    for rows in COUNTS[:19]:
        assert torch.equal(linear.linear(variant, drawn(rows, 40), packed), whole[:rows]), f"{rows} rows"


@pytest.mark.parametrize("name", ["amx", "avx512bf16"])
@pytest.mark.parametrize("packed_dtype", [BF16, torch.int8])
def test_processor_instructions_equal_emulation(native: CDLL, name: str, packed_dtype: torch.dtype) -> None:
    """Equal to the bit, with denormals among inputs and outputs."""
    weight, x = drawn(70, 397), drawn(29, 397)
    x[:, ::5] *= 1e-38
    outs = []
    for isa in (f"{name}_emulated", name):
        select_or_skip(native, isa)
        packed = linear.pack(native, weight, None, BF16, packed_dtype)
        outs.append([linear.linear(native, x[:rows], packed) for rows in (*range(1, 17), 29)])
        library.select(native)
    assert all(torch.equal(*pair) for pair in zip(*outs, strict=True))
