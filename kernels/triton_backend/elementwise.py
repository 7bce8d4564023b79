"""Norms, rotary embedding and activation: every row alone, in float32, rounded where KernelBackend says.

A row lies in one program, whole, in a tile that only its width decides: neither the number of rows nor a row's place
changes the order of its sums. Products and sums are not contracted, so that fused kernels round as single ones do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from typing_extensions import override

from kernels.interface import ElementwiseOps
from kernels.triton_backend.launch import launch

# Numbers that a program of short rows holds.
_TILE = 1024


class TritonElementwiseOps(ElementwiseOps):
    """Elementwise operations by the functions of this module."""

    @override
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    @override
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    @override
    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return layer_norm(x, weight, bias, eps)

    @override
    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q, k, cos, sin)

    @override
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)

    @override
    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x, gelu=True)

    @override
    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return softcap(x, cap)


@triton.jit
def _silu_and_mul_kernel(x, out, x_stride, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + inner + columns, mask=mask, other=0.0)
    exponent = gate
    if GELU:
        # 0.5 * (1 + tanh(u)) is 1 / (1 + e^-2u), where u is sqrt(2 / pi) * (gate + 0.044715 * gate^3).
        exponent = gate * (1.59576912161 + 0.07135481627 * (gate * gate))
    activated = (gate / (1.0 + tl.exp(-exponent))).to(up.dtype)
    tl.store(out + row * inner + columns, (activated.to(tl.float32) * up.to(tl.float32)).to(up.dtype), mask=mask)


def silu_and_mul(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:]; silu is rounded to the model dtype before the product. With `gelu` that is GELU."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, inner)
    block = min(1024, triton.next_power_of_2(inner))
    grid = (rows, triton.cdiv(inner, block))
    launch(_silu_and_mul_kernel, grid, x, out, x.stride(0), inner, GELU=gelu, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _softcap_kernel(x, out, x_stride, width, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + columns, mask=columns < width, other=0.0)
    capped = cap * (1.0 - 2.0 / (tl.exp(values * (2.0 / cap)) + 1.0))
    tl.store(out + row * width + columns, capped, mask=columns < width)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32 x [T, N]."""
    rows, width = x.shape
    out = x.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    launch(
        _softcap_kernel, (rows, triton.cdiv(width, block)), x, out, x.stride(0), width, cap, BLOCK=block, num_warps=4
    )
    return out


