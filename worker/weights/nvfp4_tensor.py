"""NVFP4: FP4 in groups of 16 with a scale in FP8 for each and one in float32 for the whole tensor.

Twice an FP4 number is an integer from -12 to 12, so kernels for codes of 8 bits multiply it exactly. A number is worth
its value times the product of both scales in float32. compressed-tensors stores the reciprocal of the second one, and
divides by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from typing_extensions import override

from kernels import float8
from kernels.grouped_weight import GroupedWeight
from kernels.quantized_weight import fp4_numbers
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.safetensors_file import Entry, Shape
from worker.weights.stored_tensors import Files

NVFP4_GROUP: Final = 16
_MIDDLE: Final = 128
# The two codes of each byte, the lower four bits first: uint8 [256, 2].
_CODES: Final = (fp4_numbers(torch.arange(256, dtype=torch.uint8).view(256, 1)) * 2 + _MIDDLE).to(torch.uint8)


@dataclass(frozen=True)
class Nvfp4Names:
    """Endings of the names of a weight's tensors after the weight's own.

    Attributes:
        numbers: [N, K / 2], the earlier number of a byte in its lower half.
        scales: [N, K / 16].
        factor: one number for all.
        divides: True if scales are divided by the factor.
    """

    numbers: str
    scales: str
    factor: str
    divides: bool


COMPRESSED_NVFP4: Final = Nvfp4Names("_packed", "_scale", "_global_scale", divides=True)
MODELOPT_NVFP4: Final = Nvfp4Names("", "_scale", "_scale_2", divides=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Nvfp4Tensor(GroupedTensor):
    """A matrix [N, K] in NVFP4.

    Attributes:
        shape: (N, K).
        group: columns that share a scale.
        numbers: two of them in each byte.
        scales: in FP8.
        factor: of all scales.
        divides: True if scales are divided by it.
    """

    shape: Shape
    group: int = NVFP4_GROUP
    numbers: Entry
    scales: Entry
    factor: Entry
    divides: bool

    @property
    @override
    def num_bytes(self) -> int:
        return self.numbers.num_bytes + self.scales.num_bytes + self.factor.num_bytes

    @override
    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        stored = files.tensor(self.numbers)[rows]
        packed = torch.empty(stored.shape, dtype=torch.uint8)
        files.of(self.numbers).copy(stored, packed)
        codes = _CODES.index_select(0, packed.flatten().int()).view(len(packed), -1)[:, : self.shape[1]]
        own = files.tensor(self.scales)[rows]
        scales = torch.empty(own.shape)
        float8.widen(own, scales)
        files.of(self.scales).release(own)
        factor = files.tensor(self.factor).flatten()[0].clone()
        scales = scales.div_(factor) if self.divides else scales.mul_(factor)
        # Halved, because codes are twice the numbers.
        return GroupedWeight(codes.contiguous(), 8, self.group, scales.mul_(0.5))


def nvfp4_names(name: str, entries: Mapping[str, Entry]) -> Nvfp4Names:
    """Names under which a checkpoint stores a weight in NVFP4."""
    return COMPRESSED_NVFP4 if name + COMPRESSED_NVFP4.numbers in entries else MODELOPT_NVFP4


def nvfp4_shapes(names: Nvfp4Names, shape: Shape) -> dict[str, tuple[tuple[str, ...], Shape]]:
    """Ending of the name, valid dtypes and shape of each tensor of a matrix [N, K]."""
    rows, inner = shape
    return {
        names.numbers: (("U8",), (rows, -(-inner // 2))),
        names.scales: (("F8_E4M3",), (rows, -(-inner // NVFP4_GROUP))),
        names.factor: (("F32",), ()),
    }
