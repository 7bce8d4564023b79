"""Weights as unsigned codes of 4 to 8 bits whose scales are shared by groups of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import torch

# Columns of a block of the kernels. Every group divides it or is a multiple of it.
BLOCK: Final = 128
# Columns of the smallest group.
SMALLEST_GROUP: Final = 16
# Columns of a group of `nearest_codes`.
NEAREST_GROUP: Final = 32
# Scales that `nearest_codes` tries: the number of largest size divided by each. It thus becomes about -8 or 7 scales.
DIVISORS: Final = (*(-tenths / 10 for tenths in range(68, 92, 2)), *(tenths / 10 for tenths in range(64, 80, 2)))
# Numbers that are rounded at once: on a CPU few enough for its cache, elsewhere enough for few calls.
_CPU_PIECE: Final = 1 << 17
_DEVICE_PIECE: Final = 1 << 24


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [N, K] of codes; its G groups are `group` adjacent columns each, the last perhaps fewer.

    Column k's value in row n is scale[n, g] * (code[n, k] - zero[n, g]) - offset[n, g], with g = k // group. The
    difference is an exact integer; product and subtraction are each rounded once to float32.

    Attributes:
        codes: uint8 [N, K], one in each byte, below 2 ** `bits`.
        bits: 4, 5, 6 or 8.
        group: columns that share a scale: 16, 32, 64, 128, a multiple of 128, or at least K.
        scales: [N, G] in the float dtype that holds them exactly; with `factors` int8.
        zeros: uint8 [N, G]; None for the middle code, half of 2 ** `bits`.
        offsets: float32 [N, G]; None for zeros; with `factors` int8.
        order: int64 [K]: column k is column order[k] of the model's weight. None if columns are in their order.
        factors: float16 [N, B, 1 or 2]: each block of 128 columns has a factor of its scales and, with `offsets`, one
            of its offsets. float32 holds the products exactly. None if scales and offsets have no factor.

    Raises:
        ValueError: kernels have no such group, or shapes do not go together.
    """

    codes: torch.Tensor
    bits: int
    group: int
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, inner = self.shape
        if not is_group(self.group, inner):
            raise ValueError(f"groups of {self.group} columns are not supported; supported: {GROUPS}")
        groups = -(-inner // self.group)
        for found in (self.scales, self.zeros, self.offsets):
            if found is not None and found.shape != (rows, groups):
                raise ValueError(f"{list(found.shape)} does not go with {rows} rows of {groups} groups")
        factors = (rows, -(-inner // BLOCK), 1 if self.offsets is None else 2)
        if self.factors is not None and (self.factors.shape != factors or self.group > BLOCK):
            raise ValueError(f"factors {list(self.factors.shape)} are not {list(factors)}, or groups exceed {BLOCK}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        rows, inner = self.codes.shape
        return rows, inner

    @property
    def middle(self) -> int:
        """Code without a zero point that is worth 0."""
        return 1 << (self.bits - 1)

    def spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Repeats numbers [N, G] for each column of their group: float32 [N, K]."""
        return of_groups.float().repeat_interleave(self.group, 1)[:, : self.shape[1]]


GROUPS: Final = f"16, 32, 64, {BLOCK}, multiples of {BLOCK} and whole rows"


def is_group(group: int, inner: int) -> bool:
    """True if kernels multiply rows of `inner` columns by groups of that size."""
    divides = group >= SMALLEST_GROUP and BLOCK % group == 0
    return group > 0 and (divides or group % BLOCK == 0 or group >= inner)


def nearest_codes(weight: torch.Tensor) -> GroupedWeight:
    """Rounds a weight [N, K] of any float dtype to codes of 4 bits, in groups of 32 columns with bfloat16 scales.

    Each group's scale is the one of 20 with the least squared error, the first of equals. Only operations on single
    numbers are used, and divisors lie on the device (PyTorch multiplies by the reciprocal of others), so that every
    processor chooses the same. A group with a number that is not finite gets a scale that is not finite.
    """
    rows, inner = weight.shape
    groups = -(-inner // NEAREST_GROUP)
    codes = torch.empty(rows, groups * NEAREST_GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=weight.device)
    step = max(1, (_CPU_PIECE if weight.is_cpu else _DEVICE_PIECE) // max(1, inner))
    divisors = torch.tensor(DIVISORS, device=weight.device).unbind()
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        padded = torch.nn.functional.pad(weight[piece].float(), (0, codes.shape[1] - inner))
        # [32, groups]: sums over a group are sums of rows.
        numbers = padded.view(-1, NEAREST_GROUP).t().contiguous()
        best = _best_scales(numbers, divisors)
        scales[piece] = best.view(-1, groups).bfloat16()
        codes[piece] = _rounded(numbers, best).add_(8.0).to(torch.uint8).t().reshape(-1, codes.shape[1])
    return GroupedWeight(codes[:, :inner].contiguous(), 4, NEAREST_GROUP, scales)


def _best_scales(numbers: torch.Tensor, divisors: Sequence[torch.Tensor]) -> torch.Tensor:
    """float32 [groups], exact in bfloat16: the best scale for each column of float32 numbers [32, groups]."""
    low, high = numbers.amin(0), numbers.amax(0)
    largest = torch.where(low.neg() > high, low, high)
    best, least = (largest / divisors[0]).bfloat16().float(), torch.full_like(largest, torch.inf)
    for divisor in divisors:
        scale = (largest / divisor).bfloat16().float()
        error = _rounded(numbers, scale).mul_(scale).sub_(numbers).square_()
        height = len(error)
        while height > 1:
            height //= 2
            error[:height].add_(error[height : 2 * height])
        is_better = error[0] < least
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error[0], least)
    return best


def _rounded(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiples of the scales nearest to numbers [32, groups], from -8 to 7; 0 where a scale is 0 or not finite."""
    inverse = torch.where(scale != 0.0, scale.reciprocal(), 0.0)
    return (numbers * inverse).round_().clamp_(-8.0, 7.0).nan_to_num_(0.0)


def dequantized(weight: GroupedWeight | JoinedWeight) -> torch.Tensor:
    """Values of a weight in the model's order of columns, float32 [N, K], newly allocated."""
    if isinstance(weight, JoinedWeight):
        return torch.cat([dequantized(part) for part in weight.parts])
    weight = unfactored(weight)
    numbers = weight.codes.float()
    numbers.sub_(weight.middle if weight.zeros is None else weight.spread(weight.zeros))
    numbers.mul_(weight.spread(weight.scales))
    if weight.offsets is not None:
        numbers.sub_(weight.spread(weight.offsets))
    if weight.order is None:
        return numbers
    return torch.empty_like(numbers).index_copy_(1, weight.order, numbers)


def unfactored(weight: GroupedWeight) -> GroupedWeight:
    """The same values, with scales and offsets in float32 if they had factors."""
    if weight.factors is None:
        return weight
    of_group = torch.arange(weight.scales.shape[1]) * weight.group // BLOCK
    factors = weight.factors.float().index_select(1, of_group)
    offsets = None if weight.offsets is None else weight.offsets.float() * factors[:, :, 1]
    return replace(weight, scales=weight.scales.float() * factors[:, :, 0], offsets=offsets, factors=None)


def cut_refusal(columns: slice, inner: int, group: int, has_order: bool) -> str | None:
    """Reason why `columns` of `inner` cannot stay in codes; None if they can."""
    wanted = range(inner)[columns]
    if len(wanted) == inner:
        return None
    if has_order:
        return "columns of each rank cut an order by activation"
    if not is_group(_cut_group(wanted, inner, group), len(wanted)):
        return f"{len(wanted)} columns of each rank cut groups of {group}"
    return None


def column_part(weight: GroupedWeight, columns: slice) -> GroupedWeight:
    """Some columns of a weight; where they cut its groups, in smaller groups.

    Raises:
        ValueError: they cannot stay in codes (`cut_refusal`).
    """
    inner = weight.shape[1]
    refusal = cut_refusal(columns, inner, weight.group, weight.order is not None)
    if refusal is not None:
        raise ValueError(refusal)
    wanted = range(inner)[columns]
    if weight.group >= inner:
        return replace(weight, codes=weight.codes[:, columns].contiguous()) if len(wanted) < inner else weight
    cuts_blocks = wanted.start % BLOCK or (wanted.stop % BLOCK and wanted.stop < inner)
    whole = unfactored(weight) if cuts_blocks else weight
    split = _in_groups_of(whole, _cut_group(wanted, inner, weight.group))
    groups = slice(wanted.start // split.group, -(-wanted.stop // split.group))
    blocks = slice(wanted.start // BLOCK, -(-wanted.stop // BLOCK))
    return replace(
        split,
        codes=split.codes[:, columns].contiguous(),
        scales=split.scales[:, groups].contiguous(),
        zeros=None if split.zeros is None else split.zeros[:, groups].contiguous(),
        offsets=None if split.offsets is None else split.offsets[:, groups].contiguous(),
        factors=None if split.factors is None else split.factors[:, blocks].contiguous(),
    )


def row_part(weight: GroupedWeight, rows: slice) -> GroupedWeight:
    """Some rows of a weight, perhaps each second one."""
    return replace(
        weight,
        codes=weight.codes[rows].contiguous(),
        scales=weight.scales[rows].contiguous(),
        zeros=None if weight.zeros is None else weight.zeros[rows].contiguous(),
        offsets=None if weight.offsets is None else weight.offsets[rows].contiguous(),
        factors=None if weight.factors is None else weight.factors[rows].contiguous(),
    )


def padded_rows(weight: GroupedWeight, rows: int) -> GroupedWeight:
    """The weight with rows of zeros behind it, `rows` in all."""
    more = (0, 0, 0, rows - weight.shape[0])
    parts = (weight.codes, weight.scales, weight.zeros, weight.offsets)
    codes, scales, zeros, offsets = (None if one is None else torch.nn.functional.pad(one, more) for one in parts)
    assert codes is not None
    assert scales is not None
    factors = None if weight.factors is None else torch.nn.functional.pad(weight.factors, (0, 0, *more))
    return replace(weight, codes=codes, scales=scales, zeros=zeros, offsets=offsets, factors=factors)


def widened(weight: GroupedWeight | JoinedWeight) -> GroupedWeight:
    """The same values as one weight in codes of 4 or 8 bits without factors."""
    plain = unfactored(joined(weight.parts) if isinstance(weight, JoinedWeight) else weight)
    if plain.bits in (4, 8):
        return plain
    moved = 128 - plain.middle
    zeros = None if plain.zeros is None else plain.zeros + moved
    return replace(plain, codes=plain.codes + moved, bits=8, zeros=zeros)


def have_one_order(weights: Sequence[GroupedWeight]) -> bool:
    """True if the columns of all weights are in the same order."""
    first = weights[0].order
    if first is None:
        return all(each.order is None for each in weights)
    return all(each.order is not None and torch.equal(each.order, first) for each in weights)


def have_one_form(weights: Sequence[GroupedWeight]) -> bool:
    """True if all weights have the same bits, group and dtype of scales, and the same parts."""
    forms = {
        (each.bits, each.group, each.scales.dtype, each.zeros is None, each.offsets is None, each.factors is None)
        for each in weights
    }
    return len(forms) == 1


def alike(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """The same weights, each of as many columns, in one form."""
    if have_one_form(weights):
        return list(weights)
    weights = [unfactored(each) for each in weights]
    bits = max(each.bits for each in weights)
    inner = weights[0].shape[1]
    group = gcd(*(each.group for each in weights if each.group < inner)) or inner
    dtypes = {each.scales.dtype for each in weights}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    has_zeros = len({each.bits for each in weights}) > 1 or any(each.zeros is not None for each in weights)
    has_offsets = any(each.offsets is not None for each in weights)
    made = []
    for each in weights:
        split = _in_groups_of(each, group)
        zeros, offsets = split.zeros, split.offsets
        if has_zeros and zeros is None:
            zeros = torch.full(split.scales.shape, split.middle, dtype=torch.uint8)
        if has_offsets and offsets is None:
            offsets = torch.zeros(split.scales.shape)
        made.append(replace(split, bits=bits, scales=split.scales.to(dtype), zeros=zeros, offsets=offsets))
    return made


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenates weights along their rows, in a form that holds each exactly.

    Raises:
        ValueError: their columns are in different orders, or no group size fits all.
    """
    if not have_one_order(weights):
        raise ValueError("columns of the product's parts are in different orders")
    parts = alike(weights)
    first = parts[0]

    def stacked(of_parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [one for one in of_parts if one is not None]
        return torch.cat(there) if there else None

    return replace(
        first,
        codes=torch.cat([each.codes for each in parts]),
        scales=torch.cat([each.scales for each in parts]),
        zeros=stacked([each.zeros for each in parts]),
        offsets=stacked([each.offsets for each in parts]),
        factors=stacked([each.factors for each in parts]),
    )


@dataclass(frozen=True)
class JoinedWeight:
    """Weights in codes, each in its own form, one below the other.

    Attributes:
        parts: two or more, of as many columns and in the same order.
    """

    parts: tuple[GroupedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)"""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


def stacked_weights(weights: Sequence[GroupedWeight]) -> GroupedWeight | JoinedWeight:
    """Concatenates weights along their rows; adjacent ones of one form become one part.

    Raises:
        ValueError: their columns are in different orders.
    """
    if not have_one_order(weights):
        raise ValueError("columns of the product's parts are in different orders")
    runs: list[list[GroupedWeight]] = []
    for weight in weights:
        if runs and have_one_form([runs[-1][0], weight]):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    parts = tuple(joined(run) for run in runs)
    return parts[0] if len(parts) == 1 else JoinedWeight(parts)


def _cut_group(wanted: range, inner: int, group: int) -> int:
    """Largest group size at whose multiples the columns `wanted` begin and end; the end of a row may be anywhere."""
    if group >= inner:
        return group
    end = 0 if wanted.stop == inner else wanted.stop
    return gcd(group, wanted.start, end)


def _in_groups_of(weight: GroupedWeight, group: int) -> GroupedWeight:
    """The same values in smaller groups, which divide the weight's, or with one for at least the whole row."""
    inner = weight.shape[1]
    if group == weight.group or weight.group >= inner <= group:
        return weight
    groups = -(-inner // group)

    def split(of_groups: torch.Tensor | None) -> torch.Tensor | None:
        if of_groups is None:
            return None
        return of_groups.index_select(1, torch.arange(groups) * group // weight.group)

    scales = split(weight.scales)
    assert scales is not None
    return replace(weight, group=group, scales=scales, zeros=split(weight.zeros), offsets=split(weight.offsets))
