"""Norms, rotation, activation, and transcendental functions whose bits do not depend on an element's place.

PyTorch computes the last elements of a tensor, and those beside a border between threads, with another exp than the
rest (measured: 838 of 20,000 values of silu differ). On whole multiples of LANES elements, few enough for one thread,
there is neither remainder nor border. `torch.exp` itself is avoided: MKL's takes 40 times as long for results near 0.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from kernels.interface import ElementwiseOps

# Twice the widest vector of floats of any instruction set, and more.
LANES = 64
# Below PyTorch's grain size of 32,768, from which on it splits a tensor between threads.
CHUNK = 16384


class TorchElementwiseOps(ElementwiseOps):
    """Row by row; products and sums are separate operations, so that nothing is fused."""

    @override
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        mean_square = (wide * wide).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square.add_(eps))).to(x.dtype).mul_(weight)

    @override
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    @override
    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred.mul_(torch.rsqrt(variance.add_(eps))).mul_(weight).add_(bias).to(x.dtype)

    @override
    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    @override
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)

    @override
    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gelu(gate).to(x.dtype).mul_(up)

    @override
    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return softcapped(x, cap)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :I]) * x[:, I:] of x [T, 2I]; silu is rounded to the model dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).to(gate_up.dtype).mul_(up)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def padded_length(count: int) -> int:
    """`count` rounded up to a multiple of LANES."""
    return -(-count // LANES) * LANES


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)) in float32, of x in any shape and float dtype."""
    flat = _flat_copy(x)
    for start in range(0, len(flat), CHUNK):
        torch.nn.functional.silu(flat[start : start + CHUNK], inplace=True)
    return flat[: x.numel()].view(x.shape)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation, in float32, of x in any shape and float dtype."""
    flat = _flat_copy(x)
    for start in range(0, len(flat), CHUNK):
        chunk = flat[start : start + CHUNK]
        chunk.copy_(torch.nn.functional.gelu(chunk, approximate="tanh"))
    return flat[: x.numel()].view(x.shape)


def softcapped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) in float32, of x in any shape and float dtype."""
    flat = _flat_copy(x)
    for start in range(0, len(flat), CHUNK):
        flat[start : start + CHUNK].div_(cap).tanh_().mul_(cap)
    return flat[: x.numel()].view(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in float32, of x in any shape and float dtype."""
    flat = _flat_copy(x)
    for start in range(0, len(flat), CHUNK):
        flat[start : start + CHUNK].sigmoid_()
    return flat[: x.numel()].view(x.shape)


def _flat_copy(x: torch.Tensor) -> torch.Tensor:
    """float32 of a `padded_length`: x, then zeros."""
    count = x.numel()
    flat = torch.empty(padded_length(count), dtype=torch.float32)
    flat[count:] = 0.0
    flat[:count].view(x.shape).copy_(x)
    return flat


def exp2_(flat: torch.Tensor) -> None:
    """2 ** x in place, for float32 of a `padded_length`."""
    for start in range(0, len(flat), CHUNK):
        chunk = flat[start : start + CHUNK]
        torch.exp2(chunk, out=chunk)
