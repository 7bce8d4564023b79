"""Norms, rotation and activation by the native kernels (kernels/cpu/native/elementwise.cpp)."""

from __future__ import annotations

from ctypes import CDLL

import torch
from typing_extensions import override

from kernels.cpu.library import DTYPES
from kernels.interface import ElementwiseOps


class CpuElementwiseOps(ElementwiseOps):
    """Native for tensors of one of `DTYPES`, PyTorch's for others."""

    def __init__(self, library: CDLL, other: ElementwiseOps) -> None:
        self._library = library
        self._torch = other

    @override
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return self._torch.rms_norm(x, weight, eps)
        return norm(self._library, x, weight, eps)[0]

    @override
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        return norm(self._library, x, weight, eps, residual=residual)

    @override
    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return self._torch.layer_norm(x, weight, bias, eps)
        return norm(self._library, x, weight, eps, bias)[0]

    @override
    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q.dtype not in DTYPES:
            return self._torch.rope(q, k, cos, sin)
        return rope(self._library, q, cos, sin), rope(self._library, k, cos, sin)

    @override
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(self._library, x) if x.dtype in DTYPES else self._torch.silu_and_mul(x)

    @override
    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(self._library, x, gelu=True) if x.dtype in DTYPES else self._torch.gelu_and_mul(x)

    @override
    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return softcap(self._library, x, cap)


def norm(
    library: CDLL,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm, or layer norm with a bias, of x [..., W] plus `residual`, if any. Returns the norm and its input."""
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
    """Shape of x as outer and inner rows: number of rows, inner rows, and strides of both."""
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


def silu_and_mul(library: CDLL, x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I]: [T, I]; with `gelu` GELU in place of SiLU."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype)
    activate = library.fissile_gelu_and_mul if gelu else library.fissile_silu_and_mul
    activate(DTYPES[x.dtype], x.data_ptr(), rows, x.stride(0), width, out.data_ptr())
    return out


def softcap(library: CDLL, x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32 x [T, N]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    library.fissile_softcap(x.data_ptr(), x.shape[0], x.stride(0), x.shape[1], cap, out.data_ptr())
    return out
