"""Operations on weights in a checkpoint's storage format: their values, and concatenation of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from kernels import float8, grouped_weight
from kernels.grouped_weight import GroupedWeight, JoinedWeight, alike, joined
from kernels.interface import AnyWeight, ExpertWeights, QuantizedWeight, QuantType

# Rows, and columns, of a block of `per_128x128`.
_BLOCK = 128
# Columns that share a scale.
_GRAIN = {"per_1x32": 32, "per_1x128": _BLOCK}
# Granularities whose scales are shared by rows -> the nearest one with scales per row.
_BY_ROWS: Final[dict[QuantType, QuantType]] = {"per_128x128": "per_1x128"}
# E2M1, its sign in the highest of four bits.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# [256, 2]: the two numbers of a byte, the lower four bits first.
_FP4_PAIRS = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])


def as_floats(weight: AnyWeight) -> torch.Tensor:
    """A weight [N, K] of floats unchanged; a quantized one as float32, each number times its scale, rounded once."""
    if isinstance(weight, torch.Tensor):
        return weight
    return _dequantized(weight) if isinstance(weight, QuantizedWeight) else grouped_weight.dequantized(weight)


def fp4_numbers(stored: torch.Tensor) -> torch.Tensor:
    """Numbers of MXFP4 uint8 [N, K / 2], unscaled: float32 [N, K], newly allocated."""
    rows, width = stored.shape
    return _FP4_PAIRS.index_select(0, stored.int().flatten()).view(rows, 2 * width)


def with_row_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with scales whose first dimension is N: scales of blocks are repeated."""
    if weight.quant_type not in _BY_ROWS:
        return weight
    scales = weight.scales.repeat_interleave(_BLOCK, 0)[: weight.shape[0]]
    return replace(weight, scales=scales, quant_type=_BY_ROWS[weight.quant_type])


def joined_quant_type(types: Sequence[QuantType], rows: Sequence[int]) -> QuantType | None:
    """Scale granularity of weights stacked along dim 0, by their rows; None if their scales cannot be concatenated.

    Blocks stay blocks where each weight but the last has whole ones.
    """
    if set(types) == {"per_128x128"} and all(count % _BLOCK == 0 for count in rows[:-1]):
        return "per_128x128"
    by_rows = {_BY_ROWS.get(each, each) for each in types}
    return by_rows.pop() if len(by_rows) == 1 else None


def joined_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenates weights with numbers of one dtype along their rows.

    Raises:
        ValueError: their scales do not go together.
    """
    quant_type = joined_quant_type([each.quant_type for each in weights], [each.shape[0] for each in weights])
    if quant_type is None:
        raise ValueError(f"weights {', '.join(each.quant_type for each in weights)} do not go below each other")
    parts = weights if quant_type == "per_128x128" else [with_row_scales(each) for each in weights]
    numbers, scales = _below([each.numbers for each in parts]), torch.cat([each.scales for each in parts])
    return QuantizedWeight(numbers, scales, quant_type)


def selected_rows(weight: QuantizedWeight, *parts: slice) -> QuantizedWeight:
    """Concatenates rows of several weights in order."""
    by_rows = with_row_scales(weight)
    numbers, scales = _below([by_rows.numbers[part] for part in parts]), [by_rows.scales[part] for part in parts]
    return replace(by_rows, numbers=numbers, scales=torch.cat(scales))


def alike_experts(experts: Iterable[ExpertWeights]) -> Iterator[ExpertWeights]:
    """The experts. Weights in codes are converted to one form; experts without codes are passed on one at a time."""
    each = iter(experts)
    first = next(each, None)
    if first is None:
        return
    in_codes = GroupedWeight | JoinedWeight
    if not isinstance(first.gate_up, in_codes) and not isinstance(first.down, in_codes):
        yield first
        yield from each
        return
    every = [first, *each]
    gate_ups, downs = (_in_one_form([one.gate_up for one in every]), _in_one_form([one.down for one in every]))
    for one, gate_up, down in zip(every, gate_ups, downs, strict=True):
        yield replace(one, gate_up=gate_up, down=down)


def _in_one_form(weights: list[AnyWeight]) -> Sequence[AnyWeight]:
    whole = [joined(weight.parts) if isinstance(weight, JoinedWeight) else weight for weight in weights]
    grouped = [weight for weight in whole if isinstance(weight, GroupedWeight)]
    # A single expert is converted to floats if its gates and ups order their columns differently.
    return alike(grouped) if len(grouped) == len(weights) else [as_floats(weight) for weight in weights]


def _below(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([float8.raw(each) for each in numbers]).view(numbers[0].dtype)


def _dequantized(weight: QuantizedWeight) -> torch.Tensor:
    weight = with_row_scales(weight)
    numbers, scales = _numbers(weight), weight.scales.cpu()
    if weight.quant_type == "per_token":
        return numbers.mul_(scales.unsqueeze(1))
    if weight.quant_type == "per_1x32":
        scales = scales.view(torch.float8_e8m0fnu).float()
    return numbers.mul_(scales.repeat_interleave(_GRAIN[weight.quant_type], 1)[:, : numbers.shape[1]])


def _numbers(weight: QuantizedWeight) -> torch.Tensor:
    """Unscaled numbers of a quantized weight, float32 [N, K], newly allocated."""
    stored = weight.numbers.cpu()
    if weight.quant_type == "per_1x32":
        return fp4_numbers(stored)
    numbers = torch.empty(stored.shape)
    float8.widen(stored, numbers)
    return numbers
