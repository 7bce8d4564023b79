"""Stored matrices that become GroupedWeights: what their formats share, whatever their bytes look like."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kernels.grouped_weight import GroupedWeight, column_part, cut_refusal, dequantized
from kernels.interface import GROUPED, QuantizedFormat
from worker.weights.safetensors_file import Shape
from worker.weights.stored_tensors import PIECE_NUMBERS, Files, Index, MatrixPart, matrix_shape


class GroupedTensor(ABC):
    """A StoredTensor of one matrix [N, K], or of E of them, in codes of at most 8 bits.

    A subclass reads whole rows of one format; parts, floats and refusals follow from that.

    Attributes:
        shape: [N, K] or [E, N, K], as the model knows it.
        group: columns that share a scale.
        has_order: True if columns are stored in another order than the model's.
        transposed: True if the model has the matrices transposed; then `shape` ends in K, N.
    """

    shape: Shape
    group: int
    has_order: bool = False
    transposed: bool = False

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes in the files."""

    @abstractmethod
    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        """Reads `rows`, with bounds, of one matrix, into new memory; releases the pages of the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Float dtype that represents every value exactly."""
        return torch.float32

    @property
    def format(self) -> QuantizedFormat:
        """Format in which back ends know it."""
        return GROUPED

    def refusal(self, part: MatrixPart) -> str | None:
        """Reason why a part cannot keep its codes; None if it can."""
        if part.transposed != self.transposed:
            return "stored transposed"
        inner = matrix_shape(self.shape, self.transposed)[1]
        return cut_refusal(part.columns, inner, self.group, self.has_order)

    def quantized(self, files: Files, part: MatrixPart) -> GroupedWeight:
        """Reads a part for which `refusal` is None in its codes."""
        rows = slice(*part.rows.indices(matrix_shape(self.shape, self.transposed)[0])[:2])
        return column_part(self.read(files, rows, part.expert), part.columns)

    def copy(self, files: Files, index: Index, out: torch.Tensor) -> None:
        """Copies the part `index` of the tensor, dequantized, into `out`; see StoredTensor.copy."""
        *experts, rows, columns = index
        if self.transposed:
            rows, columns, out = columns, rows, out.transpose(-1, -2)
        ids = range(experts[0].start, experts[0].stop) if experts else range(1)
        step = max(1, PIECE_NUMBERS // max(1, matrix_shape(self.shape, self.transposed)[1]))
        for expert, place in zip(ids, out if experts else (out,), strict=True):
            for start in range(rows.start, rows.stop, step):
                piece = slice(start, min(start + step, rows.stop))
                values = dequantized(self.read(files, piece, expert))
                place[start - rows.start : piece.stop - rows.start].copy_(values[:, columns])
