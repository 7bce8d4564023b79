"""Codes of 4 or 8 bits in words of 32 bits, as GPTQ, AWQ and compressed-tensors store weights.

A code's value is (code - zero point) times the scale of its row and group of columns. All three store the first code of
a word in its lowest bits; AWQ has its own order of the codes within a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from typing_extensions import override

from common.params.config_parts import LayerQuantConfig
from kernels.grouped_weight import GroupedWeight
from worker.config.model_config import ModelError
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.safetensors_file import Entry, Shape
from worker.weights.stored_tensors import Files

WORD_BITS: Final = 32
# Dtype of the quantization -> bits of a code.
CODE_BITS: Final = {"int4x2": 4, "int8x4": 8}
_GROUP_SIZES: Final = {"per_1x32": 32, "per_1x64": 64, "per_1x128": 128}
_WORDS: Final = ("I32",)
_SCALES: Final = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class WordLayout:
    """Form in which a method stores the codes of a matrix [N, K] with G groups of columns.

    Attributes:
        codes: ending of the tensor's name after the layer's own; the next four are such endings too.
        scales: of a tensor [G, N], or [N, G] unless `is_transposed`.
        zeros: of words along N.
        order: of the group of each column, [K]; empty if the method has none.
        shape: of N and K, optional in a checkpoint; empty if the method has none.
        is_transposed: True if rows of the stored matrices are columns of the model's.
        packs_rows: True if the codes of a word are of one column; otherwise they are of one row.
        places: place in its word of each code; empty if they are in order.
        zero_offset: added to stored zero points.
    """

    codes: str
    scales: str
    zeros: str
    order: str = ""
    shape: str = ""
    is_transposed: bool = False
    packs_rows: bool = False
    places: tuple[int, ...] = ()
    zero_offset: int = 0


_GPTQ: Final = WordLayout(".qweight", ".scales", ".qzeros", ".g_idx", is_transposed=True)
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
# Names and words of compressed-tensors, whatever the method.
COMPRESSED: Final = WordLayout(
    ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
)
_LAYOUTS: Final = {
    # The first version of the format stores zero points minus 1.
    "gptq": replace(_GPTQ, zero_offset=1),
    "gptq_v2": _GPTQ,
    "awq": replace(_GPTQ, order="", packs_rows=True, places=_AWQ_PLACES),
}


@dataclass(frozen=True)
class WordEntries:
    """Tensors of one layer under WordLayout's names; None for absent ones."""

    codes: Entry
    scales: Entry
    zeros: Entry | None = None
    order: Entry | None = None
    shape: Entry | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class WordTensor(GroupedTensor):
    """A matrix [N, K] of codes in words.

    Attributes:
        shape: (N, K).
        group: columns that share a scale; K for whole rows.
        has_order: True if groups are of columns in another order than the model's.
        layer: name of the layer in the checkpoint.
        layout: how it is stored.
        entries: where it is stored.
        bits: 4 or 8.
        is_symmetric: True if every zero point is the middle code.
    """

    shape: Shape
    group: int
    has_order: bool
    layer: str
    layout: WordLayout
    entries: WordEntries
    bits: int
    is_symmetric: bool

    @property
    @override
    def num_bytes(self) -> int:
        found = self.entries
        parts = (found.codes, found.scales, found.zeros, found.order, found.shape)
        return sum(part.num_bytes for part in parts if part is not None)

    @override
    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        """Reads `rows` in codes; see GroupedTensor.

        Raises:
            ModelError: zero points, order or shape contradict the configuration.
        """
        self._check_shape(files)
        order = self._order(files)
        codes = self._matrix(files, self.entries.codes, rows, along_rows=self.layout.packs_rows, size=self.shape[1])
        scales = self._scales(files, rows)
        if order is not None:
            codes = codes.index_select(1, order)
        return GroupedWeight(codes, self.bits, self.group, scales, self._zeros(files, rows), None, order)

    def _matrix(self, files: Files, entry: Entry, rows: slice, *, along_rows: bool, size: int) -> torch.Tensor:
        """Codes of a stored matrix [N, size], or its transpose, whose words lie along N or not: uint8, contiguous."""
        per_word = WORD_BITS // self.bits
        wanted = slice(rows.start // per_word, -(-rows.stop // per_word)) if along_rows else rows
        is_transposed = self.layout.is_transposed
        stored = files.tensor(entry)[:, wanted] if is_transposed else files.tensor(entry)[wanted]
        words = torch.empty(stored.shape, dtype=torch.int32)
        files.of(entry).copy(stored, words)
        codes = unpacked(words, self.bits, dim=int(along_rows == is_transposed), places=self.layout.places)
        codes = codes.t() if is_transposed else codes
        first = rows.start - wanted.start * per_word if along_rows else 0
        return codes[first : first + rows.stop - rows.start, :size].contiguous()

    def _scales(self, files: Files, rows: slice) -> torch.Tensor:
        entry = self.entries.scales
        stored = files.tensor(entry)[:, rows].t() if self.layout.is_transposed else files.tensor(entry)[rows]
        scales = torch.empty(stored.shape, dtype=stored.dtype)
        scales.copy_(stored)
        files.of(entry).release(files.tensor(entry))
        return scales

    def _zeros(self, files: Files, rows: slice) -> torch.Tensor | None:
        entry = self.entries.zeros
        if entry is None:
            return None
        name, highest = self.layer + self.layout.zeros, (1 << self.bits) - 1
        zeros = self._matrix(files, entry, rows, along_rows=True, size=-(-self.shape[1] // self.group))
        if self.layout.zero_offset:
            if bool((zeros == highest).any()):
                # Some packers wrote it for a zero point of 0, and readers disagree on its value.
                raise ModelError(f"{name} holds a zero point of {highest + 1}; at most {highest} is valid")
            zeros += self.layout.zero_offset
        if not self.is_symmetric:
            return zeros
        middle = 1 << (self.bits - 1)
        if bool((zeros != middle).any()):
            raise ModelError(f"{name} holds zero points other than {middle}, but quantization_config says symmetric")
        return None

    def _order(self, files: Files) -> torch.Tensor | None:
        """Columns in the order in which they form groups; None if that is the model's."""
        entry = self.entries.order
        if entry is None:
            return None
        name, inner = self.layer + self.layout.order, self.shape[1]
        groups = files.tensor(entry).to(torch.int64, copy=True)
        files.of(entry).release(files.tensor(entry))
        count = -(-inner // self.group)
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise ModelError(f"{name} holds groups that do not exist; 0 to {count - 1} are valid")
        in_order = torch.arange(inner) // self.group
        if torch.equal(groups, in_order):
            return None
        if not torch.equal(groups.sort().values, in_order):
            raise ModelError(f"{name} has groups that are not of {self.group} columns")
        if not self.has_order:
            raise ModelError(f"{name} is not in order, but quantization_config says that columns are")
        return groups.argsort(stable=True)

    def _check_shape(self, files: Files) -> None:
        entry = self.entries.shape
        if entry is not None and (found := files.tensor(entry).tolist()) != list(self.shape):
            raise ModelError(f"{self.layer}{self.layout.shape} is {found}; {list(self.shape)} is expected")


def unpacked(words: torch.Tensor, bits: int, dim: int, places: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes of int32 words [A, B] that lie along `dim`: uint8 [A, B] with that dimension 32 / `bits` times as long.

    `places` has the place in its word of each code.
    """
    down, across = words.shape
    of_words = words.contiguous().view(torch.uint8).view(down, across, WORD_BITS // 8)
    if bits == 4:
        of_words = torch.stack((of_words & 15, of_words >> 4), dim=-1).flatten(2)
    if places:
        of_words = of_words[..., list(places)]
    if dim == 1:
        return of_words.flatten(1)
    # Transposed, so that the codes of a word are copied together.
    return of_words.transpose(0, 1).flatten(1).t()


def word_layout(name: str, entries: Mapping[str, Entry], config: LayerQuantConfig) -> WordLayout | None:
    """Layout in which a checkpoint stores the tensor `name` as words; None if it does not."""
    layer = name.removesuffix(".weight")
    packed = entries.get(layer + COMPRESSED.codes)
    if packed is not None and packed.dtype in _WORDS:
        return COMPRESSED
    layout = _LAYOUTS.get(config.quant_method)
    return layout if layout is not None and layer + layout.codes in entries else None


def group_size(config: LayerQuantConfig, inner: int) -> int:
    """Columns that share a scale, of `inner`."""
    return min(_GROUP_SIZES.get(config.quant_type, inner), inner)


def word_shapes(layout: WordLayout, config: LayerQuantConfig, shape: Shape) -> dict[str, tuple[tuple[str, ...], Shape]]:
    """Ending of the name, valid dtypes and shape of each tensor that a layer must have for a matrix [N, K]."""
    rows, inner = shape
    per_word = WORD_BITS // CODE_BITS[config.quant_dtype]
    groups = -(-inner // group_size(config, inner))
    codes = (-(-rows // per_word), inner) if layout.packs_rows else (rows, -(-inner // per_word))
    scales, zeros = (rows, groups), (-(-rows // per_word), groups)
    if layout.is_transposed:
        codes, scales, zeros = codes[::-1], scales[::-1], zeros[::-1]
    shapes: dict[str, tuple[tuple[str, ...], Shape]] = {
        layout.codes: (_WORDS, codes),
        layout.scales: (_SCALES, scales),
    }
    if layout is not COMPRESSED or not config.is_symmetric:
        shapes[layout.zeros] = (_WORDS, zeros)
    # GPTQ stores the groups of columns in their order too.
    if layout.order and (config.has_order or layout is not COMPRESSED):
        shapes[layout.order] = (("I32", "I64"), (inner,))
    return shapes
