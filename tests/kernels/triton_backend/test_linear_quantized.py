"""Matrix products with 8-bit and 4-bit weights: against float64 over the dequantized weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import float8
from kernels.triton_backend import linear
from kernels.triton_backend.packed_weight import PackedWeight, from_mxfp4, from_numbers, pack, pack_w8a8
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from tests.kernels.triton_backend.test_linear import CPU, INVARIANT, drawn
from tests.quantizers import SCHEMES, Scheme, fp4_table, fp8_table

pytestmark = pytest.mark.each_value

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BLOCK = 128


def assert_close(out: torch.Tensor, x: torch.Tensor, worth: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within one rounding of float64 over the dequantized weight, and errors of float32 sums."""
    exact = x.double() @ worth.double().t() + (0.0 if bias is None else bias.double())
    size = x.double().abs() @ worth.double().abs().t() + (0.0 if bias is None else bias.double().abs())
    assert bool(((out.double() - exact).abs() <= 0.5 * torch.finfo(out.dtype).eps * exact.abs() + 3e-6 * size).all())


def multiples(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest multiples of a scale for each row and block of K, which is a 127th of the largest: both [N, K]."""
    n, k = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -k % BLOCK)).view(n, -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    numbers = (blocks / scales.where(scales > 0, 1.0)).round()
    return numbers.view(n, -1)[:, :k], scales.expand_as(blocks).reshape(n, -1)[:, :k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 129), (33, 300)])
def test_int8_weights_are_multiples_of_their_scales(dtype: torch.dtype, n: int, k: int, settings: Settings) -> None:
    """The rule of the CPU's kernels (tests/unit/kernels/cpu/test_linear.py)."""
    weight, bias, x = drawn(n, k, 5, dtype)
    weight[0, : min(k, BLOCK)] = 0.0
    packed = pack(weight, bias, dtype, torch.int8, CPU)
    numbers, scales = multiples(weight)
    assert torch.equal(packed.numbers, numbers.char())
    assert packed.scales is not None
    assert torch.equal(packed.scales.t().repeat_interleave(BLOCK, 1)[:, :k], scales)
    assert_close(linear.linear(x, packed, settings), x, numbers.double() * scales.double(), bias)


def test_large_weight_quantized_in_pieces_equals_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(20, 200)
    whole = pack(weight, None, torch.float32, torch.int8, CPU)
    monkeypatch.setattr("kernels.triton_backend.packed_weight._PIECE", 700)
    pieces = pack(weight, None, torch.float32, torch.int8, CPU)
    assert torch.equal(pieces.numbers, whole.numbers)
    assert pieces.scales is not None
    assert whole.scales is not None
    assert torch.equal(pieces.scales, whole.scales)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.int8, FN, FNUZ])
def test_block_with_nan_weight_gives_nan(number: float, dtype: torch.dtype) -> None:
    weight, _, x = drawn(20, 300, 3, torch.float32)
    weight[2, 200] = number
    for packed in (pack(weight, None, torch.float32, dtype, CPU), pack_w8a8(weight, None, torch.float32, dtype, CPU)):
        out = linear.linear(x, packed, INVARIANT)
        assert out[:, 2].isnan().all()
        assert out[:, :2].isfinite().all()
        assert out[:, 3:].isfinite().all()


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_fp8_weights_have_the_scales_of_int8(dtype: torch.dtype, settings: Settings) -> None:
    weight, bias, x = drawn(33, 300, 5, torch.bfloat16)
    packed = pack(weight, bias, torch.bfloat16, dtype, CPU)
    assert packed.scales is not None
    scales = packed.scales.t().repeat_interleave(BLOCK, 1)[:, :300].double()
    worth = packed.numbers.double() * scales
    # Half a step at the largest numbers, half the smallest step below.
    assert bool(((worth - weight.double()).abs() <= weight.double().abs() / 16 + scales * 2**-10).all())
    assert_close(linear.linear(x, packed, settings), x, worth, bias)


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.number != "fp4"])
def test_checkpoint_numbers_are_packed_unchanged(scheme: str) -> None:
    weight, bias, x = drawn(130, 150, 2, torch.float32)
    # Most meet the FP8 that they do not have.
    fp8 = FN if SCHEMES[scheme].number == "fnuz" or scheme in ("deepseek", "w8a8-fp8") else FNUZ
    numbers, scales, worth = stored(SCHEMES[scheme], weight)
    packed = from_numbers(numbers, scales, bias, torch.float32, fp8, CPU)
    assert packed.numbers.dtype in (torch.int8, fp8)
    assert_close(linear.linear(x, packed, INVARIANT), x, worth, bias)