# Rows lie in two dimensions: row r at (r // inner) * outer_stride + (r % inner) * inner_stride.
@triton.jit
def _row_starts(row, inner, outer_stride, inner_stride):
    return (row // inner) * outer_stride + (row % inner) * inner_stride


# Root mean square norm of rows [ROWS, BLOCK], zeros after `width`; rounded to DTYPE before and after the weight.
@triton.jit
def _rms_normed(wide, weight, width, eps, DTYPE: tl.constexpr):
    mean_square = tl.sum(wide * wide, axis=1) / width
    normed = (wide * tl.rsqrt(mean_square + eps)[:, None]).to(DTYPE)
    return (normed.to(tl.float32) * weight[None, :]).to(DTYPE)


# A program norms ROWS whole rows.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, weight, out, rows, inner, width, outer_stride, inner_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    places = _row_starts(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
    values = tl.load(x + places, mask=mask, other=0.0)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = _rms_normed(values.to(tl.float32), factors, width, eps, values.dtype)
    tl.store(out + row[:, None] * width + column[None, :], normed, mask=mask)


# A program adds and norms ROWS whole rows.
@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    inner,
    width,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    x_places = _row_starts(row, inner, x_outer_stride, x_inner_stride)[:, None] + column[None, :]
    values = tl.load(x + x_places, mask=mask, other=0.0)
    residual_places = _row_starts(row, inner, residual_outer_stride, residual_inner_stride)[:, None] + column[None, :]
    added = tl.load(residual + residual_places, mask=mask, other=0.0)
    summed = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = _rms_normed(summed.to(tl.float32), factors, width, eps, values.dtype)
    places = row[:, None] * width + column[None, :]
    tl.store(total + places, summed, mask=mask)
    tl.store(out + places, normed, mask=mask)


# A program norms ROWS whole rows.
@triton.jit(do_not_specialize=["rows"])
def _layer_norm_kernel(
    x, weight, bias, out, rows, inner, width, outer_stride, inner_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    places = _row_starts(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
    values = tl.load(x + places, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    mean = tl.sum(wide, axis=1) / width
    centred = tl.where(mask, wide - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / width
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    offsets = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    normed = centred * tl.rsqrt(variance + eps)[:, None] * factors[None, :] + offsets[None, :]
    tl.store(out + row[:, None] * width + column[None, :], normed.to(values.dtype), mask=mask)


@dataclass(frozen=True)
class RowTile:
    """Division of rows of one width among programs.

    Attributes:
        rows: whole rows of a program.
        block: the width, rounded up to a power of two.
        num_warps: of a program.
    """

    rows: int
    block: int
    num_warps: int

    @classmethod
    def of(cls, width: int) -> RowTile:
        """Tile for rows of `width` numbers."""
        block = triton.next_power_of_2(width)
        rows = max(1, _TILE // block)
        num_warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
        return cls(rows, block, num_warps)

    def grid(self, rows: int) -> tuple[int]:
        """Number of programs for `rows` rows."""
        return (triton.cdiv(rows, self.rows),)

    @property
    def constants(self) -> dict[str, int | bool]:
        """Constants and options of a kernel of norms."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.num_warps, "enable_fp_fusion": False}


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [outer, inner, D] whose rows are contiguous; copied only if strides cannot express that."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of x [..., D] in the model dtype, with rows of any strides, by weight [D]. The result is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = _in_rows(x)
    outer, inner, width = rows.shape
    tile = RowTile.of(width)
    launch(
        _rms_norm_kernel,
        tile.grid(outer * inner),
        *(rows, weight, out, outer * inner, inner, width, rows.stride(0), rows.stride(1), eps),
        **tile.constants,
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of x + residual, both [..., D], by weight [D]. Returns the norm and the sum, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    rows, added = _in_rows(x), _in_rows(residual)
    outer, inner, width = rows.shape
    tile = RowTile.of(width)
    launch(
        _add_rms_norm_kernel,
        tile.grid(outer * inner),
        *(rows, added, weight, out, total, outer * inner, inner, width),
        *(rows.stride(0), rows.stride(1), added.stride(0), added.stride(1), eps),
        **tile.constants,
    )
    return out, total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm of x [..., D], with rows of any strides, by weight and bias [D]. The result is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = _in_rows(x)
    outer, inner, width = rows.shape
    tile = RowTile.of(width)
    launch(
        _layer_norm_kernel,
        tile.grid(outer * inner),
        *(rows, weight, bias, out, outer * inner, inner, width, rows.stride(0), rows.stride(1), eps),
        **tile.constants,
    )
    return out


# Rotates HEADS heads of one token, from head `first` on; the dimensions after the 2 * half rotated ones are copied.
@triton.jit
def _rotate_heads(
    x,
    out,
    head_stride,
    heads,
    first,
    cosines,
    sines,
    head_dim,
    half,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    head = (first + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (head < heads) & (pair < half)
    values = tl.load(x + head * head_stride + pair, mask=mask, other=0.0)
    low = values.to(tl.float32)
    high = tl.load(x + head * head_stride + half + pair, mask=mask, other=0.0).to(tl.float32)
    rotated_low = low * cosines - high * sines
    rotated_high = high * cosines + low * sines
    tl.store(out + head * head_dim + pair, rotated_low.to(values.dtype), mask=mask)
    tl.store(out + head * head_dim + half + pair, rotated_high.to(values.dtype), mask=mask)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        rest_mask = (head < heads) & (column < head_dim)
        rest = tl.load(x + head * head_stride + column, mask=rest_mask, other=0.0)
        tl.store(out + head * head_dim + column, rest, mask=rest_mask)


# A program rotates HEADS heads of one token: query heads, then key heads.
@triton.jit
def _rope_kernel(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_heads,
    k_heads,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    cos_stride,
    sin_stride,
    head_dim,
    half,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(q_heads, HEADS)
    pair = tl.arange(0, PAIRS)[None, :]
    cosines = tl.load(cos + row * cos_stride + pair, mask=pair < half, other=0.0)
    sines = tl.load(sin + row * sin_stride + pair, mask=pair < half, other=0.0)
    if tile < q_tiles:
        _rotate_heads(
            q + row * q_row_stride,
            q_out + row * q_heads * head_dim,
            q_head_stride,
            q_heads,
            tile * HEADS,
            cosines,
            sines,
            head_dim,
            half,
            HEADS,
            PAIRS,
            REST,
        )
    else:
        _rotate_heads(
            k + row * k_row_stride,
            k_out + row * k_heads * head_dim,
            k_head_stride,
            k_heads,
            (tile - q_tiles) * HEADS,
            cosines,
            sines,
            head_dim,
            half,
            HEADS,
            PAIRS,
            REST,
        )


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q [T, Hq, D] and k [T, Hkv, D], which may be slices of one tensor; returns both contiguous.

    cos and sin are float32 [T, 1, R/2], R <= D. One launch.
    """
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    rows, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], cos.shape[-1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    pairs, rest = triton.next_power_of_2(half), head_dim - 2 * half
    heads = max(1, min(triton.next_power_of_2(max(q_heads, k_heads)), _TILE // pairs // 2))
    launch(
        _rope_kernel,
        (rows, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)),
        *(q, k, cos, sin, q_out, k_out, q_heads, k_heads),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0), head_dim, half),
        HEADS=heads,
        PAIRS=pairs,
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return q_out, k_out
