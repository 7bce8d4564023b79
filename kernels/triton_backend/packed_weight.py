"""Weights of matrix products as the kernels read them: floats, numbers or codes of 8 bits or of 4, with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import float8
from kernels.grouped_weight import GroupedWeight, JoinedWeight, nearest_codes, widened
from kernels.interface import GROUPED, AnyWeight, PackedFormat, QuantizedFormat, QuantizedWeight
from kernels.quantized_weight import as_floats
from kernels.triton_backend import codes
from kernels.triton_backend.target import CompileTarget

# Dtypes of the models that these kernels support.
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Numbers of K that share a scale, unless a whole row does.
GROUP = 128
# As MXFP4 has it (OCP MX specification 1.0): numbers that share a power of two.
_FP4_GROUP = 32
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# Weights are quantized in pieces of this many numbers, to need little extra memory.
_PIECE = 1 << 26


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], or one for each of H heads.

    Attributes:
        numbers: [N, K] or [H, N, K], contiguous, in `dtype`, int8 or FP8; or FP4, uint8 [N, K' / 2] with K' the next
            multiple of 128: of 128 numbers in 64 bytes, byte j has number j in its lower half, 64 + j in its upper one.
            Codes as `codes` says.
        scales: None for floats; float32 [K / 128, n] where scales change along K, n being N / `row_grain` (both are
            rounded up), else float32 [N]; for FP4 exponents with a bias of 127, uint8 [N, K' / 32]; for codes of each
            group, [G', N].
        bias: float32 [N], rounded to `dtype` before, or None.
        dtype: the model's.
        columns: N.
        inner: K.
        row_grain: rows of the weight that share a scale.
        quantizes_rows: whether x is quantized too, row by row.
        codes: form of a weight in codes; None for all others.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    dtype: torch.dtype
    columns: int
    inner: int
    row_grain: int = 1
    quantizes_rows: bool = False
    codes: codes.CodeForm | None = None


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None,
    device: torch.device,
) -> PackedWeight:
    """Packs a weight [N, K] and a bias [N] of any float dtype; may share their memory.

    Args:
        dtype: the model's.
        packed_dtype: None or `dtype`; int8 or FP8 for the nearest multiples of a float32 scale for each row and 128
            numbers of K; quint4x2 for codes (`nearest_codes`). FP8 must be the target's own (`Target.fp8`).

    Raises:
        ValueError: another packed dtype.
    """
    if packed_dtype not in (None, dtype, torch.int8, torch.quint4x2, *_FP8):
        raise ValueError(f"weights in {dtype} cannot be packed as {packed_dtype}")
    placed = _placed(weight, dtype, device)
    if packed_dtype == torch.quint4x2:
        return from_codes(nearest_codes(placed), bias, dtype, device)
    packed_bias = _packed_bias(bias, dtype, device)
    if packed_dtype in (None, dtype):
        return PackedWeight(placed, None, packed_bias, dtype, *weight.shape)
    numbers, scales = quantized(placed, packed_dtype, GROUP)
    return PackedWeight(numbers, scales.t().contiguous(), packed_bias, dtype, *weight.shape)


def pack_w8a8(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    packed_dtype: torch.dtype,
    device: torch.device,
) -> PackedWeight:
    """As `pack`, to int8 or FP8 with a scale for each row; x is quantized to the same dtype when it is multiplied."""
    if packed_dtype not in (torch.int8, *_FP8):
        raise ValueError(f"rows cannot be quantized to {packed_dtype}")
    numbers, scales = quantized(_placed(weight, dtype, device), packed_dtype, weight.shape[1])
    packed_bias = _packed_bias(bias, dtype, device)
    columns, inner = weight.shape
    return PackedWeight(numbers, scales.flatten(), packed_bias, dtype, columns, inner, quantizes_rows=True)


def pack_heads(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Packs a matrix for each head, [Hq, N, K] of any float dtype; may share their memory."""
    return PackedWeight(_placed(weight, dtype, device), None, None, dtype, *weight.shape[1:])


def keeps(stored: QuantizedFormat, dtype: torch.dtype, target: CompileTarget) -> bool:
    """True if a model in `dtype` can multiply a checkpoint's numbers without conversion loss.

    E4M3FNUZ has numbers that E4M3FN lacks (`other_fp8`).
    """
    if dtype not in MODEL_DTYPES:
        return False
    if stored.numbers in _FP8:
        return target.has_fp8 and stored.numbers in (torch.float8_e4m3fn, target.fp8)
    return stored == GROUPED or stored.numbers == (torch.uint8 if stored.quant_type == "per_1x32" else torch.int8)


def kept(
    weight: AnyWeight, dtype: torch.dtype, packed_format: PackedFormat | None, target: CompileTarget
) -> torch.Tensor | QuantizedWeight | GroupedWeight:
    """A weight as stored if `keeps` allows it for models in `dtype`, codes in 4 or 8 bits; otherwise as floats."""
    if isinstance(weight, torch.Tensor) or packed_format is not None:
        return as_floats(weight)
    if isinstance(weight, GroupedWeight | JoinedWeight):
        return widened(weight) if keeps(GROUPED, dtype, target) else as_floats(weight)
    return weight if keeps(weight.format, dtype, target) else as_floats(weight)


def from_quantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, fp8: torch.dtype, device: torch.device
) -> PackedWeight:
    """Packs a weight for which `keeps` is true in its stored format; see `from_numbers`."""
    if weight.quant_type == "per_1x32":
        return from_mxfp4(weight.numbers, weight.scales, bias, dtype, device)
    return from_numbers(weight.numbers, weight.scales, bias, dtype, fp8, device)


