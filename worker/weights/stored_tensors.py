"""Stored tensors of a model: as floats, or quantized with scales; and copying parts of them as floats.

A quantized number is worth its value times its scale: both as float32, one float32 product, then rounded to the dtype
of the place. The product is exact for MXFP4, whose scales are powers of two (OCP MX specification 1.0, section 5.3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from kernels import float8
from kernels.interface import QuantizedWeight, QuantType
from kernels.quantized_weight import fp4_numbers
from worker.weights.safetensors_file import DTYPES, Entry, MappedFile, Shape

Index = tuple[slice, ...]

# Numbers that are dequantized at once.
PIECE_NUMBERS = 1 << 20


class Files:
    """Files of a checkpoint, which are mapped on first use."""

    def __init__(self) -> None:
        self._files: dict[Path, MappedFile] = {}

    def of(self, entry: Entry) -> MappedFile:
        """The file that holds a tensor."""
        if entry.file not in self._files:
            self._files[entry.file] = MappedFile(entry.file)
        return self._files[entry.file]

    def tensor(self, entry: Entry) -> torch.Tensor:
        """A tensor as its file stores it."""
        return self.of(entry).tensor(entry)


class MatrixPart(NamedTuple):
    """Part of a checkpoint's matrix [N, K]: some rows, some columns.

    Attributes:
        name: of the tensor.
        rows: of N.
        columns: of K.
        expert: which matrix, where the tensor has several.
        transposed: whether the model has it as [K, N].
    """

    name: str
    rows: slice = slice(None)
    columns: slice = slice(None)
    expert: int = 0
    transposed: bool = False


class StoredTensor(Protocol):
    """One tensor of the model in the checkpoint."""

    @property
    def shape(self) -> Shape:
        """Shape of the tensor in the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Float dtype that represents every value exactly."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        ...

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index`, a slice with bounds for each dimension, into `out` of any float dtype."""
        ...


@dataclass(frozen=True)
class FloatTensor:
    """A tensor that is stored as floats."""

    entry: Entry

    @property
    def shape(self) -> Shape:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index` of the tensor into `out`; see StoredTensor.copy."""
        files.of(self.entry).copy(files.tensor(self.entry)[index], out)


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [N, K], or E of them, stored as numbers of 8 or 4 bits and scales.

    Attributes:
        shape: as the model knows it: [N, K] or [E, N, K]; [E, K, N] when `transposed`.
        values: FP8 or INT8 of the shape above, or two FP4 in each byte.
        scales: one for every `grain`, rounded up; [..., n, k] but for dimensions of 1.
        grain: rows and columns that share a scale.
        packed: whether the values are FP4.
        transposed: whether the model has the matrices transposed.
    """

    shape: Shape
    values: Entry
    scales: Entry
    grain: tuple[int, int]
    packed: bool = False
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def num_bytes(self) -> int:
        return self.values.num_bytes + self.scales.num_bytes

    @property
    def quant_type(self) -> QuantType:
        """Granularity of the scales; one scale for all rows or all columns counts as one for each row."""
        if self.packed:
            return "per_1x32"
        rows, columns = self.grain
        if columns >= matrix_shape(self.shape, self.transposed)[1]:
            return "per_token"
        return "per_1x128" if rows == 1 else "per_128x128"

    @property
    def numbers(self) -> torch.dtype:
        """Dtype of the stored numbers."""
        return DTYPES[self.values.dtype]

    def refusal(self, part: MatrixPart) -> str | None:
        """Reason why a part cannot keep its stored format; None if it can."""
        if part.transposed != self.transposed:
            return "stored transposed"
        every = range(matrix_shape(self.shape, self.transposed)[1])
        wanted, grain = every[part.columns], self.grain[1]
        if self.packed and len(every) % grain:
            return f"{len(every)} columns end in less than a group of {grain}"
        if self.quant_type == "per_token" or wanted == every or not (wanted.start % grain or len(wanted) % grain):
            return None
        return f"{len(wanted)} columns of each rank cut groups of {grain}"

    def part_rows(self, part: MatrixPart) -> int:
        """Number of rows of a part."""
        return len(range(matrix_shape(self.shape, self.transposed)[0])[part.rows])

    def part_quant_type(self, part: MatrixPart) -> QuantType:
        """Granularity of the scales of a part: blocks, if the part consists of whole blocks or is the whole matrix.

        So ranks with equal shares of the rows have one granularity, also where the first share begins at a whole block.
        """
        every = range(matrix_shape(self.shape, self.transposed)[0])
        wanted, grain = every[part.rows], self.grain[0]
        if self.quant_type == "per_128x128" and wanted != every and (wanted.start % grain or len(wanted) % grain):
            return "per_1x128"
        return self.quant_type

    def quantized(self, files: Files, part: MatrixPart) -> QuantizedWeight:
        """Reads a part for which `refusal` is None in its stored format."""
        sizes = matrix_shape(self.shape, self.transposed)
        wanted = zip((part.rows, part.columns), sizes, strict=True)
        rows, columns = (slice(*each.indices(size)[:2]) for each, size in wanted)
        values, scales = (each[part.expert] for each in self._matrices(files))
        stored = values[rows, columns.start // 2 : columns.stop // 2] if self.packed else values[rows, columns]
        numbers = torch.empty(stored.shape, dtype=stored.dtype)
        files.of(self.values).copy(stored, numbers)
        quant_type = self.part_quant_type(part)
        if quant_type != "per_token":
            scales = scales[:, columns.start // self.grain[1] : -(-columns.stop // self.grain[1])]
        return QuantizedWeight(numbers, self._row_scales(files, scales, rows, quant_type), quant_type)

    def _row_scales(self, files: Files, stored: torch.Tensor, rows: slice, quant_type: QuantType) -> torch.Tensor:
        """Scales of some rows, from stored scales [n, k], in the form of QuantizedWeight."""
        # Copied before it is released; else float32 scales would be the file's own pages.
        scales = stored.view(torch.uint8).clone() if self.packed else stored.to(torch.float32, copy=True)
        files.of(self.scales).release(stored)
        grain = self.grain[0]
        if quant_type == "per_128x128":
            return scales[rows.start // grain : -(-rows.stop // grain)].contiguous()
        spread = scales.index_select(0, torch.arange(rows.start, rows.stop) // grain)
        return spread.flatten() if quant_type == "per_token" else spread

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index` of the tensor, dequantized, into `out`; see StoredTensor.copy."""
        values, scales = self._matrices(files)
        *experts, rows, columns = index
        if self.transposed:
            rows, columns, out = columns, rows, out.transpose(-1, -2)
        if not experts:
            self._copy_matrix(files, values[0], scales[0], (rows, columns), out)
            return
        for expert, place in zip(range(experts[0].start, experts[0].stop), out, strict=True):
            self._copy_matrix(files, values[expert], scales[expert], (rows, columns), place)

    def _matrices(self, files: Files) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored values [E, N, K or K / 2] and scales [E, n, k]; E is 1 for a single matrix."""
        num_rows, num_columns = matrix_shape(self.shape, self.transposed)
        values = files.tensor(self.values).view(-1, num_rows, num_columns // 2 if self.packed else num_columns)
        scales = files.tensor(self.scales)
        if self.scales.dtype == "U8":
            scales = scales.view(torch.float8_e8m0fnu)
        across, along = scales_shape((num_rows, num_columns), self.grain)
        return values, scales.view(-1, across, along).expand(values.shape[0], -1, -1)

    def _copy_matrix(
        self, files: Files, values: torch.Tensor, scales: torch.Tensor, part: tuple[slice, slice], out: torch.Tensor
    ) -> None:
        rows, columns = part
        row_grain, column_grain = self.grain
        factors = scales.to(torch.float32, copy=True)
        files.of(self.scales).release(scales)
        step = max(1, PIECE_NUMBERS // max(1, columns.stop - columns.start))
        for start in range(rows.start, rows.stop, step):
            piece = slice(start, min(start + step, rows.stop))
            numbers = self._numbers(files, values[piece], columns)
            numbers.mul_(_spread(_spread(factors, 0, piece, row_grain), 1, columns, column_grain))
            out[piece.start - rows.start : piece.stop - rows.start].copy_(numbers)

    def _numbers(self, files: Files, values: torch.Tensor, columns: slice) -> torch.Tensor:
        """Unscaled numbers of some columns of some rows, float32, in new memory."""
        if not self.packed:
            stored = values[:, columns]
            numbers = torch.empty(stored.shape)
            float8.widen(stored, numbers)
        else:
            stored = values[:, columns.start // 2 : -(-columns.stop // 2)]
            numbers = fp4_numbers(stored)[:, columns.start % 2 :][:, : columns.stop - columns.start]
        files.of(self.values).release(stored)
        return numbers


def matrix_shape(shape: Shape, transposed: bool) -> tuple[int, int]:
    """(N, K) of the stored matrices of a tensor."""
    *_, first, second = shape
    return (second, first) if transposed else (first, second)


def scales_shape(matrix: tuple[int, int], grain: tuple[int, int]) -> tuple[int, int]:
    """Number of scales of a matrix down and across."""
    (num_rows, num_columns), (rows, columns) = matrix, grain
    return -(-num_rows // rows), -(-num_columns // columns)


def _spread(scales: torch.Tensor, dim: int, part: slice, grain: int) -> torch.Tensor:
    """Scale of each row or column of `part`; a single scale stays single."""
    if scales.shape[dim] == 1:
        return scales
    return scales.index_select(dim, torch.arange(part.start, part.stop) // grain)
