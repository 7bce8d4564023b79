"""Norms over the last dimension."""

from __future__ import annotations

import torch
from typing_extensions import override

from worker.model.layers.build import Build, taken


class RMSNorm:
    """RMSNorm with the weight `{name}.weight`, alone or fused with the residual addition before it.

    Args:
        build: what layers are made with.
        name: of the norm.
        eps: the model's rms_norm_eps when None.

    Attributes:
        weight: in the model dtype.
    """

    def __init__(self, build: Build, name: str, eps: float | None = None) -> None:
        self._elementwise = build.kernels.elementwise
        self.weight = self.read(build, name)
        self._eps = build.config.rms_norm_eps if eps is None else eps

    @staticmethod
    def read(build: Build, name: str) -> torch.Tensor:
        """The weight, from the checkpoint."""
        return taken(build, f"{name}.weight", build.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        return self._elementwise.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)"""
        return self._elementwise.add_rms_norm(x, residual, self.weight, self._eps)


class ShiftedRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, all in float32, and rounds once (Gemma).

    Attributes:
        weight: 1 + the checkpoint's, in float32.
    """

    @staticmethod
    @override
    def read(build: Build, name: str) -> torch.Tensor:
        def shifted() -> torch.Tensor:
            return build.weights.take(f"{name}.weight", dtype=torch.float32).add_(1.0).to(build.kernels.device)

        return build.kept.keep(f"{name}.weight", shifted)

    @override
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x.float()).to(x.dtype)

    @override
    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self(total), total


class LayerNorm:
    """LayerNorm with `{name}.weight` and `{name}.bias`."""

    def __init__(self, build: Build, name: str, eps: float) -> None:
        self._elementwise = build.kernels.elementwise
        self._weight, self._bias = (taken(build, f"{name}.{kind}", build.dtype) for kind in ("weight", "bias"))
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        return self._elementwise.layer_norm(x, self._weight, self._bias, self._eps)
