"""Norms, rotation and activation by AITER."""

from __future__ import annotations

from typing import Final

import torch
from typing_extensions import override

from kernels.aiter.dispatch import Choices, refuse_dtype
from kernels.aiter.library import AiterLibrary
from kernels.interface import ElementwiseOps

_NEOX: Final = 0


class AiterElementwiseOps(ElementwiseOps):
    """Elementwise operations by AITER, whose norms do not round before the weight; `other` does what AITER lacks."""

    def __init__(self, library: AiterLibrary, choices: Choices, other: ElementwiseOps) -> None:
        self._aiter = library
        self._choices = choices
        self._other = other

    @override
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not x.numel() or not self._choices.takes("rms_norm", refuse_dtype, x.dtype):
            return self._other.rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out: torch.Tensor = self._aiter.call("aiter.ops.rmsnorm:rmsnorm2d_fwd", rows, weight, eps)
        return out.view(x.shape)

    @override
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.numel() or not self._choices.takes("add_rms_norm", refuse_dtype, x.dtype):
            return self._other.add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._aiter.call("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add", out, x, residual, total, weight, eps)
        return out, total

    @override
    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        if not x.numel() or not self._choices.takes("layer_norm", refuse_dtype, x.dtype):
            return self._other.layer_norm(x, weight, bias, eps)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        out: torch.Tensor = self._aiter.call("aiter.ops.norm:layernorm2d_fwd", rows, weight, bias, epsilon=eps)
        return out.view(x.shape)

    @override
    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # To AITER rows are a sequence of T steps with a batch of 1: [T, 1, heads, D]. Then cos and sin [T, 1, 1, R/2]
        # are each row's own, and no positions are needed.
        if not q.numel() or not self._choices.takes("rope", refuse_dtype, q.dtype):
            return self._other.rope(q, k, cos, sin)
        rotated_q, rotated_k = self._aiter.call(
            "aiter.ops.rope:rope_cached_2c_fwd",
            q.unsqueeze(1),
            k.unsqueeze(1),
            cos.unsqueeze(1),
            sin.unsqueeze(1),
            _NEOX,
            reuse_freqs_front_part=True,
            nope_first=False,
        )
        return rotated_q.squeeze(1), rotated_k.squeeze(1)

    @override
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel() or not self._choices.takes("silu_and_mul", refuse_dtype, x.dtype):
            return self._other.silu_and_mul(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        self._aiter.call("aiter.ops.activation:silu_and_mul", out, x.contiguous())
        return out

    @override
    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._other.gelu_and_mul(x)

    @override
    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return self._other.softcap(x, cap)
