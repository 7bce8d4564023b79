"""Weights in codes of 4 or 8 bits: their layout on a GPU, and the part of a product that multiplies them.

A row of codes is unpacked in registers. A code minus its zero point is an exact integer of at most 8 bits and a sign,
which every model dtype holds. These integers are multiplied, and the float32 sum over at most 64 of a group is
multiplied by the group's scale. So a product is as exact as one of the weight's values in float32, and sums follow the
order of codes, whatever the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from kernels.grouped_weight import BLOCK, GroupedWeight

# Most codes that are multiplied at once. With more, programs for NVIDIA spill registers.
_PIECE: Final = 32


@dataclass(frozen=True)
class CodeForm:
    """Form of a weight [N, K] in codes: a value is scale * (code - zero) - offset, these three of its row and group.

    K' is K rounded up to a multiple of 128, and G' the number of groups in it. Tensors of E experts have a dimension E
    before all others.

    Attributes:
        bits: 4 or 8. A code of 8 is a byte. Of 4, P bytes have 2 * P codes, P being the smaller of `group` and 32:
            byte j has code j in its lower half and code P + j in its upper one.
        group: columns that share a scale.
        zeros: uint8 [G', N]; None for the middle code, 8 or 128.
        offsets: float32 [G', N]; None for zeros.
        order: int32 [K'], the input by which each column is multiplied; None for inputs in their order.
    """

    bits: int
    group: int
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None


def laid_out(weight: GroupedWeight, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, CodeForm]:
    """Numbers uint8 [N, K' * bits / 8], scales [G', N] in their own dtype, and the form of a weight [N, K]."""
    rows, inner = weight.shape
    width = -(-inner // BLOCK) * BLOCK
    group = width if weight.group >= inner else weight.group
    groups = -(-width // group)
    numbers = pad(weight.codes.to(device), (0, width - inner))
    if weight.bits == 4:
        halves = numbers.view(rows, -1, 2, min(group, _PIECE))
        numbers = (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, -1)

    def of_groups(values: torch.Tensor) -> torch.Tensor:
        return pad(values.to(device), (0, groups - values.shape[1])).t().contiguous()

    form = CodeForm(
        weight.bits,
        group,
        None if weight.zeros is None else of_groups(weight.zeros),
        None if weight.offsets is None else of_groups(weight.offsets),
        None if weight.order is None else pad(weight.order.to(device, torch.int32), (0, width - inner)),
    )
    return numbers, of_groups(weight.scales), form


def stacked(forms: list[CodeForm]) -> CodeForm:
    """The forms of several weights [N, K] that differ in their tensors alone; inputs of some may be in their order."""
    ordered = next((form.order for form in forms if form.order is not None), None)
    # Weights without an order of their own read inputs as they come. Their columns of padding are multiplied by 0.
    in_order = None if ordered is None else torch.arange(len(ordered)).to(ordered)

    def each(values: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [value for value in values if value is not None]
        return torch.stack(there) if there else None

    return replace(
        forms[0],
        zeros=each([form.zeros for form in forms]),
        offsets=each([form.offsets for form in forms]),
        order=each([in_order if form.order is None else form.order for form in forms]),
    )


@triton.jit
def add_code_products(
    acc,
    x,
    weight,
    scales,
    zeros,
    offsets,
    order,
    in_rows,
    start,
    end,
    inner,
    columns,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Adds columns [start, end) of a product to acc, in order.

    x [M, 1] and weight [1, N] point at rows; scales, zeros and offsets at a row's value for the first group, [1, N].
    """
    PIECE: tl.constexpr = GROUP if GROUP < 32 else 32
    # Both pieces are of one group.
    JOINS: tl.constexpr = GROUP > PIECE
    for at in range(start, end, 2 * PIECE):
        if BITS == 4:
            both = tl.load(weight + (at // 2 + tl.arange(0, PIECE))[:, None])
        product = None
        for half in tl.static_range(2):
            k = at + half * PIECE + tl.arange(0, PIECE)
            codes = (both >> (4 * half)) & 15 if BITS == 4 else tl.load(weight + k[:, None])
            place = k if order is None else tl.load(order + k)
            a = tl.load(x + place[None, :], mask=in_rows if EVEN else in_rows & (k < inner)[None, :], other=0.0)
            group = (at + half * PIECE) // GROUP * columns
            zero = (1 << (BITS - 1)) if zeros is None else tl.load(zeros + group).to(tl.int16)
            b = codes.to(tl.int16) - zero
            product = tl.dot(a, b.to(a.dtype), product if JOINS and half else None, input_precision="ieee")
            if half or not JOINS:
                scale = tl.broadcast_to(tl.load(scales + group).to(tl.float32), acc.shape)
                acc = tl.fma(product, scale, acc)
            if offsets is not None:
                # As in attention: a product with ones adds in the order of inputs, and all columns are equal.
                ones = tl.full((PIECE, 8), 1.0, a.dtype)
                sums = tl.max(tl.dot(a, ones, input_precision="ieee"), 1)
                offset = tl.broadcast_to(tl.load(offsets + group), acc.shape)
                acc = tl.fma(tl.broadcast_to(-sums[:, None], acc.shape), offset, acc)
    return acc
