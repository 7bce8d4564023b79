"""What a weight as a checkpoint stores it is worth, and its scales by rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels import float8
from kernels.interface import QuantizedWeight

# Rows, and columns, of a block of `per_128x128`.
_BLOCK = 128
# Columns that share a scale.
_GRAIN = {"per_1x32": 32, "per_1x128": _BLOCK}
# E2M1, its sign in the highest of four bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def as_floats(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """A weight [N, K] of floats as it is; a quantized one as float32, each number times its scale, rounded once."""
    return weight if isinstance(weight, torch.Tensor) else _dequantized(weight)


def with_row_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight, the first dimension of whose scales is N: those of blocks are repeated."""
    if weight.quant_type != "per_128x128":
        return weight
    scales = weight.scales.repeat_interleave(_BLOCK, 0)[: weight.shape[0]]
    return replace(weight, scales=scales, quant_type="per_1x128")


def _dequantized(weight: QuantizedWeight) -> torch.Tensor:
    weight = with_row_scales(weight)
    numbers, scales = _numbers(weight), weight.scales.cpu()
    if weight.quant_type == "per_token":
        return numbers.mul_(scales.unsqueeze(1))
    if weight.quant_type == "per_1x32":
        scales = scales.view(torch.float8_e8m0fnu).float()
    return numbers.mul_(scales.repeat_interleave(_GRAIN[weight.quant_type], 1)[:, : numbers.shape[1]])


def _numbers(weight: QuantizedWeight) -> torch.Tensor:
    """Unscaled, float32 [N, K], in memory of their own."""
    stored = weight.numbers.cpu()
    if weight.quant_type == "per_1x32":
        codes = torch.stack((stored & 15, stored >> 4), dim=2).flatten(1)
        return torch.tensor(_FP4)[codes.int()]
    numbers = torch.empty(stored.shape)
    float8.widen(stored, numbers)
    return numbers
