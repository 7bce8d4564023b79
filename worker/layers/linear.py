"""Linear layers, packed by the kernel back end."""

from __future__ import annotations

import torch

from kernels.interface import KernelBackend
from worker.loader import Weights


class Linear:
    """One product for one or several projections of the same input, whose outputs stand side by side.

    Args:
        kernels: the back end.
        weights: the checkpoint.
        names: projections, each with `{name}.weight` [N_i, K] and, with `bias`, `{name}.bias` [N_i].
        bias: whether the projections have biases.
        dtype: of weights and activations.
    """

    def __init__(
        self, kernels: KernelBackend, weights: Weights, names: list[str], bias: bool, dtype: torch.dtype
    ) -> None:
        self._kernels = kernels
        self._packed = kernels.pack_linear(
            _joined(weights, names, "weight", dtype), _joined(weights, names, "bias", dtype) if bias else None, dtype
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, sum of N_i]"""
        return self._kernels.linear(x, self._packed)


def _joined(weights: Weights, names: list[str], kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Copied and converted once: nothing may refer to the mapped file when serving begins."""
    parts = [weights.take(f"{name}.{kind}") for name in names]
    joined = torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype)
    for part, place in zip(parts, torch.split(joined, [part.shape[0] for part in parts]), strict=True):
        place.copy_(part)
    return joined
