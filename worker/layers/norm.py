"""Root mean square norms."""

from __future__ import annotations

import torch

from worker.layers.build import Build


class RMSNorm:
    """RMSNorm with the weight `{name}.weight`, alone or fused with the residual addition before it."""

    def __init__(self, build: Build, name: str) -> None:
        self._kernels = build.kernels
        self._weight = build.weights.take(f"{name}.weight").to(build.dtype)
        self._eps = build.config.rms_norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)"""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)
