"""Mixture of experts: pairs of row and slot sorted by expert into row tiles, two grouped products, a sum by slots.

Five kernels a layer, none of which needs a number from the host: grids are bounds that hold for every choice of
experts, and programs without work end at once. A pair's product does not depend on the other pairs of its tile, and a
row's results are added in float32 in the order of its slots (docs/explanation/determinism.md). So a row's bits do not
depend on the other rows unless tiles are chosen by their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from typing_extensions import override

from kernels import float8
from kernels.grouped_weight import GroupedWeight, JoinedWeight, nearest_codes, widened
from kernels.interface import AnyWeight, ClampedSwiglu, ExpertOps, ExpertWeights, PackedFormat, QuantizedWeight, Routing
from kernels.quantized_weight import alike_experts, with_row_scales
from kernels.triton_backend import codes, mxfp4, packed_weight
from kernels.triton_backend.codes import add_code_products
from kernels.triton_backend.launch import launch
from kernels.triton_backend.linear import quantize_rows
from kernels.triton_backend.packed_weight import GROUP
from kernels.triton_backend.routing import route
from kernels.triton_backend.target import Settings
from kernels.triton_backend.tiles import Tiles, compiler_options

_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_MXFP4 = torch.float4_e2m1fn_x2
_FORMATS = (
    PackedFormat(_MXFP4),
    PackedFormat(torch.quint4x2),
    *(PackedFormat(dtype, quantizes_rows) for dtype in _EIGHT_BITS for quantizes_rows in (False, True)),
)


@dataclass(frozen=True)
class StackedWeights:
    """A weight [N, K] of each of E experts.

    Attributes:
        numbers: [E, N, K] in the model dtype, int8 or FP8; or uint8 as in kernels/triton_backend/mxfp4.py,
            or codes.
        scales: None for the model dtype; float32 [E, K / GROUP, N / row_grain], rounded up, or [E, 1, N] if rows are
            quantized: number times scale is the weight; or those of MXFP4, [E, N, ...]; or of codes, [E, G', N].
        bias: [E, N] in the model dtype, or None.
        row_grain: rows that share a scale; if gates and ups alternate, so do the scales of their blocks.
        quantizes_rows: True if inputs are converted to the numbers' dtype too, row by row.
        codes: form of weights in codes; None for all others.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    row_grain: int = 1
    quantizes_rows: bool = False
    codes: codes.CodeForm | None = None


@dataclass(frozen=True)
class PackedExperts:
    """This rank's E experts, whose first id is `first`; both weights are None if it has none.

    Attributes:
        gate_up: [2I, H] of each expert, gates and ups alternating, so that one program has both.
        down: [H, I] of each.
        clamp: the activation, if it is not silu(gate) * up.
    """

    first: int
    gate_up: StackedWeights | None
    down: StackedWeights | None
    clamp: ClampedSwiglu | None


class TritonExpertOps(ExpertOps):
    """Mixtures of experts, with tiles chosen by `settings`."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device

    @override
    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, routing, correction_bias)

    @override
    def pack(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedExperts:
        target = self._settings.target
        kept = (
            replace(
                each,
                gate_up=packed_weight.kept(each.gate_up, dtype, packed_format, target),
                down=packed_weight.kept(each.down, dtype, packed_format, target),
            )
            for each in weights
        )
        return pack(kept, first, clamp, dtype, packed_format, self._device, target.fp8)

    @override
    def apply(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PackedExperts
    ) -> torch.Tensor:
        return moe(x, topk_ids, topk_weights, packed, self._settings)


def pack(
    experts: Iterable[ExpertWeights],
    first: int,
    clamp: ClampedSwiglu | None,
    dtype: torch.dtype,
    packed_format: PackedFormat | None,
    device: torch.device,
    fp8: torch.dtype = torch.float8_e4m3fn,
) -> PackedExperts:
    """Packs experts one by one, in `dtype`, on the device.

    Args:
        experts: ids `first`, `first` + 1, ..., on any device; a QuantizedWeight is one that `packed_weight.keeps`.
        first: id of the first.
        clamp: see PackedExperts.
        dtype: the model's: bfloat16, float16 or float32.
        packed_format: None for the model's dtype; int8, or the target's FP8, for the nearest multiples of a float32
            scale; float4_e2m1fn_x2 for MXFP4 and quint4x2 for codes (`nearest_codes`), whose inputs are not quantized.
        device: destination.
        fp8: the target's FP8, to which a checkpoint's FP8 numbers are converted.

    Raises:
        ValueError: another packed format.
    """
    if packed_format is not None and packed_format not in _FORMATS:
        raise ValueError(f"experts in {dtype} cannot be packed as {packed_format}")

    def one(weight: AnyWeight, bias: torch.Tensor | None) -> StackedWeights:
        if isinstance(weight, QuantizedWeight):
            return _stored(weight, bias, dtype, fp8, device)
        if isinstance(weight, GroupedWeight | JoinedWeight):
            return _in_codes(widened(weight), bias, dtype, device)
        return _packed(weight, bias, dtype, packed_format, device)

    gate_up: list[StackedWeights] = []
    down: list[StackedWeights] = []
    for expert in alike_experts(experts):
        bias = None if expert.gate_up_bias is None else _in_turn(expert.gate_up_bias.to(device))
        gate_up.append(one(_weight_in_turn(expert.gate_up, device), bias))
        down.append(one(expert.down, expert.down_bias))
    if not down:
        return PackedExperts(first, None, None, clamp)
    return PackedExperts(first, _stacked(gate_up), _stacked(down), clamp)


def _in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Reorders rows from all gates, then all ups, to alternating gates and ups."""
    return torch.stack(float8.raw(rows).chunk(2), 1).flatten(0, 1).view(rows.dtype)


def _weight_in_turn(weight: AnyWeight, device: torch.device) -> AnyWeight:
    if isinstance(weight, torch.Tensor):
        return _in_turn(weight.to(device))
    if isinstance(weight, GroupedWeight | JoinedWeight):
        weight = widened(weight)
        parts = (weight.codes, weight.scales, weight.zeros, weight.offsets)
        in_turn, scales, zeros, offsets = (None if each is None else _in_turn(each.to(device)) for each in parts)
        assert in_turn is not None
        assert scales is not None
        return replace(weight, codes=in_turn, scales=scales, zeros=zeros, offsets=offsets)
    if weight.shape[0] % (2 * GROUP):
        # A block may hold gates and ups.
        weight = with_row_scales(weight)
    numbers, scales = (_in_turn(each.to(device)) for each in (weight.numbers, weight.scales))
    return replace(weight, numbers=numbers, scales=scales)


def _stored(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fp8: torch.dtype,
    device: torch.device,
) -> StackedWeights:
    """Weights of one expert as a checkpoint stores them; scales of whole rows are repeated for each group."""
    packed = packed_weight.from_quantized(weight, None, dtype, fp8, device)
    scales = packed.scales
    assert scales is not None
    if scales.dim() == 1:
        scales = scales.expand(-(-packed.inner // GROUP), -1).contiguous()
    return StackedWeights(packed.numbers, scales, None if bias is None else bias.to(device, dtype), packed.row_grain)


def _in_codes(
    weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> StackedWeights:
    """Weights of one expert in codes."""
    numbers, scales, form = codes.laid_out(weight, device)
    return StackedWeights(numbers, scales, None if bias is None else bias.to(device, dtype), codes=form)


def _packed(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    packed_format: PackedFormat | None,
    device: torch.device,
) -> StackedWeights:
    """Packs the weights of one expert."""
    bias = None if bias is None else bias.to(device, dtype)
    weight = weight.to(device, dtype)
    if packed_format is None:
        return StackedWeights(weight, None, bias)
    if packed_format.dtype == _MXFP4:
        return StackedWeights(*mxfp4.quantized(weight), bias)
    if packed_format.dtype == torch.quint4x2:
        return _in_codes(nearest_codes(weight), bias, dtype, device)
    group = weight.shape[1] if packed_format.quantizes_rows else GROUP
    numbers, scales = packed_weight.quantized(weight, packed_format.dtype, group)
    return StackedWeights(numbers, scales.t().contiguous(), bias, quantizes_rows=packed_format.quantizes_rows)


def _stacked(experts: list[StackedWeights]) -> StackedWeights:
    """Stacks the packed weights of all experts. Takes them out of the list, so that their memory is freed early."""
    numbers, row_grain = torch.stack([expert.numbers for expert in experts]), experts[0].row_grain
    forms = [expert.codes for expert in experts if expert.codes is not None]
    form = codes.stacked(forms) if forms else None
    scales = [expert.scales for expert in experts if expert.scales is not None]
    biases = [expert.bias for expert in experts if expert.bias is not None]
    quantizes_rows = experts[0].quantizes_rows
    experts.clear()
    stacked_scales, stacked_biases = (torch.stack(each) if each else None for each in (scales, biases))
    return StackedWeights(numbers, stacked_scales, stacked_biases, row_grain, quantizes_rows, form)


# Tiles of neighbouring programs, which read the same weights one soon after the other.
_SWIZZLE = 8
# Pairs that a program of the sort looks at in one go.
_SORT_BLOCK = 2048


def tiles_for(
    settings: Settings, num_pairs: int, num_experts: int, x_size: int, weight_size: int, in_codes: bool
) -> Tiles:
    """Tiles of a product of experts. Rows of a tile are pairs of one expert; batch-invariant mode always has 64 rows.

    Otherwise tiles follow the mean number of pairs per expert: few rows need many bytes of weights in flight, and many
    rows gain from larger tiles. The number of rows is the same for both products of a layer, whatever their weights.

    Args:
        settings: target and mode.
        num_pairs: T * k.
        num_experts: E of this rank.
        x_size: bytes of a number of x.
        weight_size: bytes of a number of the weights.
        in_codes: True if the weights are codes.
    """
    large_memory = settings.target.shared_bytes > 100_000 and not settings.target.is_amd
    rows = 64
    if not settings.batch_invariant:
        rows = min(128, max(16, triton.next_power_of_2(num_pairs // num_experts)))
    # For narrow weights, a whole group of scales in a step.
    inner = (128 if weight_size == x_size and rows >= 64 else 256) // x_size
    if in_codes and x_size == 4 and not settings.target.is_amd:
        # NVIDIA multiplies float32 without matrix instructions: wider tiles keep up to 2,400 registers in memory.
        return Tiles(rows, 32, inner, 4 if rows < 64 else 8, 3 if large_memory else 2)
    if rows < 64:
        return Tiles(rows, 64, inner, 4, 4 if large_memory else 2)
    return Tiles(rows, 128, inner, 8 if rows == 128 else 4, 3 if large_memory else 2)


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    packed: PackedExperts,
    settings: Settings,
) -> torch.Tensor:
    """Weighted sum of this rank's experts' outputs for x; other ranks' experts add nothing.

    Args:
        x: [T, H] in the model dtype; rows may have gaps.
        topk_ids: int64 [T, k].
        topk_weights: float32 [T, k].
        packed: this rank's experts.
        settings: decide the tiles.

    Returns:
        [T, H] in the model dtype.
    """
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    if packed.gate_up is None or packed.down is None or not len(x):
        return x.new_zeros(x.shape)
    x = x if x.stride(1) == 1 else x.contiguous()
    num_experts, hidden, _ = packed.down.numbers.shape
    inner = packed.gate_up.numbers.shape[1] // 2
    up_tiles, down_tiles = (
        tiles_for(
            settings,
            ids.numel(),
            num_experts,
            _x_size(x, weights),
            weights.numbers.element_size(),
            weights.codes is not None,
        )
        for weights in (packed.gate_up, packed.down)
    )
    work = _sorted(ids, packed.first, num_experts, up_tiles.rows)
    # Quantizing reads all rows, also those of other ranks' pairs, which no program writes.
    activated = (x.new_zeros if packed.down.quantizes_rows else x.new_empty)(ids.numel(), inner)
    _multiply(x, packed.gate_up, activated, work, ids.shape[1], up_tiles, packed.clamp, True, settings)
    outputs = x.new_empty(ids.numel(), hidden)
    _multiply(activated, packed.down, outputs, work, 1, down_tiles, None, False, settings)
    return _combined(outputs, ids, weights, packed.first, num_experts)


def _x_size(x: torch.Tensor, weights: StackedWeights) -> int:
    """Bytes of one number of the product's input."""
    return weights.numbers.element_size() if weights.quantizes_rows else x.element_size()


@dataclass(frozen=True)
class _Work:
    """Pairs of row and slot (number row * k + slot), sorted into tiles of one expert each.

    Attributes:
        experts: int32 [tiles], index of this rank's expert; -1 for tiles without pairs, which come last.
        pairs: int32 [tiles * rows of a tile], the pair at each place of tiles with pairs; -1 for padding.
    """

    experts: torch.Tensor
    pairs: torch.Tensor


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Most tiles of `rows` rows that the pairs can need: each expert has one that is not full."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // rows


# A program counts the pairs of one expert.
@triton.jit(do_not_specialize=["num_pairs"])
def _count_pairs_kernel(ids, counts, first, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        found += (chosen == first + expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


# A program lists the pairs of one expert, in their order, and its tiles; one more program closes the list of tiles.
@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place_pairs_kernel(
    ids,
    counts,
    tile_experts,
    pairs,
    first,
    num_pairs,
    num_experts,
    num_tiles,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    is_expert = expert < num_experts
    every = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + every, mask=every < num_experts, other=0) + ROWS - 1) // ROWS
    start = tl.sum(tl.where(every < expert, tiles, 0))
    end = tl.where(is_expert, start + tl.sum(tl.where(every == expert, tiles, 0)), num_tiles)
    for tile in range(start, end, EXPERTS):
        tl.store(tile_experts + tile + every, tl.where(is_expert, expert, -1), mask=tile + every < end)
    place = start * ROWS
    for begin in range(0, tl.where(is_expert, num_pairs, 0), BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == first + expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(pairs + place + rank - 1, pair, mask=mine)
        place += tl.max(rank)
    padding = place + tl.arange(0, ROWS)
    tl.store(pairs + padding, -1, mask=is_expert & (padding < end * ROWS))


def _sorted(ids: torch.Tensor, first: int, num_experts: int, rows: int) -> _Work:
    """Sorts pairs of contiguous ids int64 [T, k], T above 0, into tiles of `rows` rows."""
    num_pairs = ids.numel()
    num_tiles = most_tiles(num_pairs, num_experts, rows)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    work = _Work(counts.new_empty(num_tiles), counts.new_empty(num_tiles * rows))
    launch(_count_pairs_kernel, (num_experts,), ids, counts, first, num_pairs, BLOCK=_SORT_BLOCK, num_warps=8)
    launch(
        _place_pairs_kernel,
        (num_experts + 1,),
        ids,
        counts,
        work.experts,
        work.pairs,
        first,
        num_pairs,
        num_experts,
        num_tiles,
        EXPERTS=triton.next_power_of_2(num_experts),
        ROWS=rows,
        BLOCK=_SORT_BLOCK,
        num_warps=8,
    )
    return work


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in float32; silu is rounded to the model dtype before the product."""
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def _clamped_swiglu(gate, up, alpha, limit):
    """gpt-oss's activation (`ClampedSwiglu`); NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def _fp4_product(total, numbers, codes, exponents, dtype: tl.constexpr):
    """Adds to `total` the product of numbers [rows, 64] with 64 MXFP4 weights: codes [64, columns], exponents [2,
    columns]."""
    # E2M1 at the begin of float16's bits is 2^-14 of itself, below its normal numbers too. 255 makes a zero a NaN.
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0
    powers = tl.broadcast_to(powers[:, None, :], [2, 32, codes.shape[1]])
    weights = bits.to(tl.float16, bitcast=True).to(tl.float32) * tl.reshape(powers, codes.shape)
    return tl.dot(numbers, weights.to(dtype), total, input_precision="ieee")


@triton.jit
def _fp4_piece(total, x_at, weight_at, scale_at, start, k, inner, dtype: tl.constexpr, INNER: tl.constexpr):
    """Adds to `total` the product of INNER numbers of x from `start` on with as many MXFP4 weights."""
    codes = tl.load(weight_at + start // 2).to(tl.int16)
    lower = tl.load(x_at + start, mask=k[None, :] < inner - start, other=0.0)
    upper = tl.load(x_at + start + INNER // 2, mask=k[None, :] < inner - start - INNER // 2, other=0.0)
    exponent_at = scale_at[None, :] + start // 32 + tl.arange(0, 2)[:, None]
    total = _fp4_product(total, lower, codes, tl.load(exponent_at), dtype)
    return _fp4_product(total, upper, codes >> 4, tl.load(exponent_at + 2), dtype)


@triton.jit
def _add_products(
    total,
    x_rows,
    weight_rows,
    scale_at,
    scale_columns,
    inner,
    dtype: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    FP4: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    INNER: tl.constexpr,
):
    """Adds to `total` the product of rows of x with rows of weights that are no codes."""
    k = tl.arange(0, INNER // 2 if FP4 else INNER)
    x_at, weight_at = x_rows + k[None, :], weight_rows + k[:, None]
    for start in range(0, inner, INNER):
        if FP4:
            total = _fp4_piece(total, x_at, weight_at, scale_at, start, k, inner, dtype, INNER)
        elif EVEN:
            numbers = tl.load(x_at + start)
            weights = tl.load(weight_at + start)
        else:
            numbers = tl.load(x_at + start, mask=k[None, :] < inner - start, other=0.0)
            weights = tl.load(weight_at + start, mask=k[:, None] < inner - start, other=0.0)
        if SCALED:
            part = tl.dot(numbers, weights.to(numbers.dtype), input_precision="ieee")
            total += part * tl.load(scale_at + start // GROUP * scale_columns)[None, :]
        elif INT8:
            total = tl.dot(numbers, weights, total, out_dtype=tl.int32)
        elif not FP4:
            # Also FP8 by FP8, for which Hopper otherwise adds many products in less than float32.
            total = tl.dot(numbers, weights, total, input_precision="ieee", max_num_imprecise_acc=INNER)
    return total


# A program multiplies one tile of pairs by rows of its expert's weight. A tile's pairs can be anywhere in x and out.
# With GATED, out gets the activation of each gate and the up after it, otherwise the products themselves. Functions
# are inlined where possible: the interpreter takes 3 ms per call.
@triton.jit
def _grouped_product_kernel(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    offsets,
    order,
    bias,
    out,
    tile_experts,
    pairs,
    x_stride,
    weight_stride,
    scale_stride,
    scale_columns,
    pairs_per_row,
    columns,
    inner,
    alpha,
    limit,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    FP4: tl.constexpr,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_GRAIN: tl.constexpr,
    SWIZZLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    # Programs run through SWIZZLE tiles before they come to the next columns.
    column_blocks = (columns + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    first_tile = program // (SWIZZLE * column_blocks) * SWIZZLE
    neighbours = tl.minimum(tl.num_programs(0) // column_blocks - first_tile, SWIZZLE)
    in_group = program % (SWIZZLE * column_blocks)
    tile = first_tile + in_group % neighbours
    block = in_group // neighbours
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
    # Padding rows repeat the tile's first pair, padding columns the last column; neither is stored.
    row = (tl.where(pair >= 0, pair, tl.load(pairs + tile * ROWS)) // pairs_per_row).to(tl.int64)
    weight_column = tl.minimum(block * COLUMNS + tl.arange(0, COLUMNS), columns - 1)
    weight_row = expert * columns + weight_column
    x_rows = x + row[:, None] * x_stride
    weight_rows = weight + weight_row[None, :] * weight_stride
    # Without scales these addresses are not read.
    scale_column = (weight_column // (2 * ROW_GRAIN) * 2 + weight_column % 2) if GATED else weight_column // ROW_GRAIN
    scale_at = scales + (weight_row * scale_stride if FP4 else expert * scale_stride + scale_column)
    dtype = out.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.int32 if INT8 else tl.float32)
    if BITS:
        at = (expert * scale_stride + weight_column)[None, :]
        total = add_code_products(
            total, x_rows, weight_rows, scale_at[None, :], zeros if zeros is None else zeros + at,
            offsets if offsets is None else offsets + at,
            order if order is None else order + expert * (tl.cdiv(inner, 128) * 128),
            (pair >= 0)[:, None], 0, inner, inner, columns, BITS, GROUP, EVEN,
        )  # fmt: skip
    else:
        total = _add_products(
            total, x_rows, weight_rows, scale_at, scale_columns, inner, dtype, SCALED, INT8, FP4, GROUP, EVEN, INNER
        )
    if x_scales is not None:
        total = total.to(tl.float32) * (tl.load(x_scales + row)[:, None] * tl.load(scale_at)[None, :])
    if bias is not None:
        total += tl.load(bias + weight_row).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total.to(dtype).to(tl.float32), [ROWS, COLUMNS // 2, 2]))
        result = _clamped_swiglu(gate, up, alpha, limit) if CLAMPED else _silu_and_mul(gate, up, dtype)
        width = columns // 2
        column = block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    else:
        result = total
        width = columns
        column = block * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(
        out + pair[:, None].to(tl.int64) * width + column[None, :],
        result.to(dtype),
        mask=(pair[:, None] >= 0) & (column[None, :] < width),
    )


def _multiply(
    x: torch.Tensor,
    weights: StackedWeights,
    out: torch.Tensor,
    work: _Work,
    pairs_per_row: int,
    tiles: Tiles,
    clamp: ClampedSwiglu | None,
    gated: bool,
    settings: Settings,
) -> None:
    """Rows `pair // pairs_per_row` of x times the weights of the pairs' experts, into rows `pair` of contiguous out."""
    columns, inner = weights.numbers.shape[1], x.shape[1]
    x_scales: torch.Tensor | None = None
    if weights.quantizes_rows:
        x, x_scales = quantize_rows(x, weights.numbers.dtype)
    scales = weights.numbers if weights.scales is None else weights.scales
    form = weights.codes
    is_fp4 = weights.numbers.dtype == torch.uint8 and form is None
    scale_stride = scales.stride(1) if is_fp4 else scales.stride(0)
    step = tiles.inner if weights.numbers.dtype != torch.uint8 else GROUP
    launch(
        _grouped_product_kernel,
        (len(work.experts) * triton.cdiv(columns, tiles.columns),),
        *(x, x_scales, weights.numbers, scales),
        *((None, None, None) if form is None else (form.zeros, form.offsets, form.order)),
        *(weights.bias, out, work.experts, work.pairs),
        *(x.stride(0), weights.numbers.stride(1), scale_stride, scales.shape[2], pairs_per_row, columns, inner),
        0.0 if clamp is None else clamp.alpha,
        0.0 if clamp is None else clamp.limit,
        SCALED=weights.scales is not None and x_scales is None and weights.numbers.dtype != torch.uint8,
        INT8=x_scales is not None and x.dtype == torch.int8,
        FP4=is_fp4,
        BITS=0 if form is None else form.bits,
        GATED=gated,
        CLAMPED=clamp is not None,
        GROUP=GROUP if form is None else form.group,
        ROW_GRAIN=weights.row_grain,
        SWIZZLE=_SWIZZLE,
        EVEN=inner % step == 0,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        INNER=step,
        **compiler_options(tiles, settings.target),
    )


# A program adds columns of one row's outputs, in the order of its slots.
@triton.jit
def _combine_kernel(outputs, ids, weights, out, first, num_experts, slots, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    total = tl.full([BLOCK], 0.0, tl.float32)
    for slot in range(slots):
        pair = row * slots + slot
        expert = tl.load(ids + pair) - first
        mine = (expert >= 0) & (expert < num_experts)
        part = tl.load(outputs + pair * columns + column, mask=there & mine, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=there)


def _combined(
    outputs: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, num_experts: int
) -> torch.Tensor:
    """Sums outputs [T * k, H] weighted by [T, k] into [T, H], without the outputs of other ranks' experts."""
    rows, slots = ids.shape
    columns = outputs.shape[1]
    out = outputs.new_empty(rows, columns)
    block = min(1024, triton.next_power_of_2(columns))
    grid = (rows, triton.cdiv(columns, block))
    launch(
        _combine_kernel, grid, outputs, ids, weights, out, first, num_experts, slots, columns, BLOCK=block, num_warps=4
    )
    return out
