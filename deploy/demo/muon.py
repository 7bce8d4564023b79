"""The Muon optimizer for weight matrices: momentum whose update is made orthogonal before it is applied.

On this corpus it reaches AdamW's loss in half the steps, at about a third more time per step. PyTorch has a Muon too,
but it works in bfloat16, which most CPUs only emulate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic whose repeated application drives all singular values towards one."""

_ITERATIONS = 5
_ADAM_LIKE = 0.2
"""Scales the update to the size of a typical AdamW update, so that both can share one learning rate."""


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Roughly the nearest matrix with orthonormal rows or columns, by Newton-Schulz iteration."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    result: torch.Tensor = wide / (wide.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = result @ result.T
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result if wide is matrix else result.T


class Muon:
    """Holds the momentum of the given matrices; `step` reads their gradients and updates them in place."""

    def __init__(self, matrices: Iterable[torch.Tensor], weight_decay: float) -> None:
        self._matrices = list(matrices)
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Moves every matrix against its orthogonalized momentum."""
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            if matrix.grad is None:
                raise ValueError("Muon.step needs the gradients of all its matrices")
            momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
            update = orthogonalized(matrix.grad.lerp(momentum, _MOMENTUM))
            scale = _ADAM_LIKE * math.sqrt(max(matrix.shape))
            matrix.mul_(1 - learning_rate * self._weight_decay).add_(update, alpha=-learning_rate * scale)
