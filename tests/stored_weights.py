"""QuantizedWeights made by tests/quantizers.py, with what they are worth."""

from __future__ import annotations

import torch

from kernels.grouped_weight import GroupedWeight
from kernels.interface import QuantizedWeight, QuantType
from tests.quantizers import SCHEMES

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_QUANT_TYPES: dict[tuple[int, int], QuantType] = {
    (0, 0): "per_token",
    (1, 0): "per_token",
    (1, 32): "per_1x32",
    (1, 128): "per_1x128",
    (128, 128): "per_128x128",
}


def quantized_weight(scheme: str, weight: torch.Tensor) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight [N, K] as the scheme stores it, and its worth, float32 [N, K]."""
    method = SCHEMES[scheme]
    tensors, worth = method.quantize("", weight.float().numpy())
    stored, factors = tensors[method.values_suffix], tensors[method.scales_suffix]
    numbers = torch.from_numpy(stored[1]).view(_DTYPES[stored[0]])
    scales = torch.from_numpy(factors[1]).view(_DTYPES[factors[0]])
    quant_type = _QUANT_TYPES[method.block]
    if quant_type == "per_token":
        scales = scales.float().flatten().expand(len(weight)).contiguous()
    elif quant_type != "per_1x32":
        scales = scales.float()
    return QuantizedWeight(numbers, scales, quant_type), torch.from_numpy(worth)


def grouped_weight(
    rows: int,
    inner: int,
    bits: int,
    group: int,
    scale_dtype: torch.dtype,
    with_zeros: bool,
    with_offsets: bool,
    ordered: bool,
) -> GroupedWeight:
    """Random codes with the given parts; the same for the same arguments. int8 scales have factors, and zeros are 0."""
    draw = torch.Generator().manual_seed(rows * inner + group)
    groups = -(-inner // group)
    if scale_dtype == torch.int8:
        lowest = 0 if with_offsets else -128
        scales, offsets = (
            torch.randint(low, 64, (rows, groups), dtype=torch.int8, generator=draw) for low in (lowest, 0)
        )
        factors = torch.randn(rows, -(-inner // 128), 1 + with_offsets, generator=draw) / (1 << bits) / 32
        return GroupedWeight(
            torch.randint(0, 1 << bits, (rows, inner), dtype=torch.uint8, generator=draw),
            bits,
            group,
            scales,
            torch.zeros(rows, groups, dtype=torch.uint8) if with_zeros else None,
            offsets if with_offsets else None,
            torch.randperm(inner, generator=draw) if ordered else None,
            factors.half(),
        )
    return GroupedWeight(
        torch.randint(0, 1 << bits, (rows, inner), dtype=torch.uint8, generator=draw),
        bits,
        group,
        (torch.rand(rows, groups, generator=draw) / (1 << bits) + 0.01).to(scale_dtype),
        torch.randint(0, 1 << bits, (rows, groups), dtype=torch.uint8, generator=draw) if with_zeros else None,
        torch.randn(rows, groups, generator=draw) / 4 if with_offsets else None,
        torch.randperm(inner, generator=draw) if ordered else None,
    )