def stored(scheme: Scheme, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers and scales as a checkpoint stores them, and the dequantized weight."""
    tensors, worth = scheme.quantize("", weight.numpy())
    numbers, scales = tensors[scheme.values_suffix], tensors[scheme.scales_suffix]
    dtypes = {"F8_E4M3": FN, "F8_E4M3FNUZ": FNUZ, "I8": torch.int8, "U8": torch.uint8}
    dtypes |= {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
    values = torch.from_numpy(numbers[1]).view(dtypes[numbers[0]])
    return values, torch.from_numpy(scales[1]).view(dtypes[scales[0]]), torch.from_numpy(worth)


def test_fp8_formats_convert_into_each_other() -> None:
    """E4M3FN in E4M3FNUZ exactly; the other way all but odd multiples of the smallest number."""
    raw = torch.arange(256, dtype=torch.uint8)[:, None]
    for given, fp8, fnuz in ((FN, FNUZ, False), (FNUZ, FN, True)):
        packed = from_numbers(raw.view(given), torch.ones(1), None, torch.float32, fp8, CPU)
        assert packed.scales is not None
        found, expected = packed.numbers.double() * packed.scales[:, None], torch.from_numpy(fp8_table(fnuz)).double()
        assert torch.equal(found.isnan().flatten(), expected.isnan())
        inexact = (found.flatten() - expected).abs().nan_to_num()
        assert float(inexact.max()) == (2.0**-10 if fnuz else 0.0)
        assert bool((expected[inexact > 0].abs() < 2.0**-6).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [32, 128, 416])
def test_mxfp4(dtype: torch.dtype, k: int, settings: Settings) -> None:
    weight, bias, x = drawn(33, k, 5, torch.float32)
    numbers, scales, worth = stored(SCHEMES["compressed-tensors-mxfp4"], weight)
    packed = from_mxfp4(numbers, scales, bias.to(dtype), dtype, CPU)
    out = linear.linear(x.to(dtype), packed, settings)
    assert out.dtype == dtype
    assert_close(out, x.to(dtype), worth, bias.to(dtype))


def test_every_mxfp4_number_and_exponent() -> None:
    """All 16 numbers at exponents that float32 has whole, below its normal numbers, and NaN."""
    table = torch.from_numpy(fp4_table())
    numbers = torch.arange(16, dtype=torch.uint8).repeat(2).view(-1, 2)
    numbers = (numbers[:, 0] | numbers[:, 1] << 4).view(1, 16)
    exponents = [0, 1, 2, 100, 127, 130, 250, 255]
    packed = from_mxfp4(
        numbers.repeat(8, 1), torch.tensor(exponents, dtype=torch.uint8)[:, None], None, torch.float32, CPU
    )
    out = linear.linear(torch.eye(32), packed, INVARIANT).t()
    expected = torch.tensor([math.ldexp(1.0, each - 127) for each in exponents[:-1]]).double()[:, None]
    assert torch.equal(out[:-1].double(), (expected * table.repeat(2).double()))
    assert out[-1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, FN, FNUZ])
@pytest.mark.parametrize("k", [1, 100, 5000])
def test_rows_are_quantized_by_their_largest_number(dtype: torch.dtype, k: int) -> None:
    x = torch.randn(4, 2 * k, generator=torch.Generator().manual_seed(k)).bfloat16()[:, :k]
    x[1] = 0.0
    numbers, scales = linear.quantize_rows(x, dtype)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    expected = x.float().abs().amax(1, keepdim=True) / largest
    assert torch.equal(scales, expected)
    shrunk = x.float() / expected.where(expected > 0, 1.0)
    wanted = shrunk.round().char() if dtype == torch.int8 else shrunk.to(dtype)
    assert numbers.dtype == dtype
    assert torch.equal(float8.raw(numbers), float8.raw(wanted))
    none, no_scales = linear.quantize_rows(x[:0], dtype)
    assert (none.shape, no_scales.shape) == ((0, k), (0, 1))


@pytest.mark.parametrize("packed_dtype", [torch.int8, FN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_and_weight_of_8_bits(packed_dtype: torch.dtype, dtype: torch.dtype, settings: Settings) -> None:
    weight, bias, x = drawn(17, 270, 17, dtype)
    packed = pack_w8a8(weight, bias, dtype, packed_dtype, CPU)
    assert packed.scales is not None
    worth = packed.numbers.double() * packed.scales[:, None].double()
    numbers, scales = linear.quantize_rows(x, packed_dtype)
    out = linear.linear(x, packed, settings)
    assert out.dtype == dtype
    assert_close(out, numbers.double() * scales.double(), worth, bias)
    exact = x.double() @ weight.double().t() + bias.double()
    assert float((out.double() - exact).square().mean().sqrt()) < 0.05 * float(exact.square().mean().sqrt())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("packed_dtype", [torch.int8, FN])
def test_quantized_row_overflow_gives_nan(number: float, packed_dtype: torch.dtype) -> None:
    weight, _, x = drawn(20, 30, 3, torch.float32)
    packed = pack_w8a8(weight, None, torch.float32, packed_dtype, CPU)
    whole = linear.linear(x, packed, INVARIANT)
    x[1, 7] = number
    spoiled = linear.linear(x, packed, INVARIANT)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[::2], whole[::2])


def quantized_ways(weight: torch.Tensor) -> dict[str, PackedWeight]:
    dtype = torch.float32
    numbers, scales, _ = stored(SCHEMES["compressed-tensors-mxfp4"], weight)
    return {
        "int8": pack(weight, None, dtype, torch.int8, CPU),
        "fp8": pack(weight, None, dtype, FN, CPU),
        "fp4": from_mxfp4(numbers, scales, None, dtype, CPU),
        "int8 by int8": pack_w8a8(weight, None, dtype, torch.int8, CPU),
    }


def test_quantized_row_bits_are_independent_of_other_rows() -> None:
    """x has few bits and each number of the weight too, so products of tiles are exact (see test_linear)."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(33, 288, generator=generator)
    x = torch.randint(-3, 4, (17, 288), generator=generator).float()
    for name, packed in quantized_ways(weight).items():
        whole = linear.linear(x, packed, INVARIANT)
        for rows in ([4], [16, 4, 0]):
            assert torch.equal(linear.linear(x[rows], packed, INVARIANT), whole[rows]), (name, rows)


def test_argmax_of_a_quantized_head(settings: Settings) -> None:
    weight, _, x = drawn(40, 64, 5, torch.float32)
    for name, packed in quantized_ways(weight).items():
        expected = linear.linear(x, packed, settings)[:, :35].numpy().argmax(1)
        assert np.array_equal(linear.argmax(x, packed, 35, settings).numpy(), expected), name


def test_mismatched_shapes_are_refused() -> None:
    numbers = torch.zeros(256, 300, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scales \[2, 4\] do not go with a weight \[256, 300\]"):
        from_numbers(numbers, torch.ones(2, 4), None, torch.float32, FN, CPU)
    with pytest.raises(ValueError, match=r"MXFP4 scales \[256, 9\] do not go with numbers \[256, 160\]"):
        from_mxfp4(numbers[:, :160].byte(), torch.ones(256, 9).byte(), None, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"rows cannot be quantized to torch\.float16"):
        pack_w8a8(numbers.float(), None, torch.float32, torch.float16, CPU)


def test_parts_of_a_quantized_weight_are_split() -> None:
    """So the invariance above is of both ways."""
    from kernels.triton_backend.tiles import cut

    settings = Settings(TARGETS[INTERPRETER])
    assert cut(settings, "single", 1, 33, 288).split
    assert not cut(settings, "single", 17, 33, 288).split