def from_codes(
    weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> PackedWeight:
    """Packs a weight [N, K] in its codes, and a bias [N] or None."""
    numbers, scales, form = codes.laid_out(weight, device)
    return PackedWeight(numbers, scales, _packed_bias(bias, dtype, device), dtype, *weight.shape, codes=form)


def from_numbers(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fp8: torch.dtype,
    device: torch.device,
) -> PackedWeight:
    """Packs a checkpoint's numbers unchanged.

    Args:
        numbers: [N, K], int8 or either FP8.
        scales: of any float dtype: [] or [1] for the tensor, [N] or [N, 1] for rows, [N, K / 128] for groups or [N /
            128, K / 128] for blocks, rounded up.
        bias: [N] or None.
        dtype: the model's.
        fp8: the target's FP8, to which FP8 numbers are converted.

    Raises:
        ValueError: scales of another shape.
    """
    rows, inner = numbers.shape
    numbers, scales = numbers.to(device), scales.to(device, torch.float32)
    if numbers.dtype in _FP8 and numbers.dtype != fp8:
        numbers, scales = other_fp8(numbers, scales, fp8)
    grain, laid_out = _laid_out(scales, rows, inner)
    packed_bias = _packed_bias(bias, dtype, device)
    return PackedWeight(numbers.contiguous(), laid_out, packed_bias, dtype, rows, inner, grain)


def from_mxfp4(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedWeight:
    """Packs MXFP4 as gpt-oss stores it: uint8 [N, K / 2], the lower halves first, and exponents uint8 [N, K / 32].

    Raises:
        ValueError: the shapes do not go together.
    """
    rows, inner = numbers.shape[0], 2 * numbers.shape[1]
    if scales.shape != (rows, inner // _FP4_GROUP) or inner % _FP4_GROUP:
        raise ValueError(f"MXFP4 scales {list(scales.shape)} do not go with numbers {list(numbers.shape)}")
    numbers = numbers.to(device)
    unpacked = torch.stack((numbers & 15, numbers >> 4), dim=2).view(rows, inner)
    unpacked = torch.nn.functional.pad(unpacked, (0, -inner % GROUP)).view(rows, -1, 2, GROUP // 2)
    padded = torch.nn.functional.pad(scales.to(device), (0, -(inner // _FP4_GROUP) % (GROUP // _FP4_GROUP)))
    halves = (unpacked[:, :, 0] | unpacked[:, :, 1] << 4).reshape(rows, -1)
    return PackedWeight(halves, padded.contiguous(), _packed_bias(bias, dtype, device), dtype, rows, inner)


def quantized(weight: torch.Tensor, dtype: torch.dtype, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight [N, K]: multiples [N, K] of scales float32 [N, groups], one per row and `group` numbers of K.

    A scale is the largest number divided by the largest of `dtype`; int8 goes from -127 to 127. A group with a number
    that is not finite has no finite scale.
    """
    rows, inner = weight.shape
    numbers = torch.empty(rows, inner, dtype=dtype, device=weight.device)
    scales = torch.empty(rows, -(-inner // group), device=weight.device)
    step = max(1, _PIECE // max(1, inner))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        numbers[piece], scales[piece] = _quantized_piece(weight[piece], dtype, group)
    return numbers, scales


def _quantized_piece(weight: torch.Tensor, dtype: torch.dtype, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, inner = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -inner % group)).view(rows, -1, group)
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = groups.abs().amax(2, keepdim=True) / largest
    shrunk = (groups / scales.where(scales > 0, 1.0)).nan_to_num(0.0).clamp(-largest, largest)
    numbers = shrunk.round().to(dtype) if dtype == torch.int8 else shrunk.to(dtype)
    return numbers.view(rows, -1)[:, :inner], scales.squeeze(2)


def _placed(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Moves a weight to the device and rounds it there."""
    return weight.to(device).to(dtype).contiguous()


def _packed_bias(bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    return None if bias is None else bias.to(device).to(dtype, copy=True).float()


def other_fp8(numbers: torch.Tensor, scales: torch.Tensor, fp8: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in the other FP8 dtype. A byte means twice as much in E4M3FN as in E4M3FNUZ, which has no -0.

    In the other direction some numbers below 2^-6 lose half a step, because E4M3FN has fewer there; all others are
    exact.
    """
    if fp8 == torch.float8_e4m3fn:
        return numbers.float().to(fp8), scales
    raw = float8.raw(numbers)
    nan, zero = torch.full_like(raw, 128), torch.zeros_like(raw)
    return torch.where((raw & 127) == 127, nan, torch.where(raw == 128, zero, raw)).view(fp8), scales * 2


def _laid_out(scales: torch.Tensor, rows: int, inner: int) -> tuple[int, torch.Tensor]:
    """Number of rows that share a scale, and the scales in the layout of `PackedWeight`."""
    groups = -(-inner // GROUP)
    if scales.numel() == 1:
        return 1, scales.reshape(1).expand(rows).contiguous()
    if scales.shape in ((rows,), (rows, 1)):
        return 1, scales.reshape(rows).contiguous()
    for grain in (1, GROUP):
        if scales.shape == (-(-rows // grain), groups):
            return grain, scales.t().contiguous()
    raise ValueError(f"scales {list(scales.shape)} do not go with a weight [{rows}, {inner}]")
