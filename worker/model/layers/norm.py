"""Norms over the last dimension."""

from __future__ import annotations

import torch

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
        self.weight = taken(build, f"{name}.weight", build.dtype)
        self._eps = build.config.rms_norm_eps if eps is None else eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        return self._elementwise.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)"""
        return self._elementwise.add_rms_norm(x, residual, self.weight, self._eps)


class LayerNorm:
    """LayerNorm with `{name}.weight` and `{name}.bias`."""

    def __init__(self, build: Build, name: str, eps: float) -> None:
        self._elementwise = build.kernels.elementwise
        self._weight, self._bias = (taken(build, f"{name}.{kind}", build.dtype) for kind in ("weight", "bias"))
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]"""
        return self._elementwise.layer_norm(x, self._weight, self._bias, self._eps)
