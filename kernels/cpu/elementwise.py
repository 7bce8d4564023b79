"""Norms, rotation and activation by the native kernels (kernels/cpu/native/elementwise.cpp)."""

from __future__ import annotations

from ctypes import CDLL

import torch

from kernels.cpu.library import DTYPES


def norm(
    library: CDLL,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm, or layer norm with a bias, of x [..., W], plus the `residual` if there is one; and what was normed."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous()
    rows, inner, outer_stride, inner_stride = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = x
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    library.fissile_norm(
        DTYPES[x.dtype],
        x.data_ptr(),
        rows,
        inner,
        outer_stride,
        inner_stride,
        x.shape[-1],
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        eps,
        out.data_ptr(),
        total.data_ptr(),
    )
    return out, total


def _rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Rows in all, rows of an inner dimension, and the strides from one outer and one inner row to the next."""
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    width = x.shape[-1]
    return x.numel() // width if width else 0, 1, width, 0


def rope(library: CDLL, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first dimensions of each head of x [T, H, D] by cosines and sines float32 [T, 1, R/2]."""
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype)
    library.fissile_rope(
        DTYPES[x.dtype],
        x.data_ptr(),
        rows,
        x.stride(0),
        heads,
        x.stride(1),
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        out.data_ptr(),
    )
    return out


def silu_and_mul(library: CDLL, x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I]: [T, I]"""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype)
    library.fissile_silu_and_mul(DTYPES[x.dtype], x.data_ptr(), rows, x.stride(0), width, out.data_ptr())
    return out
