"""Linear layers, packed by the kernel back end, whole or split over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from worker.layers.build import Build

# All rows or columns of a tensor.
WHOLE = slice(None)


def copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, in memory of its own: nothing may refer to the mapped file when serving begins."""
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)


def joined(build: Build, parts: Mapping[str, slice], kind: str) -> torch.Tensor:
    """Parts of `{name}.{kind}` below each other, copied and converted once."""
    taken = [build.weights.take(f"{name}.{kind}", rows=part) for name, part in parts.items()]
    joined = torch.empty(sum(part.shape[0] for part in taken), *taken[0].shape[1:], dtype=build.dtype)
    for part, place in zip(taken, torch.split(joined, [part.shape[0] for part in taken]), strict=True):
        place.copy_(part)
    return joined


class ColumnLinear:
    """One product for one or several projections of the same input, whose outputs stand side by side.

    Args:
        build: what layers are made with.
        parts: projections, each with `{name}.weight` [N_i, K] and, with `bias`, `{name}.bias` [N_i], and the rows of
            it that this rank computes; WHOLE for all of them on every rank.
        bias: whether the projections have biases.
    """

    def __init__(self, build: Build, parts: Mapping[str, slice], bias: bool = False) -> None:
        self._kernels = build.kernels
        self._packed = build.kernels.pack_linear(
            joined(build, parts, "weight"), joined(build, parts, "bias") if bias else None, build.dtype
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, sum of this rank's N_i]"""
        return self._kernels.linear(x, self._packed)


class RowLinear:
    """A projection whose input is split over the ranks, and whose output is the sum of theirs.

    Args:
        build: what layers are made with.
        name: projection with `{name}.weight` [N, K] and, with `bias`, `{name}.bias` [N].
        part: the columns of it that this rank has the input of.
        bias: whether it has a bias; the first rank adds it, so that it is added once.
    """

    def __init__(self, build: Build, name: str, part: slice, bias: bool = False) -> None:
        self._kernels = build.kernels
        self._collectives = build.shard.collectives
        weight = copied(build.weights.take(f"{name}.weight", columns=part), build.dtype)
        own_bias = build.weights.take(f"{name}.bias").to(build.dtype, copy=True) if bias else None
        self._packed = build.kernels.pack_linear(weight, own_bias if build.shard.rank == 0 else None, build.dtype)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's K] -> [T, N], this rank's summand"""
        return self._kernels.linear(x, self._packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's K] -> [T, N], the same on every rank"""
        return self._collectives.all_reduce(self.partial(x))
