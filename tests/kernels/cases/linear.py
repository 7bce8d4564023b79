"""Products of real shapes, for a few rows, which split K, and for many."""

from __future__ import annotations

from functools import partial

import torch

from kernels.grouped_weight import GroupedWeight
from kernels.interface import QuantizedWeight
from kernels.triton_backend import linear
from kernels.triton_backend.codes import CodeForm
from kernels.triton_backend.packed_weight import PackedWeight, from_codes, from_quantized
from kernels.triton_backend.target import Settings
from tests.kernels.cases import Case

BF16, FP16 = torch.bfloat16, torch.float16
# The output projection of Qwen3-8B's attention; the inner dimension of gpt-oss, which is not a whole number of tiles.
N, K = 4096, 4096
UNEVEN = 2880
FEW, MANY = 7, 5000
MATRIX = frozenset({"_linear_kernel"})


def multiply(packed: PackedWeight, settings: Settings, *rows: int) -> None:
    for each in rows:
        linear.linear(torch.empty(each, packed.inner, dtype=packed.dtype), packed, settings)


def floats(dtype: torch.dtype, columns: int = N, inner: int = K) -> PackedWeight:
    return PackedWeight(torch.empty(columns, inner, dtype=dtype), None, None, dtype, columns, inner)


def scaled(numbers: torch.dtype, *scales: int, quantizes_rows: bool = False) -> PackedWeight:
    values = torch.empty(N, K, dtype=numbers)
    return PackedWeight(values, torch.empty(scales), None, BF16, N, K, quantizes_rows=quantizes_rows)


def fp4(settings: Settings) -> None:
    numbers = torch.empty(N, 23 * 64, dtype=torch.uint8)
    powers, bias = torch.empty(N, 23 * 4, dtype=torch.uint8), torch.empty(N)
    multiply(PackedWeight(numbers, powers, bias, BF16, N, UNEVEN), settings, FEW, MANY)


def fp8(settings: Settings) -> None:
    multiply(scaled(settings.target.fp8, K // 128, N), settings, MANY)
    multiply(scaled(settings.target.fp8, N), settings, FEW)


def fp8_blocks(settings: Settings) -> None:
    """A checkpoint's, as of DeepSeek-V3."""
    weight = torch.empty(N, K, dtype=torch.float8_e4m3fn)
    stored = QuantizedWeight(weight, torch.empty(N // 128, K // 128), "per_128x128")
    multiply(from_quantized(stored, None, BF16, settings.target.fp8, torch.device("cpu")), settings, FEW)


def codes(
    settings: Settings,
    rows: tuple[int, ...],
    bits: int = 4,
    group: int = 128,
    inner: int = K,
    has_zeros: bool = False,
    has_offsets: bool = False,
    has_order: bool = False,
    dtype: torch.dtype = BF16,
) -> None:
    groups = -(-inner // group)
    weight = GroupedWeight(
        torch.empty(N, inner, dtype=torch.uint8),
        bits,
        group,
        torch.empty(N, groups, dtype=FP16),
        torch.empty(N, groups, dtype=torch.uint8) if has_zeros else None,
        torch.empty(N, groups) if has_offsets else None,
        torch.arange(inner) if has_order else None,
    )
    multiply(from_codes(weight, None, dtype, torch.device("cpu")), settings, *rows)


def w8a8(settings: Settings) -> None:
    multiply(scaled(torch.int8, N, quantizes_rows=True), settings, MANY)
    multiply(scaled(settings.target.fp8, N, quantizes_rows=True), settings, FEW)


def argmax(settings: Settings) -> None:
    packed = PackedWeight(torch.empty(8, K, dtype=BF16), None, None, BF16, 151_936, K)
    linear.argmax(torch.empty(FEW, K, dtype=BF16), packed, 151_669, settings)


def argmax_of_codes(bits: int, group: int, scale: torch.dtype, settings: Settings) -> None:
    numbers, scales = torch.empty(8, K * bits // 8, dtype=torch.uint8), torch.empty(K // group, 8, dtype=scale)
    packed = PackedWeight(numbers, scales, None, BF16, 151_936, K, codes=CodeForm(bits, group))
    linear.argmax(torch.empty(FEW, K, dtype=BF16), packed, 151_669, settings)


def heads(settings: Settings) -> None:
    packed = PackedWeight(torch.empty(128, 512, 128, dtype=BF16), None, None, BF16, 512, 128)
    linear.head_linear(torch.empty(FEW, 128, 192, dtype=BF16)[:, :, :128], packed, settings)


CASES = {
    "bfloat16": Case(lambda settings: multiply(floats(BF16), settings, FEW, 1000, MANY), MATRIX),
    "float16": Case(lambda settings: multiply(floats(FP16, inner=UNEVEN), settings, FEW), MATRIX),
    # The gate of Qwen2-MoE's shared expert.
    "column": Case(lambda settings: multiply(floats(BF16, columns=1, inner=2048), settings, FEW), MATRIX),
    # NVIDIA's matrix instructions do not multiply float32 as such.
    "float32": Case(lambda settings: multiply(floats(torch.float32), settings, FEW, MANY)),
    "int8": Case(lambda settings: multiply(scaled(torch.int8, K // 128, N), settings, FEW, MANY), MATRIX),
    "fp8": Case(fp8, MATRIX),
    "fp8-blocks": Case(fp8_blocks, MATRIX),
    "fp4": Case(fp4, MATRIX),
    "gptq": Case(partial(codes, rows=(FEW, MANY), has_zeros=True, has_order=True), MATRIX),
    "int4": Case(partial(codes, rows=(FEW, MANY), group=32, inner=UNEVEN), MATRIX),
    # GGUF's Q4_K and Q6_K.
    "offsets": Case(partial(codes, rows=(FEW,), group=32, has_zeros=True, has_offsets=True), MATRIX),
    "codes of 8 bits": Case(partial(codes, rows=(FEW,), bits=8, group=16), MATRIX),
    "offsets of 8 bits": Case(partial(codes, rows=(FEW,), bits=8, group=32, has_offsets=True), MATRIX),
    "codes with float16": Case(partial(codes, rows=(FEW,), group=32, dtype=FP16), MATRIX),
    "codes with float32": Case(partial(codes, rows=(FEW,), group=32, dtype=torch.float32)),
    # 44 registers on sm_90, which multiplies float32 without matrix instructions.
    "offsets with float32": Case(
        partial(codes, rows=(FEW,), group=32, has_zeros=True, has_offsets=True, dtype=torch.float32),
        spills=(("_linear_kernel", 44),),
    ),
    "w8a8": Case(w8a8, MATRIX),
    # Two registers outside the loop over K: on an H200 the head's product takes what reading its weight takes.
    "argmax": Case(argmax, frozenset({"_tile_best_kernel"}), (("_tile_best_kernel", 2),)),
    # Heads of `--quantize int4` and, in GGUF's Q6_K, of 8 bits.
    "argmax of codes": Case(partial(argmax_of_codes, 4, 32, BF16), frozenset({"_tile_best_kernel"})),
    "argmax of codes of 8 bits": Case(partial(argmax_of_codes, 8, 16, torch.float32), frozenset({"_tile_best_kernel"})),
    "heads": Case(heads, MATRIX),
}
