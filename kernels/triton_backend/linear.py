"""Matrix products by weights [N, K]: floats, numbers or codes of 8 or 4 bits with scales, and rows of 8 bits.

One function computes a tile of rows by a tile of columns for all of them; what differs is how a piece of K is read.
Sums are float32 (int32 of int8 by int8); scales of rows and the bias are applied in float32, and the result is rounded
once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from typing_extensions import override

from kernels.grouped_weight import GroupedWeight
from kernels.interface import AnyWeight, LinearOps, PackedFormat, QuantizedWeight
from kernels.triton_backend import packed_weight
from kernels.triton_backend.codes import add_code_products
from kernels.triton_backend.launch import launch
from kernels.triton_backend.packed_weight import GROUP, PackedWeight
from kernels.triton_backend.target import Settings
from kernels.triton_backend.tiles import Cut, Operands, compiler_options, cut

# Tiles of rows whose programs follow each other, so that they find a tile of the weight in the cache.
_TOGETHER = 8
# Columns of the sums that a program adds up, and best columns of tiles that it compares at once.
_SUM_BLOCK = 512
_BEST_BLOCK = 1024


@triton.jit
def _tile(program, row_tiles, column_tiles, TOGETHER: tl.constexpr):
    # TOGETHER tiles of rows go through the columns side by side: each tile of the weight is read once for all of them,
    # and theirs stay in the cache.
    programs = TOGETHER * column_tiles
    first = program // programs * TOGETHER
    height = tl.minimum(row_tiles - first, TOGETHER)
    within = program % programs
    return first + within % height, within // height


@triton.jit
def _fp4_value(code):
    # E2M1 of the lower four bits as float32: two bits of exponent and one of mantissa, moved to their places.
    size = code & 7
    bits = tl.where(size > 1, (size + 252) << 22, tl.where(size == 1, 0x3F000000, 0))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    # E8M0 as float32: 0 is 2^-127, which float32 has only below its normal numbers, and 255 is not a number.
    exponent = exponent.to(tl.int32)
    bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float_part(x, weight, in_rows, start, end, inner, acc, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    # Also FP8 by FP8, for which Hopper otherwise adds many products in less than float32.
    for at in range(start, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        a = tl.load(x + k[None, :], mask=in_rows if EVEN else in_rows & (k < inner)[None, :], other=0.0)
        b = tl.load(weight + k[:, None]) if EVEN else tl.load(weight + k[:, None], mask=(k < inner)[:, None], other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
    return acc


@triton.jit
def _int8_part(x, weight, in_rows, start, end, inner, acc, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    sums = tl.zeros(acc.shape, tl.int32)
    for at in range(start, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        a = tl.load(x + k[None, :], mask=in_rows if EVEN else in_rows & (k < inner)[None, :], other=0.0)
        b = tl.load(weight + k[:, None]) if EVEN else tl.load(weight + k[:, None], mask=(k < inner)[:, None], other=0.0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    return sums.to(tl.float32)


@triton.jit
def _grouped_part(
    x,
    weight,
    scales,
    in_rows,
    start,
    end,
    inner,
    n,
    acc,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    # A scale is applied to the sum over a piece of its group: so the numbers themselves are multiplied exactly.
    for at in range(start, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        a = tl.load(x + k[None, :], mask=in_rows if EVEN else in_rows & (k < inner)[None, :], other=0.0)
        b = tl.load(weight + k[:, None]) if EVEN else tl.load(weight + k[:, None], mask=(k < inner)[:, None], other=0.0)
        scale = tl.load(scales + at // GROUP * n)
        acc = tl.fma(tl.dot(a, b.to(a.dtype), input_precision="ieee"), tl.broadcast_to(scale, acc.shape), acc)
    return acc


@triton.jit
def _fp4_part(x, weight, scales, in_rows, start, end, inner, acc, GROUP: tl.constexpr, EVEN: tl.constexpr):
    # The first 64 of 128 numbers are the lower halves of 64 bytes, the others the upper ones: two products without
    # moving numbers about. A factor is rounded to x's dtype, as a loader rounds it.
    HALF: tl.constexpr = GROUP // 2
    for at in range(start, end, GROUP):
        codes = tl.load(weight + (at // 2 + tl.arange(0, HALF))[:, None]).to(tl.int32)
        for half in tl.static_range(2):
            k = at + half * HALF + tl.arange(0, HALF)
            a = tl.load(x + k[None, :], mask=in_rows if EVEN else in_rows & (k < inner)[None, :], other=0.0)
            powers = _power_of_two(tl.load(scales + (at // 32 + half * 2 + tl.arange(0, 2))[:, None]))
            spread = tl.broadcast_to(powers[:, None, :], (2, HALF // 2, acc.shape[1]))
            b = _fp4_value(codes >> (4 * half)) * tl.reshape(spread, (HALF, acc.shape[1]))
            acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _part(
    x,
    weight,
    scales,
    zeros,
    offsets,
    order,
    in_rows,
    part,
    part_length,
    inner,
    scale_stride,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    # The sum over one part of K, from zero.
    start = part * part_length
    end = tl.minimum(start + part_length, inner)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FORMAT == "fp4":
        acc = _fp4_part(x, weight, scales, in_rows, start, end, inner, acc, GROUP, EVEN)
    elif FORMAT == "grouped":
        acc = _grouped_part(x, weight, scales, in_rows, start, end, inner, scale_stride, acc, BLOCK_K, GROUP, EVEN)
    elif FORMAT == "codes":
        acc = add_code_products(
            acc, x, weight, scales, zeros, offsets, order, in_rows, start, end, inner, scale_stride, BITS, GROUP, EVEN
        )
    elif FORMAT == "int8":
        acc = _int8_part(x, weight, in_rows, start, end, inner, acc, BLOCK_K, EVEN)
    else:
        acc = _float_part(x, weight, in_rows, start, end, inner, acc, BLOCK_K, EVEN)
    return acc


@triton.jit
def _product(
    x,
    weight,
    scales,
    zeros,
    offsets,
    order,
    row_tile,
    column_tile,
    part,
    rows,
    columns,
    inner,
    x_stride,
    part_length,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    # float32 [BLOCK_M, BLOCK_N] of one part of K, or of PARTS from `part` on, added in order. Rows after the last are
    # zero; columns after the last repeat the last.
    row = tl.arange(0, BLOCK_M)[:, None]
    in_rows = row < rows - row_tile * BLOCK_M
    x_rows = x + row_tile.to(tl.int64) * BLOCK_M * x_stride + row * x_stride
    column = tl.minimum(tl.arange(0, BLOCK_N), columns - 1 - column_tile * BLOCK_N)[None, :]
    first = column_tile.to(tl.int64) * BLOCK_N
    width = inner
    if (FORMAT == "fp4") | (FORMAT == "codes"):
        width = tl.cdiv(inner, 128) * (128 if BITS > 4 else 64)
    weight_rows = weight + first * width + column * width
    if FORMAT == "fp4":
        scales += first * (width // 16) + column * (width // 16)
    elif (FORMAT == "grouped") | (FORMAT == "codes"):
        scales += (column_tile * BLOCK_N + column) // ROW_GRAIN
    if zeros is not None:
        zeros += column_tile * BLOCK_N + column
    if offsets is not None:
        offsets += column_tile * BLOCK_N + column
    n = tl.cdiv(columns, ROW_GRAIN)
    if PARTS == 1:
        total = _part(
            x_rows, weight_rows, scales, zeros, offsets, order, in_rows, part, part_length, inner, n,
            FORMAT, BITS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for each in range(PARTS):
            total += _part(
                x_rows, weight_rows, scales, zeros, offsets, order, in_rows, each, part_length, inner, n,
                FORMAT, BITS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN,
            )  # fmt: skip
    return total


@triton.jit
def _finished(total, x_scales, scales, bias, row, column, rows, columns, FORMAT: tl.constexpr):
    # Scales of rows and the bias. Multiplied and added at once, and said so, lest compilers differ between kernels.
    row = tl.minimum(row, rows - 1)[:, None]
    column = tl.minimum(column, columns - 1)[None, :]
    if (FORMAT == "rows") | (FORMAT == "int8"):
        factor = tl.broadcast_to(tl.load(scales + column), total.shape)
        if x_scales is not None:
            factor = factor * tl.load(x_scales + row)
        if bias is not None:
            total = tl.fma(total, factor, tl.broadcast_to(tl.load(bias + column), total.shape))
        else:
            total = total * factor
    elif bias is not None:
        total += tl.load(bias + column)
    return total


# A program computes a tile of the result, or one part of its sum over K.
@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    offsets,
    order,
    bias,
    out,
    rows,
    columns,
    inner,
    x_stride,
    x_head_stride,
    out_stride,
    part_length,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row_tile, column_tile = _tile(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), TOGETHER)
    total = _product(
        x + head * x_head_stride, weight + head * columns * inner, scales, zeros, offsets, order,
        row_tile, column_tile, part, rows, columns, inner, x_stride, part_length,
        FORMAT, BITS, ROW_GRAIN, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN,
    )  # fmt: skip
    row = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if not SPLIT:
        total = _finished(total, x_scales, scales, bias, row, column, rows, columns, FORMAT)
    place = out + part.to(tl.int64) * rows * out_stride + head * columns + row[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


# A program adds the parts of some columns of one row, in order.
@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    sums, x_scales, scales, bias, out, rows, columns, FORMAT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < columns)[None, :]
    total = tl.zeros((1, BLOCK), tl.float32)
    for part in range(PARTS):
        place = sums + (part * rows + row[:, None]) * columns + column[None, :]
        total += tl.load(place, mask=inside, other=0.0)
    total = _finished(total, x_scales, scales, bias, row, column, rows, columns, FORMAT)
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=inside)


# A program finds the best column of its tile for each row; the values are rounded to their tensor's dtype first.
@triton.jit(do_not_specialize=["rows"])
def _tile_best_kernel(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    offsets,
    order,
    bias,
    values,
    ids,
    limit,
    rows,
    columns,
    inner,
    x_stride,
    part_length,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    column_tiles = tl.cdiv(limit, BLOCK_N)
    row_tile, column_tile = _tile(tl.program_id(0), tl.cdiv(rows, BLOCK_M), column_tiles, TOGETHER)
    total = _product(
        x, weight, scales, zeros, offsets, order, row_tile, column_tile, 0,
        rows, columns, inner, x_stride, part_length,
        FORMAT, BITS, ROW_GRAIN, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN,
    )  # fmt: skip
    row = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _finished(total, x_scales, scales, bias, row, column, rows, columns, FORMAT)
    value = total.to(values.dtype.element_ty).to(tl.float32)
    # NaN is not above minus infinity.
    value = tl.where((value > float("-inf")) & (column < limit)[None, :], value, float("-inf"))
    best = tl.max(value, axis=1)
    first = tl.min(tl.where(value == best[:, None], column[None, :], 0x7FFFFFFF), axis=1)
    tl.store(values + row * column_tiles + column_tile, best.to(values.dtype.element_ty), mask=row < rows)
    tl.store(ids + row * column_tiles + column_tile, first, mask=row < rows)


# A program finds the best of one row's tiles, of equals the lowest id.
@triton.jit
def _best_kernel(values, ids, out, tiles, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    first = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for at in range(0, tiles, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        value = tl.load(values + row * tiles + tile, mask=tile < tiles, other=float("-inf")).to(tl.float32)
        # A lane meets its tiles in rising order, so an equal one is no better.
        first = tl.where(value > best, tl.load(ids + row * tiles + tile, mask=tile < tiles, other=0), first)
        best = tl.maximum(best, value)
    largest = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == largest, first, 0x7FFFFFFF), axis=0)
    # Without a finite largest number there is no token.
    tl.store(out + row, tl.where(tl.abs(largest) < float("inf"), winner, -1).to(tl.int64))


# A program quantizes a row, which it reads twice.
@triton.jit
def _quantize_kernel(
    x, numbers, scales, inner, x_stride, LARGEST: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    sizes = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, inner, BLOCK):
        column = at + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x + row * x_stride + column, mask=column < inner, other=0.0).to(tl.float32))
        sizes = tl.maximum(sizes, tl.where(size < float("inf"), size, float("inf")))
    # A row with a number that is not finite becomes zeros with an infinite scale, whose products are no numbers.
    scale = tl.div_rn(tl.max(sizes, axis=0), LARGEST)
    tl.store(scales + row, scale)
    divisor = tl.where(scale > 0, scale, 1.0)
    for at in range(0, inner, BLOCK):
        column = at + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + column, mask=column < inner, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        value = tl.div_rn(value, tl.broadcast_to(divisor, value.shape))
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
        if ROUND:
            # Rounds to the nearest integer, halves to even: beyond 2^23 a float32 has no other values.
            value = (value + 12582912.0) - 12582912.0
        tl.store(numbers + row * inner + column, value.to(numbers.dtype.element_ty), mask=column < inner)


class TritonLinearOps(LinearOps):
    """Matrix products, with tiles chosen by `settings`; `argmax` never holds all columns in memory."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device

    @override
    def pack(
        self,
        weight: AnyWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedWeight:
        target = self._settings.target
        kept = packed_weight.kept(weight, dtype, packed_format, target)
        if isinstance(kept, QuantizedWeight):
            return packed_weight.from_quantized(kept, bias, dtype, target.fp8, self._device)
        if isinstance(kept, GroupedWeight):
            return packed_weight.from_codes(kept, bias, dtype, self._device)
        if packed_format is None:
            return packed_weight.pack(kept, bias, dtype, None, self._device)
        pack = packed_weight.pack_w8a8 if packed_format.quantizes_rows else packed_weight.pack
        return pack(kept, bias, dtype, packed_format.dtype, self._device)

    @override
    def apply(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        return linear(x, packed, self._settings)

    @override
    def has_rows(self, packed: PackedWeight) -> bool:
        return packed.scales is None

    @override
    def rows(self, packed: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        return rows(packed, ids)

    @override
    def argmax(self, x: torch.Tensor, packed: PackedWeight, limit: int) -> torch.Tensor:
        return argmax(x, packed, limit, self._settings)

    @override
    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
        return packed_weight.pack_heads(weight, dtype, self._device)

    @override
    def apply_heads(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        return head_linear(x, packed, self._settings)


def linear(x: torch.Tensor, packed: PackedWeight, settings: Settings) -> torch.Tensor:
    """x [T, K] times the packed weight [N, K], plus its bias: [T, N], both in the model dtype.

    Any row stride. Numbers of 8 or 4 bits are converted to x's dtype first; with `quantizes_rows`, x is quantized
    instead.

    Raises:
        ValueError: x has another width or dtype than the weight was packed for.
    """
    return linear_in(x, packed, _cut(x.unsqueeze(1), packed, settings), settings)


def linear_in(
    x: torch.Tensor, packed: PackedWeight, plan: Cut, settings: Settings, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`linear` with a given `plan`; `out_dtype` float32 keeps digits that the model dtype rounds away."""
    _check(x, packed)
    out = x.new_empty(x.shape[0], packed.columns, dtype=out_dtype or x.dtype)
    _multiply(x.unsqueeze(1), packed, out, plan, settings)
    return out


def head_linear(x: torch.Tensor, packed: PackedWeight, settings: Settings) -> torch.Tensor:
    """Each head of x [T, Hq, K] times its own matrix of `pack_heads`: [T, Hq, N] in the model dtype.

    Raises:
        ValueError: as `linear`.
    """
    _check(x, packed)
    out = x.new_empty(*x.shape[:2], packed.columns)
    _multiply(x, packed, out, _cut(x, packed, settings), settings)
    return out


def rows(packed: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [T] of a packed weight of floats, [T, K].

    Raises:
        ValueError: the weight is quantized.
    """
    if packed.scales is not None:
        raise ValueError(f"a weight of {packed.numbers.dtype} has no rows of {packed.dtype}")
    return packed.numbers.index_select(0, ids)


def argmax(x: torch.Tensor, packed: PackedWeight, limit: int, settings: Settings) -> torch.Tensor:
    """Column of the largest number among the first `limit` in each row of `linear(x, packed)`, int64 [T].

    The first of equals, as rounded to the model dtype; NaN counts as the lowest; NO_TOKEN if the largest is not finite.
    Takes memory for one value and column per row and tile of columns.
    """
    _check(x, packed)
    plan = _cut(x.unsqueeze(1), packed, settings)
    limit = min(limit, packed.columns)
    row_tiles, column_tiles = -(-x.shape[0] // plan.tiles.rows), -(-limit // plan.tiles.columns)
    values = x.new_empty(x.shape[0], column_tiles)
    ids = torch.empty(x.shape[0], column_tiles, dtype=torch.int32, device=x.device)
    x, x_scales = _operand(x, packed)
    launch(
        _tile_best_kernel,
        (row_tiles * column_tiles,),
        *_factors(x, x_scales, packed),
        *(packed.bias, values, ids, limit),
        *(x.shape[0], packed.columns, packed.inner, x.stride(0), plan.part_length),
        PARTS=plan.parts,
        **_constants(packed, plan, settings),
    )
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    block = min(_BEST_BLOCK, triton.next_power_of_2(column_tiles))
    launch(_best_kernel, (x.shape[0],), values, ids, out, column_tiles, BLOCK=block, num_warps=4)
    return out


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] of any float dtype as multiples of a scale for each row: `dtype` [T, K] and float32 [T, 1].

    `dtype` is int8 or the target's FP8. A scale is the row's largest number divided by the largest of `dtype` (127); a
    row with a number that is not finite has an infinite scale.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    numbers = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], 1, device=x.device)
    launch(
        _quantize_kernel,
        (x.shape[0],),
        *(x, numbers, scales, x.shape[1], x.stride(0)),
        LARGEST=127.0 if dtype == torch.int8 else torch.finfo(dtype).max,
        ROUND=dtype == torch.int8,
        BLOCK=min(4096, triton.next_power_of_2(x.shape[1])),
        num_warps=4,
    )
    return numbers, scales


def _check(x: torch.Tensor, packed: PackedWeight) -> None:
    if x.shape[-1] != packed.inner or x.dtype != packed.dtype:
        raise ValueError(
            f"rows of {x.shape[-1]} numbers in {x.dtype} do not go with a weight of {packed.inner} in {packed.dtype}"
        )


def _multiply(x: torch.Tensor, packed: PackedWeight, out: torch.Tensor, plan: Cut, settings: Settings) -> None:
    """Multiplies x [T, H, K] by the packed weight into contiguous out [T, H * N] or [T, H, N]."""
    num_rows, heads, inner = x.shape
    x, x_scales = _operand(x, packed)
    width = heads * packed.columns
    into = torch.empty(plan.parts, num_rows, width, device=x.device) if plan.split else out
    row_tiles, column_tiles = -(-num_rows // plan.tiles.rows), -(-packed.columns // plan.tiles.columns)
    launch(
        _linear_kernel,
        (row_tiles * column_tiles, heads, plan.parts if plan.split else 1),
        *_factors(x, x_scales, packed),
        *(packed.bias, into, num_rows, packed.columns, inner),
        *(x.stride(0), x.stride(1), width, plan.part_length),
        PARTS=1 if plan.split else plan.parts,
        SPLIT=plan.split,
        **_constants(packed, plan, settings),
    )
    if plan.split:
        launch(
            _sum_kernel,
            (num_rows, triton.cdiv(width, _SUM_BLOCK)),
            *(into, x_scales, packed.scales, packed.bias, out, num_rows, width),
            FORMAT=_format(packed),
            PARTS=plan.parts,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
        )


def _operand(x: torch.Tensor, packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x as the kernel takes it, with contiguous rows: unchanged, or quantized with its scales."""
    if packed.quantizes_rows:
        numbers, scales = quantize_rows(x.flatten(1), packed.numbers.dtype)
        return numbers.view(x.shape), scales
    return (x if x.stride(-1) == 1 else x.contiguous()), None


def _factors(x: torch.Tensor, x_scales: torch.Tensor | None, packed: PackedWeight) -> tuple[torch.Tensor | None, ...]:
    """Factors of a product, in the order of the kernels' arguments."""
    form = packed.codes
    parts = (None, None, None) if form is None else (form.zeros, form.offsets, form.order)
    return (x, x_scales, packed.numbers, packed.scales, *parts)


def _cut(x: torch.Tensor, packed: PackedWeight, settings: Settings) -> Cut:
    operands = _operands(packed)
    agree = operands == "half" and settings.products_agree(packed.dtype)
    return cut(settings, operands, x.shape[0], packed.columns, packed.inner, x.shape[1], tiles_agree=agree)


def _operands(packed: PackedWeight) -> Operands:
    if packed.quantizes_rows:
        return "eight"
    if packed.dtype == torch.float32:
        return "single"
    return "half" if packed.scales is None else "widened"


def _format(packed: PackedWeight) -> str:
    """Format in which the kernel reads a weight; see `_part` and `_finished`."""
    if packed.scales is None:
        return "float"
    if packed.codes is not None:
        return "codes"
    if packed.numbers.dtype == torch.uint8:
        return "fp4"
    if packed.scales.dim() == 2:
        return "grouped"
    return "int8" if packed.quantizes_rows and packed.numbers.dtype == torch.int8 else "rows"


def _constants(packed: PackedWeight, plan: Cut, settings: Settings) -> dict[str, Any]:
    kind, form = _format(packed), packed.codes
    block = GROUP if kind == "fp4" or form is not None else plan.tiles.inner
    return {
        "FORMAT": kind,
        "BITS": 0 if form is None else form.bits,
        "ROW_GRAIN": packed.row_grain,
        "TOGETHER": _TOGETHER,
        "BLOCK_M": plan.tiles.rows,
        "BLOCK_N": plan.tiles.columns,
        "BLOCK_K": plan.tiles.inner,
        "GROUP": GROUP if form is None else form.group,
        "EVEN": packed.inner % block == 0,
        **compiler_options(plan.tiles, settings.target),
    }
