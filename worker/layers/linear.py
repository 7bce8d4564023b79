"""Linear layers, packed by the kernel back end, whole or split over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.interface import PackedLinear
from worker.layers.build import Build

# All rows or columns of a tensor.
WHOLE = slice(None)


def joined(build: Build, parts: Mapping[str, slice], kind: str) -> torch.Tensor:
    """Rows of `{name}.{kind}` below each other, read and converted once, into the rows of the result."""
    shapes = [build.weights.part_shape(f"{name}.{kind}", rows=part) for name, part in parts.items()]
    joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=build.dtype)
    places = torch.split(joined, [shape[0] for shape in shapes])
    for (name, part), place in zip(parts.items(), places, strict=True):
        build.weights.copy_to(place, f"{name}.{kind}", rows=part)
    return joined


class ColumnLinear:
    """One product for one or several projections of the same input, whose outputs stand side by side.

    Args:
        build: what layers are made with.
        parts: projections, each with `{name}.weight` [N_i, K] and, with `bias`, `{name}.bias` [N_i], and the rows of
            it that this rank computes; WHOLE for all of them on every rank.
        bias: whether the projections have biases.

    Attributes:
        packed: the weight, as the back end wants it.
    """

    def __init__(self, build: Build, parts: Mapping[str, slice], bias: bool = False) -> None:
        self._kernels = build.kernels
        self.packed = build.kept.keep(" ".join(parts), lambda: self._pack(build, parts, bias))

    def _pack(self, build: Build, parts: Mapping[str, slice], bias: bool) -> PackedLinear:
        weight = joined(build, parts, "weight")
        own_bias = joined(build, parts, "bias") if bias else None
        return self._kernels.pack_linear(weight, own_bias, build.dtype, build.packed_format)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, sum of this rank's N_i]"""
        return self._kernels.linear(x, self.packed)


class RowLinear:
    """A projection whose input is split over the ranks, and whose output is the sum of theirs.

    Args:
        build: what layers are made with.
        name: projection with `{name}.weight` [N, K] and, with `bias`, `{name}.bias` [N].
        part: the columns of it that this rank has the input of.
        bias: whether it has a bias; the first rank adds it, so that it is added once.

    Attributes:
        packed: the weight, as the back end wants it.
    """

    def __init__(self, build: Build, name: str, part: slice, bias: bool = False) -> None:
        self._kernels = build.kernels
        self._collectives = build.shard.collectives
        self.packed = build.kept.keep(name, lambda: self._pack(build, name, part, bias))

    def _pack(self, build: Build, name: str, part: slice, bias: bool) -> PackedLinear:
        weight = build.weights.take(f"{name}.weight", columns=part, dtype=build.dtype)
        own_bias = build.weights.take(f"{name}.bias") if bias else None
        used_bias = own_bias if build.shard.rank == 0 else None
        return self._kernels.pack_linear(weight, used_bias, build.dtype, build.packed_format)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's K] -> [T, N], this rank's summand"""
        return self._kernels.linear(x, self.packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's K] -> [T, N], the same on every rank"""
        return self._collectives.all_reduce(self.partial(x))
