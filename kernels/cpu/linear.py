"""Matrix products by the native kernels: weights in panels, rows that do not see each other."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass, replace

import numpy as np
import torch
from typing_extensions import override

from kernels import large_pages
from kernels.cpu.fallback import Fallback
from kernels.cpu.library import (
    CACHE_LINE,
    CODE_BITS,
    CODE_GROUPS,
    CODE_OFFSETS,
    CODE_SCALES,
    CODES,
    DTYPES,
    JOINED,
    PACKED_DTYPES,
    PANEL,
    check,
)
from kernels.grouped_weight import BLOCK, DIVISORS, NEAREST_GROUP, GroupedWeight, JoinedWeight, unfactored
from kernels.interface import AnyWeight, LinearOps, PackedFormat
from kernels.quantized_weight import as_floats
from kernels.torch_backend.linear import PackedHeads, PackedLinear

# Formats of weights that are quantized when they are packed -> what `PackedFormat` says.
FORMATS = {"int8": torch.int8, "int4": torch.quint4x2}


@dataclass(frozen=True)
class PanelLinear:
    """A weight in panels (kernels/cpu/native/kernels.hpp).

    Attributes:
        panels: int8 [bytes], aligned to 64.
        code: in `PACKED_DTYPES`, of the numbers in the panels: the model dtype, or int8 with scales; from `CODES` on of
            codes in groups; `JOINED` of several such weights.
        bias: float32 [N], rounded to the model dtype before, or None.
        columns: N.
        inner: K.
        order: int64 [K], of codes: the input's number that each column multiplies; None if they are in order.
    """

    panels: torch.Tensor
    code: int
    bias: torch.Tensor | None
    columns: int
    inner: int
    order: torch.Tensor | None = None


@dataclass(frozen=True)
class PanelHeads:
    """A weight for each head in panels.

    Attributes:
        panels: int8 [Hq, bytes of a head's], in the model dtype.
        columns: N.
    """

    panels: torch.Tensor
    columns: int


class CpuLinearOps(LinearOps):
    """Products of panels; of `argmax` only some columns are ever in memory."""

    def __init__(self, library: CDLL, fallback: Fallback) -> None:
        self._library = library
        self._fallback = fallback
        self._torch = fallback.backend.linear

    @override
    def pack(
        self,
        weight: AnyWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PanelLinear | PackedLinear:
        if dtype in DTYPES:
            return pack_any(self._library, weight, bias, dtype, packed_dtype(packed_format))
        self._fallback.used = True
        packed: PackedLinear = self._torch.pack(weight, bias, dtype, packed_format)
        return packed

    @override
    def apply(self, x: torch.Tensor, packed: PanelLinear | PackedLinear) -> torch.Tensor:
        return linear(self._library, x, packed) if isinstance(packed, PanelLinear) else self._torch.apply(x, packed)

    @override
    def has_rows(self, packed: PanelLinear | PackedLinear) -> bool:
        return not isinstance(packed, PanelLinear) or packed.code in DTYPES.values()

    @override
    def rows(self, packed: PanelLinear | PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        return rows(packed, ids) if isinstance(packed, PanelLinear) else self._torch.rows(packed, ids)

    @override
    def argmax(self, x: torch.Tensor, packed: PanelLinear | PackedLinear, limit: int) -> torch.Tensor:
        if isinstance(packed, PanelLinear):
            return argmax(self._library, x, packed, limit)
        return self._torch.argmax(x, packed, limit)

    @override
    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PanelHeads | PackedHeads:
        if dtype in DTYPES:
            return pack_heads(self._library, weight, dtype)
        self._fallback.used = True
        packed: PackedHeads = self._torch.pack_heads(weight, dtype)
        return packed

    @override
    def apply_heads(self, x: torch.Tensor, packed: PanelHeads | PackedHeads) -> torch.Tensor:
        if isinstance(packed, PanelHeads):
            return head_linear(self._library, x, packed)
        return self._torch.apply_heads(x, packed)


def packed_dtype(packed_format: PackedFormat | None) -> torch.dtype | None:
    """Dtype of packed numbers; None for the model's dtype.

    Raises:
        ValueError: rows are to be quantized too.
    """
    if packed_format is None:
        return None
    if packed_format.quantizes_rows:
        raise ValueError("native kernels do not quantize rows")
    return packed_format.dtype


def pack_any(
    library: CDLL,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None,
) -> PanelLinear:
    """Packs a weight of any form: codes as they are, or as `packed_dtype` says, which may be quint4x2 too."""
    if packed_dtype == torch.quint4x2:
        return pack_codes(library, nearest_codes(library, as_floats(weight).to(dtype)), bias, dtype)
    if packed_dtype is None and isinstance(weight, GroupedWeight):
        return pack_codes(library, weight, bias, dtype)
    if packed_dtype is None and isinstance(weight, JoinedWeight):
        return pack_joined(library, weight, bias, dtype)
    return pack(library, as_floats(weight), bias, dtype, packed_dtype)


def pack(
    library: CDLL,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None = None,
) -> PanelLinear:
    """Packs a weight [N, K] and a bias [N] in `dtype`, one of `DTYPES`; copies both.

    `packed_dtype` is that of the packed weight: `dtype` (the default), or int8, which rounds to one of 255 multiples of
    a float32 scale for each column and 128 numbers along K.

    Raises:
        ValueError: another packed dtype.
    """
    if packed_dtype not in (None, dtype, torch.int8):
        raise ValueError(f"weights in {dtype} cannot be packed as {packed_dtype}")
    code = PACKED_DTYPES[packed_dtype or dtype]
    columns, inner = weight.shape
    source = weight.to(dtype).contiguous()
    panels = aligned(library.fissile_packed_bytes(code, columns, inner))
    library.fissile_pack_linear(DTYPES[dtype], source.data_ptr(), columns, inner, code, panels.data_ptr())
    return PanelLinear(panels, code, None if bias is None else bias.to(dtype, copy=True).float(), columns, inner)


def pack_codes(library: CDLL, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> PanelLinear:
    """Packs a weight [N, K] in codes, and a bias [N] in `dtype`, one of `DTYPES`; copies both."""
    columns, inner = weight.shape
    if not _keeps_factors(weight):
        weight = unfactored(weight)
    scales, factors = weight.scales.contiguous(), weight.factors
    offsets = weight.offsets if factors is not None else _added(weight)
    # Each block repeats the scales of a group that exceeds it, or of the whole row.
    code = (
        CODES | CODE_BITS[weight.bits] | CODE_SCALES[scales.dtype] | CODE_GROUPS.get(weight.group, CODE_GROUPS[BLOCK])
    )
    if offsets is not None:
        code |= CODE_OFFSETS
    panels = aligned(library.fissile_packed_bytes(code, columns, inner))
    library.fissile_pack_codes(
        code,
        weight.codes.contiguous().data_ptr(),
        scales.data_ptr(),
        None if offsets is None else offsets.contiguous().data_ptr(),
        None if factors is None else factors.contiguous().data_ptr(),
        columns,
        inner,
        weight.group,
        panels.data_ptr(),
    )
    rounded_bias = None if bias is None else bias.to(dtype, copy=True).float()
    return PanelLinear(panels, code, rounded_bias, columns, inner, weight.order)


def _keeps_factors(weight: GroupedWeight) -> bool:
    """True if kernels multiply by the factors: there are no zero points, or zero points 0 and offsets."""
    if weight.factors is None or weight.group not in CODE_GROUPS:
        return False
    if weight.zeros is None:
        return weight.offsets is None
    return weight.offsets is not None and not weight.zeros.any()


def pack_joined(library: CDLL, weight: JoinedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> PanelLinear:
    """Packs weights in codes one after another, behind a list of them (Joined in kernels.hpp)."""
    parts = [pack_codes(library, part, None, dtype) for part in weight.parts]
    # The number of parts, then three numbers for each.
    start = -(-8 * (1 + 3 * len(parts)) // CACHE_LINE) * CACHE_LINE
    panels = aligned(start + sum(part.panels.nbytes for part in parts))
    header = torch.zeros(start // 8, dtype=torch.int64)
    header[0] = len(parts)
    for i, part in enumerate(parts):
        header[1 + 3 * i : 4 + 3 * i] = torch.tensor([part.code, part.columns, start])
        panels[start : start + part.panels.nbytes] = part.panels
        start += part.panels.nbytes
    panels[: header.nbytes] = header.view(torch.int8)
    rounded_bias = None if bias is None else bias.to(dtype, copy=True).float()
    return PanelLinear(panels, JOINED, rounded_bias, *weight.shape, parts[0].order)


def nearest_codes(library: CDLL, weight: torch.Tensor) -> GroupedWeight:
    """As grouped_weight.nearest_codes, to the bit, in a hundredth of the time."""
    rows, inner = weight.shape
    codes = torch.empty(rows, inner, dtype=torch.uint8)
    scales = torch.empty(rows, -(-inner // NEAREST_GROUP), dtype=torch.bfloat16)
    numbers, divisors = weight.float().contiguous(), torch.tensor(DIVISORS)
    library.fissile_nearest_codes(
        numbers.data_ptr(),
        rows,
        inner,
        divisors.data_ptr(),
        len(DIVISORS),
        codes.data_ptr(),
        scales.data_ptr(),
    )
    return GroupedWeight(codes, 4, NEAREST_GROUP, scales)


def _added(weight: GroupedWeight) -> torch.Tensor | None:
    """float32 [N, G] that is added to (code - middle) * scale; None for zeros."""
    if weight.zeros is None:
        return None if weight.offsets is None else weight.offsets.neg()
    added = weight.scales.float() * (weight.middle - weight.zeros.float())
    return (added if weight.offsets is None else added - weight.offsets).contiguous()


def aligned(size: int) -> torch.Tensor:
    """int8 [size] that starts at a cache line; in large pages if it fills one."""
    if size >= large_pages.LARGE_PAGE:
        return large_pages.zeros(size, torch.int8)
    memory = torch.empty(size + CACHE_LINE, dtype=torch.int8)
    first = -memory.data_ptr() % CACHE_LINE
    return memory[first : first + size]


def rows(packed: PanelLinear, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [T] of a weight in its own dtype, not int8: [T, K]"""
    dtype = next(dtype for dtype, code in DTYPES.items() if code == packed.code)
    # A group of neighbours in k is one number of four bytes, whatever the dtype. Few rows are gathered faster by NumPy.
    panels = packed.panels.numpy().view(np.int32).reshape(-(-packed.columns // PANEL), -1, PANEL)
    panel, place = np.divmod(ids.numpy(), PANEL)
    found = torch.from_numpy(panels[panel, :, place])
    # PyTorch gives an array without rows no stride, and does not see it in a narrower dtype.
    return found.view(dtype)[:, : packed.inner] if len(ids) else torch.empty(0, packed.inner, dtype=dtype)


def linear(library: CDLL, x: torch.Tensor, packed: PanelLinear) -> torch.Tensor:
    """x [T, K] times the weight, plus the bias: [T, N]"""
    x = _checked(x, packed)
    rows, inner = x.shape
    out = torch.empty(rows, packed.columns, dtype=x.dtype)
    bias = None if packed.bias is None else packed.bias.data_ptr()
    check(
        library.fissile_linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            rows,
            inner,
            packed.columns,
            packed.code,
            packed.panels.data_ptr(),
            bias,
            None if packed.order is None else packed.order.data_ptr(),
            out.data_ptr(),
            packed.columns,
        )
    )
    return out


def gated_linear(library: CDLL, x: torch.Tensor, packed: PanelLinear, readable_rows: int | None = None) -> torch.Tensor:
    """silu(gates) * ups, for the product of x [T, K] with a weight of gates followed by ups: [T, N / 2].

    `readable_rows` rows of x's memory can be read, T or more; rows after T may hold anything.
    """
    x = _checked(x, packed)
    rows, inner = x.shape
    products = torch.empty(rows, packed.columns, dtype=x.dtype)
    out = torch.empty(rows, packed.columns // 2, dtype=x.dtype)
    bias = None if packed.bias is None else packed.bias.data_ptr()
    check(
        library.fissile_gated_linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            rows,
            readable_rows or rows,
            inner,
            packed.columns,
            packed.code,
            packed.panels.data_ptr(),
            bias,
            None if packed.order is None else packed.order.data_ptr(),
            products.data_ptr(),
            out.data_ptr(),
            packed.columns // 2,
        )
    )
    return out


def _checked(x: torch.Tensor, packed: PanelLinear) -> torch.Tensor:
    """Makes each row of x [T, K] contiguous.

    Raises:
        ValueError: rows of another length, which the kernels would read past the weight for.
    """
    if x.shape[1] != packed.inner:
        raise ValueError(f"rows of {x.shape[1]} numbers do not go with a weight of {packed.inner}")
    return x if x.stride(1) == 1 else x.contiguous()


def argmax(library: CDLL, x: torch.Tensor, packed: PanelLinear, limit: int) -> torch.Tensor:
    """The first of the largest of each row's first `limit` > 0 columns, int64 [T]; see LinearOps.argmax."""
    if packed.code == JOINED:
        return linear(library, x, packed)[:, :limit].float().max(1).indices
    x = _checked(x, packed)
    rows, inner = x.shape
    places = torch.empty(rows, dtype=torch.int64)
    bias = None if packed.bias is None else packed.bias.data_ptr()
    columns = min(limit, packed.columns)
    check(
        library.fissile_linear_argmax(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            rows,
            inner,
            columns,
            packed.code,
            packed.panels.data_ptr(),
            bias,
            None if packed.order is None else packed.order.data_ptr(),
            places.data_ptr(),
        )
    )
    return places


def pack_heads(library: CDLL, weight: torch.Tensor, dtype: torch.dtype) -> PanelHeads:
    """Packs weights [Hq, N, K] in `dtype`, one of `DTYPES`."""
    return PanelHeads(stacked([pack(library, one, None, dtype) for one in weight]), weight.shape[1])


def stacked(packed: list[PanelLinear]) -> torch.Tensor:
    """int8 [E, bytes of each]: packed weights, concatenated; each is freed as soon as it is copied."""
    size = packed[0].panels.shape[0] if packed else 0
    whole = aligned(len(packed) * size).view(len(packed), size)
    for i, one in enumerate(packed):
        whole[i] = one.panels
        packed[i] = replace(one, panels=whole[i])
    return whole


def head_linear(library: CDLL, x: torch.Tensor, packed: PanelHeads) -> torch.Tensor:
    """Each head of x [T, Hq, K] times its weight: [T, Hq, N]"""
    rows, heads, inner = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(rows, heads, packed.columns, dtype=x.dtype)
    check(
        library.fissile_head_linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            rows,
            heads,
            inner,
            packed.columns,
            packed.panels.data_ptr(),
            out.data_ptr(),
        )
    )
    return out
