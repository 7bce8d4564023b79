"""AITER's products with weights stored in FP8 with a scale for each block of 128 x 128 (DeepSeek, Qwen).

Such checkpoints are made for inputs that are rounded to FP8 too, with one scale for each 128 numbers of a row, and so
AITER multiplies them. Our Triton kernels do not round the inputs: their answers are nearer to the model that was
quantized, but differ from those that its makers measured.

AITER computes no other stored format. For MXFP4 experts it rounds inputs to FP8 or FP4, or not at all, depending on the
number of rows and on its version (aiter/fused_moe.py, `q_dtype_a`), while gpt-oss quantizes weights alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.aiter.dispatch import NARROW, Choices, text
from kernels.aiter.library import AiterLibrary
from kernels.aiter.weights import shuffled
from kernels.interface import AnyWeight, ExpertWeights, PackedFormat, QuantizedFormat, QuantizedWeight
from kernels.triton_backend.packed_weight import other_fp8

# Numbers of K, and rows, of a block; numbers of an input that share a scale.
_BLOCK = 128
# AITER's kernels store 8 results together (csrc/ck_gemm_a8w8_blockscale); its tests have twice as many.
_ROWS = 16


@dataclass(frozen=True)
class AiterBlockLinear:
    """A weight in FP8 in its stored format.

    Attributes:
        weight: [N, K], not shuffled, in the FP8 of the architecture.
        scale: float32 [N / 128, K / 128], what its blocks are to be multiplied by; N / 128 is rounded up.
        bias: [N] in the model dtype, or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


class AiterBlocks:
    """Packs and multiplies weights with one scale per block.

    Args:
        library: AITER.
        choices: decides which operations are AITER's.
        fp8: the FP8 of the architecture.
        device: of the weights.
    """

    def __init__(self, library: AiterLibrary, choices: Choices, fp8: torch.dtype, device: torch.device) -> None:
        self._aiter = library
        self._choices = choices
        self._fp8 = fp8
        self._device = device

    def takes_linear(self, weight: QuantizedWeight, dtype: torch.dtype, packed_format: PackedFormat | None) -> bool:
        """True if AITER can multiply rows in `dtype` by a stored weight that keeps its format."""
        facts = (dtype, weight.format, packed_format, self._fp8, *weight.shape)
        return self._choices.takes("block_linear", _refuse_linear, *facts)

    def pack_linear(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> AiterBlockLinear:
        """Packs a weight for which `takes_linear` is true; see `LinearOps.pack`."""
        own_bias = None if bias is None else bias.to(self._device, dtype)
        return AiterBlockLinear(*self._placed(weight), own_bias)

    def linear(self, x: torch.Tensor, packed: AiterBlockLinear) -> torch.Tensor:
        """Product of x [T, K], T at least 1, with the weight; x is rounded to FP8 in groups of 128 numbers."""
        rounded, scale = self._aiter.call(
            "aiter.ops.quant:per_group_quant_hip", x.contiguous(), quant_dtype=packed.weight.dtype, group_size=_BLOCK
        )
        out: torch.Tensor = self._aiter.call(
            "aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale", rounded, packed.weight, scale, packed.scale, dtype=x.dtype
        )
        return out if packed.bias is None else out.add_(packed.bias)

    def takes_experts(
        self, model: ExpertWeights, plain: bool, dtype: torch.dtype, packed_format: PackedFormat | None
    ) -> bool:
        """True if AITER can compute a mixture of experts that are all like `model`.

        Args:
            model: one of its weights is quantized at least; a rank's part that cuts blocks is not.
            plain: whether their activation is silu and they have no biases.
            dtype: the model's.
            packed_format: that they are to be packed in; None for as they are stored.
        """
        stored = (_format(model.gate_up), _format(model.down))
        facts = (dtype, *stored, packed_format, self._fp8, *model.down.shape, plain)
        return self._choices.takes("block_moe", _refuse_experts, *facts)

    def pack_expert(self, expert: ExpertWeights) -> tuple[torch.Tensor, ...]:
        """The two weights of one expert, shuffled for AITER, each followed by the scales of its blocks."""
        assert isinstance(expert.gate_up, QuantizedWeight)
        assert isinstance(expert.down, QuantizedWeight)
        gate_up, gate_up_scale = self._placed(expert.gate_up)
        down, down_scale = self._placed(expert.down)
        return shuffled(self._aiter, gate_up), gate_up_scale, shuffled(self._aiter, down), down_scale

    def _placed(self, weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and scales on the device, converted to the FP8 dtype of the architecture without changing a value."""
        numbers, scales = weight.numbers.to(self._device), weight.scales.to(self._device)
        if numbers.dtype != self._fp8:
            numbers, scales = other_fp8(numbers, scales, self._fp8)
        return numbers.contiguous(), scales.contiguous()


def _format(weight: AnyWeight) -> QuantizedFormat | None:
    return weight.format if isinstance(weight, QuantizedWeight) else None


def _refuse_format(stored: QuantizedFormat | None, packed_format: PackedFormat | None, fp8: torch.dtype) -> str | None:
    if packed_format is not None:
        return "AITER multiplies stored weights as they are, not packed in another format"
    if stored is None:
        return "only some of the experts' weights are as they are stored: the parts of ranks cut blocks of others"
    if stored.quant_type == "per_1x32":
        return "AITER rounds the inputs of MXFP4 products too, to what depends on the number of rows"
    if stored.quant_type != "per_128x128" or stored.numbers not in (fp8, torch.float8_e4m3fn):
        found = f"{text(stored.numbers)} {stored.quant_type}"
        return f"AITER multiplies stored weights in FP8 by blocks of 128 x 128, not {found}"
    return None


def _refuse_linear(
    dtype: torch.dtype,
    stored: QuantizedFormat,
    packed_format: PackedFormat | None,
    fp8: torch.dtype,
    rows: int,
    columns: int,
) -> str | None:
    reason = _refuse_format(stored, packed_format, fp8)
    if reason is None and dtype not in NARROW:
        return f"AITER's products of blocks are for bfloat16 and float16, not {text(dtype)}"
    if reason is None and (rows % _ROWS or columns % _BLOCK):
        return f"AITER's products of blocks are for weights of multiples of 16 x 128, not {rows} x {columns}"
    return reason


def _refuse_experts(
    dtype: torch.dtype,
    gate_up: QuantizedFormat | None,
    down: QuantizedFormat | None,
    packed_format: PackedFormat | None,
    fp8: torch.dtype,
    hidden: int,
    inner: int,
    plain: bool,
) -> str | None:
    reason = _refuse_format(gate_up, packed_format, fp8) or _refuse_format(down, packed_format, fp8)
    if reason is None and not plain:
        return "AITER's mixture of experts is for silu without biases"
    # Above 32 rows its kernels are assembly, for bfloat16 only (`fused_moe_1stage_dict`).
    if reason is None and dtype != torch.bfloat16:
        return f"AITER's experts in blocks are for bfloat16, not {text(dtype)}"
    if reason is None and (hidden % _BLOCK or inner % _BLOCK):
        return f"AITER's experts in blocks are for sizes by 128, not {hidden} and {inner}"
    return reason
