"""Tensors of a checkpoint that a GGUF file splits or transposes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from kernels.grouped_weight import GroupedWeight, alike
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.safetensors_file import Shape
from worker.weights.stored_tensors import Files, Index, StoredTensor


@dataclass(frozen=True)
class RowOrder:
    """Order in which rows of several sources make the rows of one tensor.

    Attributes:
        counts: rows of each source.
        in_turn: True if one row of each source follows the other; False if each source's rows are together.
    """

    counts: tuple[int, ...]
    in_turn: bool

    def parts(self, rows: slice) -> Iterator[tuple[int, slice, slice]]:
        """Yields each source that has some of `rows`: its number, its own rows, and their places in `rows`."""
        begin, step = 0, len(self.counts)
        for source, count in enumerate(self.counts):
            if self.in_turn:
                own = slice(-(-(rows.start - source) // step), -(-(rows.stop - source) // step))
                place = slice(source + step * own.start - rows.start, None, step)
            else:
                own = slice(max(rows.start - begin, 0), min(rows.stop - begin, count))
                place = slice(begin + own.start - rows.start, begin + own.stop - rows.start)
                begin += count
            if own.start < own.stop:
                yield source, own, place


@dataclass(frozen=True)
class JoinedFloats:
    """A tensor made from several, as floats.

    Attributes:
        shape: of the whole tensor.
        sources: tensors with as many dimensions.
        transposed: for each source, whether its last two dimensions are exchanged.
        axis: dimension of `shape` along which they are joined, counted from the last one.
        order: of their rows along `axis`.
    """

    shape: Shape
    sources: tuple[StoredTensor, ...]
    transposed: tuple[bool, ...]
    axis: int
    order: RowOrder

    @property
    def dtype(self) -> torch.dtype:
        """Float dtype that represents every value exactly."""
        dtypes = {source.dtype for source in self.sources}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return sum(source.num_bytes for source in self.sources)

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index` of the tensor into `out`; see StoredTensor.copy."""
        for number, own, place in self.order.parts(index[self.axis]):
            wanted, where = list(index), [slice(None)] * len(index)
            wanted[self.axis], where[self.axis] = own, place
            if self.transposed[number]:
                wanted[-2:] = wanted[:-3:-1]
            part = torch.empty([each.stop - each.start for each in wanted], dtype=self.sources[number].dtype)
            self.sources[number].copy(files, tuple(wanted), part)
            out[tuple(where)] = part.mT if self.transposed[number] else part


class JoinedGroups(GroupedTensor):
    """Matrices made from the rows of several, in codes.

    Args:
        floats: the same tensor, read as floats.
        sources: of `floats`, all of them in codes.
    """

    def __init__(self, floats: JoinedFloats, sources: Sequence[GroupedTensor]) -> None:
        self.shape = floats.shape
        self.transposed = floats.axis == -1
        self.group = math.gcd(*(source.group for source in sources))
        self._order = floats.order
        self._sources = sources

    @property
    @override
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self._sources)

    @override
    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        parts = list(self._order.parts(rows))
        weights = alike([self._sources[number].read(files, own, expert) for number, own, _ in parts])
        if len(weights) == 1:
            return weights[0]
        places, count = [place for *_, place in parts], rows.stop - rows.start

        def placed(of_parts: list[torch.Tensor]) -> torch.Tensor:
            whole = of_parts[0].new_empty(count, *of_parts[0].shape[1:])
            for place, part in zip(places, of_parts, strict=True):
                whole[place] = part
            return whole

        zeros, offsets, factors = (
            [getattr(each, name) for each in weights] for name in ("zeros", "offsets", "factors")
        )
        return replace(
            weights[0],
            codes=placed([each.codes for each in weights]),
            scales=placed([each.scales for each in weights]),
            zeros=None if zeros[0] is None else placed(zeros),
            offsets=None if offsets[0] is None else placed(offsets),
            factors=None if factors[0] is None else placed(factors),
        )


@dataclass(frozen=True)
class FlatMatrices:
    """Matrices [E, N, K] that the model has as one, [E * N, K].

    Attributes:
        stack: the matrices.
    """

    stack: StoredTensor

    @property
    def shape(self) -> Shape:
        """Shape of the tensor in the model."""
        count, rows, columns = self.stack.shape
        return count * rows, columns

    @property
    def dtype(self) -> torch.dtype:
        """Float dtype that represents every value exactly."""
        return self.stack.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return self.stack.num_bytes

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index` of the tensor into `out`; see StoredTensor.copy."""
        rows, columns = index
        height = self.stack.shape[1]
        for matrix in range(rows.start // height, -(-rows.stop // height)):
            begin = matrix * height
            own = slice(max(rows.start - begin, 0), min(rows.stop - begin, height))
            place = out[begin + own.start - rows.start : begin + own.stop - rows.start]
            self.stack.copy(files, (slice(matrix, matrix + 1), own, columns), place.unsqueeze(0))
