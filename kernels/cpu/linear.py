"""Matrix products by the native kernels: weights in panels, rows that do not see each other."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass

import torch

from kernels.cpu.library import DTYPES, GROUPS, PANEL, check


@dataclass(frozen=True)
class PanelLinear:
    """A weight in panels (kernels/cpu/native/linear.cpp).

    Attributes:
        panels: `panel_shape` in the model dtype.
        bias: float32 [N], rounded to the model dtype before, or None.
        columns: N.
        inner: K.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    inner: int


def panel_shape(columns: int, inner: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Of a packed weight [N, K]: [N / 16, K / group, 16, group], rounded up; pairs of bfloat16 neighbours in k."""
    group = GROUPS[dtype]
    return -(-columns // PANEL), -(-inner // group), PANEL, group


def pack(library: CDLL, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> PanelLinear:
    """Packs a weight [N, K] and a bias [N] in `dtype`, one of `DTYPES`; copies both."""
    columns, inner = weight.shape
    source = weight.to(dtype).contiguous()
    panels = torch.empty(panel_shape(columns, inner, dtype), dtype=dtype)
    library.fissile_pack_linear(DTYPES[dtype], source.data_ptr(), columns, inner, panels.data_ptr())
    return PanelLinear(panels, None if bias is None else bias.to(dtype, copy=True).float(), columns, inner)


def rows(packed: PanelLinear, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` int64 [T] of the weight: [T, K]"""
    panels = packed.panels
    # A group of neighbours in k is one number of four bytes, whatever the dtype.
    groups = panels.view(torch.int32).squeeze(-1)[ids // PANEL, :, ids % PANEL]
    return groups.view(panels.dtype)[:, : packed.inner]


def linear(library: CDLL, x: torch.Tensor, packed: PanelLinear) -> torch.Tensor:
    """x [T, K] times the weight, plus the bias: [T, N]"""
    rows, inner = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
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
            packed.panels.data_ptr(),
            bias,
            out.data_ptr(),
            packed.columns,
        )
    )
    return out


def argmax(library: CDLL, x: torch.Tensor, packed: PanelLinear, limit: int) -> torch.Tensor:
    """The first of the largest of each row's first `limit` > 0 columns, int64 [T]; see KernelBackend.linear_argmax."""
    rows, inner = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
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
            packed.panels.data_ptr(),
            bias,
            places.data_ptr(),
        )
    )
    return places


@dataclass(frozen=True)
class PanelHeads:
    """A weight for each head in panels.

    Attributes:
        panels: [Hq, *`panel_shape`] in the model dtype.
        columns: N.
    """

    panels: torch.Tensor
    columns: int


def pack_heads(library: CDLL, weight: torch.Tensor, dtype: torch.dtype) -> PanelHeads:
    """Packs weights [Hq, N, K] in `dtype`, one of `DTYPES`."""
    return PanelHeads(torch.stack([pack(library, one, None, dtype).panels for one in weight]), weight.shape[1])


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
