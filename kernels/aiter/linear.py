"""Products with weights by AITER."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from kernels.aiter.blocks import AiterBlockLinear, AiterBlocks
from kernels.aiter.dispatch import Choices, refuse_dtype, refuse_packed
from kernels.aiter.library import AiterLibrary
from kernels.aiter.weights import mark_shuffled, scaled
from kernels.interface import (
    AnyWeight,
    KernelBackend,
    LinearOps,
    PackedFormat,
    PackedHeads,
    PackedLinear,
    QuantizedWeight,
)


@dataclass(frozen=True)
class AiterLinear:
    """A weight [N, K] in the model dtype, unchanged, and a bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AiterScaledLinear:
    """A weight in FP8.

    Attributes:
        weight: [N, K], shuffled.
        scale: float32 [N, 1], what its rows are to be multiplied by.
        bias: [N] in the model dtype, or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __post_init__(self) -> None:
        mark_shuffled(self.weight)


class AiterLinearOps(LinearOps):
    """Matrix products by AITER, except those with a matrix per head; `other` does what AITER lacks.

    Args:
        library: AITER.
        choices: decides which operations are AITER's.
        blocks: products of weights that are stored in blocks.
        fp8: the FP8 of the architecture.
        other: the back end for the other operations.
    """

    def __init__(
        self, library: AiterLibrary, choices: Choices, blocks: AiterBlocks, fp8: torch.dtype, other: KernelBackend
    ) -> None:
        self._aiter = library
        self._choices = choices
        self._blocks = blocks
        self._fp8 = fp8
        self._device = other.device
        self._other = other.linear
        self._sampling = other.sampling

    @override
    def pack(
        self,
        weight: AnyWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedLinear:
        if not isinstance(weight, torch.Tensor):
            if isinstance(weight, QuantizedWeight) and self._blocks.takes_linear(weight, dtype, packed_format):
                return self._blocks.pack_linear(weight, bias, dtype)
            return self._other.pack(weight, bias, dtype, packed_format)
        operation = "linear" if packed_format is None else "quantized_linear"
        if not self._choices.takes(operation, _refuse, dtype, packed_format, self._fp8, *weight.shape):
            return self._other.pack(weight, bias, dtype, packed_format)
        own_bias = None if bias is None else bias.to(self._device, dtype)
        if packed_format is None:
            return AiterLinear(weight.to(self._device, dtype).contiguous(), own_bias)
        return AiterScaledLinear(*scaled(self._aiter, weight.to(self._device), self._fp8), own_bias)

    @override
    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        if not isinstance(packed, AiterLinear | AiterScaledLinear | AiterBlockLinear):
            return self._other.apply(x, packed)
        if not len(x):
            return x.new_empty(0, len(packed.weight))
        if isinstance(packed, AiterBlockLinear):
            return self._blocks.linear(x, packed)
        return self._plain(x, packed) if isinstance(packed, AiterLinear) else self._scaled_product(x, packed)

    def _plain(self, x: torch.Tensor, packed: AiterLinear) -> torch.Tensor:
        out: torch.Tensor = self._aiter.call(
            "aiter.tuned_gemm:gemm_a16w16", x, packed.weight, bias=packed.bias, otype=x.dtype
        )
        return out

    def _scaled_product(self, x: torch.Tensor, packed: AiterScaledLinear) -> torch.Tensor:
        rounded, scale = self._aiter.call(
            "aiter.ops.quant:per_token_quant_hip", x.contiguous(), quant_dtype=packed.weight.dtype
        )
        out: torch.Tensor = self._aiter.call(
            "aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle", rounded, packed.weight, scale, packed.scale, dtype=x.dtype
        )
        return out if packed.bias is None else out.add_(packed.bias)

    @override
    def has_rows(self, packed: PackedLinear) -> bool:
        if isinstance(packed, AiterScaledLinear | AiterBlockLinear):
            return False
        return isinstance(packed, AiterLinear) or self._other.has_rows(packed)

    @override
    def rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(packed, AiterLinear):
            return packed.weight.index_select(0, ids)
        return self._other.rows(packed, ids)

    @override
    def argmax(self, x: torch.Tensor, packed: PackedLinear, limit: int) -> torch.Tensor:
        if not isinstance(packed, AiterLinear | AiterScaledLinear | AiterBlockLinear):
            return self._other.argmax(x, packed, limit)
        return self._sampling.argmax(self.apply(x, packed), limit)

    @override
    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedHeads:
        return self._other.pack_heads(weight, dtype)

    @override
    def apply_heads(self, x: torch.Tensor, packed: PackedHeads) -> torch.Tensor:
        return self._other.apply_heads(x, packed)


def _refuse(
    dtype: torch.dtype, packed_format: PackedFormat | None, fp8: torch.dtype, rows: int, columns: int
) -> str | None:
    return refuse_dtype(dtype) or refuse_packed(packed_format, fp8, rows, columns, packed_format is not None)
