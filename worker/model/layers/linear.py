"""Linear layers, packed by the kernel back end, whole or split over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.interface import PackedLinear
from worker.model.layers.build import Build
from worker.model.layers.product import product_floats, product_weight, stay_quantized
from worker.weights.stored_tensors import MatrixPart

# All rows or columns of a tensor.
WHOLE = slice(None)


class ColumnLinear:
    """One product for one or several projections of the same input; their outputs are concatenated.

    Args:
        build: shared by the layers.
        parts: projections, each with `{name}.weight` [N_i, K] and, with `bias`, `{name}.bias` [N_i], and the rows of it
            that this rank computes, in one or several slices; WHOLE for all of them on every rank.
        bias: True if the projections have biases.

    Attributes:
        packed: the weight, as the back end wants it.
    """

    def __init__(self, build: Build, parts: Mapping[str, slice | Sequence[slice]], bias: bool = False) -> None:
        self._linear = build.kernels.linear
        self.packed = build.kept.keep(" ".join(parts), lambda: self._pack(build, parts, bias))

    def _pack(self, build: Build, parts: Mapping[str, slice | Sequence[slice]], bias: bool) -> PackedLinear:
        slices = [
            (name, each) for name, rows in parts.items() for each in ([rows] if isinstance(rows, slice) else rows)
        ]
        product = [MatrixPart(f"{name}.weight", rows) for name, rows in slices]
        weight = product_weight(build, product, stay_quantized(build, [product]))
        biases = [MatrixPart(f"{name}.bias", rows) for name, rows in slices]
        own_bias = product_floats(build, biases) if bias else None
        return self._linear.pack(weight, own_bias, build.dtype, build.packed_format)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, sum of this rank's N_i]"""
        return self._linear.apply(x, self.packed)


class RowLinear:
    """A projection whose input is split over the ranks; its output is the sum over the ranks.

    Args:
        build: shared by the layers.
        name: projection with `{name}.weight` [N, K] and, with `bias`, `{name}.bias` [N].
        part: the columns of it that match this rank's input.
        bias: True if it has a bias; only the first rank adds it.

    Attributes:
        packed: the weight, as the back end wants it.
    """

    def __init__(self, build: Build, name: str, part: slice, bias: bool = False) -> None:
        self._linear = build.kernels.linear
        self._collectives = build.shard.collectives
        self.packed = build.kept.keep(name, lambda: self._pack(build, name, part, bias))

    def _pack(self, build: Build, name: str, part: slice, bias: bool) -> PackedLinear:
        product = [MatrixPart(f"{name}.weight", columns=part)]
        weight = product_weight(build, product, stay_quantized(build, [product]))
        own_bias = build.weights.take(f"{name}.bias") if bias else None
        used_bias = own_bias if build.shard.rank == 0 else None
        return self._linear.pack(weight, used_bias, build.dtype, build.packed_format)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's K] -> [T, N], this rank's summand"""
        return self._linear.apply(x, self.packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's K] -> [T, N], the same on every rank"""
        return self._collectives.all_reduce(self.partial(x))
