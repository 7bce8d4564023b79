"""Native products with weights in codes: against float64 over the dequantized weights, and a row's bits everywhere."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace

import pytest
import torch

from kernels.cpu import experts, linear
from kernels.grouped_weight import GroupedWeight, JoinedWeight, nearest_codes, stacked_weights, unfactored, widened
from kernels.interface import ExpertWeights, PackedFormat
from kernels.quantized_weight import as_floats
from tests.stored_weights import grouped_weight

pytestmark = pytest.mark.each_value

F16, BF16, F32, I8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
# bits, columns that share a scale, dtype of the scales; with zeros, with offsets, in an order by activation.
FORMS = [
    (4, 32, BF16, False, False, False),
    (4, 32, F32, True, True, False),
    (4, 16, F16, True, False, False),
    (4, 128, F16, True, False, True),
    (4, 384, BF16, False, False, False),
    (4, 5000, F16, False, False, True),
    (8, 16, F32, True, False, False),
    (8, 32, F16, False, False, False),
    (8, 64, BF16, True, True, True),
    (5, 64, F16, False, True, False),
    (6, 128, BF16, True, False, True),
]
# Those of Q4_K, Q5_K and Q6_K: scales in codes, with factors.
FACTORED = [(4, 32, I8, True, True, False), (5, 32, I8, True, True, False), (6, 16, I8, False, False, False)]
# (N, K) on both sides of panels (16), blocks of k (128), tasks (64 columns) and vectors; odd ones too.
SHAPES = [(70, 301), (33, 24), (1, 1), (17, 129), (150, 384)]
EPSILON = {F32: 4e-7, BF16: 2.0**-8}


def drawn(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    return torch.randn(n, generator=generator).to(dtype), torch.randn(rows, k, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", FORMS + FACTORED, ids=str)
def test_products_equal_float64_products(
    each_attention: CDLL, form: tuple[int, int, torch.dtype, bool, bool, bool], dtype: torch.dtype
) -> None:
    for n, k in SHAPES:
        weight = grouped_weight(n, k, *form)
        bias, x = drawn(n, k, 9, dtype)
        out = linear.linear(each_attention, x, linear.pack_codes(each_attention, weight, bias, dtype))
        worth = as_floats(weight).double()
        exact = x.double() @ worth.t() + bias.double()
        # Of the sum's largest summands: codes and zero points are multiplied apart.
        size = x.double().abs() @ (worth.abs() + as_floats(replace(weight, codes=weight.codes * 0)).double().abs()).t()
        assert (out.double() - exact).abs().le(EPSILON[dtype] * (size + bias.double().abs())).all(), (n, k)


@pytest.mark.parametrize("columns", [1, 2, 4, 8])
def test_whole_rows_that_are_shorter_than_any_group(native: CDLL, columns: int) -> None:
    weight = grouped_weight(3, columns, 4, columns, F32, False, False, False)
    _, x = drawn(3, columns, 2, F32)
    packed = linear.pack_codes(native, weight, None, F32)
    assert packed.code >= 0
    assert torch.allclose(linear.linear(native, x, packed), x @ as_floats(weight).t(), atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", FORMS[:4] + FORMS[6:] + FACTORED, ids=str)
def test_row_bits_are_independent_of_other_rows(
    each_attention: CDLL, form: tuple[int, int, torch.dtype, bool, bool, bool], dtype: torch.dtype
) -> None:
    weight = grouped_weight(70, 301, *form)
    bias, x = drawn(70, 301, 70, dtype)
    packed = linear.pack_codes(each_attention, weight, bias, dtype)
    whole = linear.linear(each_attention, x, packed)
    for count in range(1, 71):
        assert torch.equal(linear.linear(each_attention, x[:count], packed), whole[:count]), count
        assert torch.equal(linear.linear(each_attention, x[-count:], packed), whole[-count:]), count
    each_attention.fissile_set_threads(3)
    assert torch.equal(linear.linear(each_attention, x, packed), whole)
    assert torch.equal(linear.linear(each_attention, x[::3], packed), whole[::3])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("form", FACTORED, ids=str)
def test_scales_in_codes_and_few_bits_give_the_bits_of_wide_ones(
    each_attention: CDLL, form: tuple[int, int, torch.dtype, bool, bool, bool], dtype: torch.dtype
) -> None:
    """The product is to the bit that of the same numbers in 8 bits with float32 scales and offsets."""
    for n, k in SHAPES:
        weight = grouped_weight(n, k, *form)
        plain, wide = unfactored(weight), widened(weight)
        assert wide.bits == (4 if weight.bits == 4 else 8)
        for rows in (1, 3, 9, 30):
            _, x = drawn(n, k, rows, dtype)
            out, *others = (
                linear.linear(each_attention, x, linear.pack_codes(each_attention, each, None, dtype))
                for each in (weight, plain, wide)
            )
            assert all(torch.equal(out, other) for other in others), (n, k, rows)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weights_of_several_forms_multiply_as_one_with_the_bits_of_each(
    each_attention: CDLL, dtype: torch.dtype
) -> None:
    parts = [grouped_weight(n, 300, *form) for n, form in zip((70, 33, 16), FACTORED, strict=True)]
    weight = stacked_weights([parts[0], parts[0], *parts[1:]])
    assert isinstance(weight, JoinedWeight)
    assert [part.shape[0] for part in weight.parts] == [140, 33, 16]
    packed = linear.pack_any(each_attention, weight, drawn(189, 300, 1, dtype)[0], dtype, None)
    biases = torch.split(drawn(189, 300, 1, dtype)[0], [70, 70, 33, 16])
    each_attention.fissile_set_threads(2)
    for rows in (1, 9, 30):
        _, x = drawn(70, 300, rows, dtype)
        alone = [
            linear.linear(each_attention, x, linear.pack_codes(each_attention, part, bias, dtype))
            for part, bias in zip([parts[0], *parts], biases, strict=True)
        ]
        assert torch.equal(linear.linear(each_attention, x, packed), torch.cat(alone, 1))
        assert torch.equal(linear.argmax(each_attention, x, packed, 189), torch.cat(alone, 1).float().max(1).indices)
        assert linear.linear(each_attention, x[:0], packed).shape == (0, 189)


def test_gates_and_ups_of_several_forms(each_attention: CDLL) -> None:
    weight = stacked_weights([grouped_weight(32, 256, *form) for form in FACTORED[1:]])
    _, x = drawn(64, 256, 20, F32)
    packed = linear.pack_any(each_attention, weight, None, F32, None)
    gates, ups = linear.linear(each_attention, x, packed).chunk(2, 1)
    expected = torch.nn.functional.silu(gates) * ups
    assert torch.allclose(linear.gated_linear(each_attention, x, packed), expected, rtol=1e-5, atol=1e-5)


def test_first_of_the_largest_products(each_attention: CDLL) -> None:
    weight = grouped_weight(1100, 130, *FORMS[3])
    _, x = drawn(1100, 130, 20, BF16)
    packed = linear.pack_codes(each_attention, weight, None, BF16)
    whole = linear.linear(each_attention, x, packed)
    for limit in (1, 600, 1100):
        places = linear.argmax(each_attention, x, packed, limit)
        assert torch.equal(places, whole[:, :limit].float().max(1).indices)


def test_gates_and_ups_in_codes(each_attention: CDLL) -> None:
    weight = grouped_weight(64, 96, *FORMS[1])
    _, x = drawn(64, 96, 20, F32)
    packed = linear.pack_codes(each_attention, weight, None, F32)
    gates, ups = linear.linear(each_attention, x, packed).chunk(2, 1)
    expected = torch.nn.functional.silu(gates) * ups
    assert torch.allclose(linear.gated_linear(each_attention, x, packed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("down", [FORMS[7], (4, 16, F16, True, False, True)], ids=["in order", "ordered"])
def test_experts_in_codes_equal_dequantized(
    each_attention: CDLL, dtype: torch.dtype, down: tuple[int, int, torch.dtype, bool, bool, bool]
) -> None:
    """Experts whose codes differ in form get one; `down` has another than `gate_up`, perhaps in an order."""
    ups: list[GroupedWeight | JoinedWeight] = [
        grouped_weight(64, 96, *form) for form in (FORMS[0], FORMS[2], FORMS[8 if down[5] else 6])
    ]
    if not down[5]:
        ups[1] = stacked_weights([grouped_weight(32, 96, *form) for form in FACTORED[1:]])
    downs = [grouped_weight(96, 32, *down) for _ in range(3)]
    if down[5]:
        downs[1] = replace(downs[1], order=torch.arange(32).flip(0))
    in_codes = [ExpertWeights(*each) for each in zip(ups, downs, strict=True)]
    as_values = [ExpertWeights(as_floats(one.gate_up), as_floats(one.down)) for one in in_codes]
    x = drawn(1, 96, 11, dtype)[1]
    ids = torch.arange(22).view(11, 2) % 3
    shares = torch.full((11, 2), 0.5)
    outs = [
        experts.moe(each_attention, x, ids, shares, experts.pack(each_attention, each, 0, None, dtype)).double()
        for each in (in_codes, as_values)
    ]
    tolerance = 1e-5 if dtype == F32 else 0.03
    assert torch.allclose(outs[0], outs[1], rtol=tolerance, atol=tolerance * float(outs[1].abs().max()))


def test_experts_in_codes_and_floats_become_floats(native: CDLL) -> None:
    """A single expert is in floats if its gates and ups order their columns differently."""
    ups, downs = ([grouped_weight(n, k, *FORMS[8]) for _ in range(2)] for n, k in ((64, 96), (96, 32)))
    mixed = [ExpertWeights(as_floats(ups[0]), downs[0]), ExpertWeights(ups[1], downs[1])]
    floats = [ExpertWeights(as_floats(up), down) for up, down in zip(ups, downs, strict=True)]
    x, ids, shares = drawn(1, 96, 5, F32)[1], torch.arange(10).view(5, 2) % 2, torch.full((5, 2), 0.5)
    outs = [experts.moe(native, x, ids, shares, experts.pack(native, each, 0, None, F32)) for each in (mixed, floats)]
    assert torch.equal(*outs)


@pytest.mark.parametrize(("n", "k"), [(40, 320), (7, 45)])
def test_nearest_codes_have_the_least_error_of_the_tried_scales(n: int, k: int) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = nearest_codes(weight)
    assert (made.bits, made.group, made.scales.dtype) == (4, 32, BF16)
    numbers, scales = weight.double(), made.spread(made.scales).double()
    nearest = (numbers / scales).round().clamp(-8, 7)
    assert torch.equal(made.codes.double() - 8, nearest)
    error = (as_floats(made).double() - numbers).square()
    own = torch.nn.functional.pad(error, (0, -k % 32)).view(n, -1, 32).sum(2)
    padded = torch.nn.functional.pad(numbers, (0, -k % 32)).view(n, -1, 32)
    for divisor in (-7.0, -7.4, -8.0, -9.0, 6.4, 7.0, 7.8):
        tried = (padded.gather(2, padded.abs().max(2, keepdim=True).indices) / divisor).bfloat16().double()
        other = ((padded / tried).round().clamp(-8, 7) * tried - padded).square().sum(2)
        assert (own <= other * (1 + 1e-5)).all()


@pytest.mark.parametrize(("n", "k"), [(40, 320), (7, 45), (3, 1)])
def test_native_rounding_equals_the_reference(native: CDLL, n: int, k: int) -> None:
    for dtype in (F32, BF16):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        weight[0] *= 1e-38
        made, expected = linear.nearest_codes(native, weight), nearest_codes(weight)
        assert torch.equal(made.codes, expected.codes)
        assert torch.equal(made.scales, expected.scales)


def test_codes_of_zeros_and_of_numbers_that_are_not_finite(native: CDLL) -> None:
    weight = torch.zeros(3, 64)
    weight[1, 3], weight[2, 40] = torch.nan, torch.inf
    made = nearest_codes(weight)
    assert not as_floats(made)[0].any()
    out = linear.linear(native, torch.ones(1, 64), linear.pack_codes(native, made, None, F32))
    assert out[0, 0] == 0
    assert not out[0, 1:].isfinite().any()


def test_weights_are_rounded_when_they_are_packed(native: CDLL) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    x = drawn(40, 96, 5, F32)[1]
    packed = linear.pack_any(native, weight, None, F32, linear.packed_dtype(PackedFormat(torch.quint4x2)))
    expected = linear.pack_codes(native, nearest_codes(weight), None, F32)
    assert torch.equal(packed.panels, expected.panels)
    stored: GroupedWeight = grouped_weight(40, 96, *FORMS[6])
    again = linear.pack_any(native, stored, None, F32, torch.quint4x2)
    assert torch.equal(again.panels, linear.pack_codes(native, nearest_codes(as_floats(stored)), None, F32).panels)
    assert torch.equal(linear.linear(native, x, packed), linear.linear(native, x, expected))
