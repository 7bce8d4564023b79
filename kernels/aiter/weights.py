"""Weights in the layout and the numbers that AITER takes."""

from __future__ import annotations

from typing import Any, cast

import torch

from kernels import float8
from kernels.aiter.library import AiterLibrary


def shuffled(library: AiterLibrary, weight: torch.Tensor) -> torch.Tensor:
    """A weight [..., N, K] in the order in which AITER's kernels read it."""
    turned: torch.Tensor = library.call("aiter.ops.shuffle:shuffle_weight", weight, layout=(16, 16))
    return turned


def scaled(library: AiterLibrary, weight: torch.Tensor, fp8: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [..., N, K] as FP8, shuffled, and the scale of its rows, float32 [..., N, 1]."""
    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / torch.finfo(fp8).max).clamp_(min=1e-12)
    return shuffled(library, float8.saturated(wide / scale, fp8)), scale


def mark_shuffled(weight: torch.Tensor) -> None:
    """Sets the attribute that AITER's `shuffle_weight` puts on its result; a loaded tensor lacks it."""
    cast(Any, weight).is_shuffled = True
