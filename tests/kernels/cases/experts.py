"""Routing and experts of Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-20b."""

from __future__ import annotations

from functools import partial

import torch

from kernels.interface import ClampedSwiglu, Routing
from kernels.triton_backend import experts
from kernels.triton_backend.codes import CodeForm
from kernels.triton_backend.routing import route
from kernels.triton_backend.target import Settings
from tests.kernels.cases import Case


def _route(num_experts: int, routing: Routing, correction: bool = False) -> Case:
    logits, bias = torch.empty(64, num_experts), torch.empty(num_experts)
    return Case(lambda _: route(logits, routing, bias if correction else None))


def _weight(
    num_experts: int,
    rows: int,
    inner: int,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None,
    bias: bool,
    quantizes_rows: bool,
) -> experts.StackedWeights:
    """Memory that is never touched costs nothing."""
    own_bias = torch.empty(num_experts, rows, dtype=dtype) if bias else None
    if packed_dtype is None:
        return experts.StackedWeights(torch.empty(num_experts, rows, inner, dtype=dtype), None, own_bias)
    spans = -(-inner // 128)
    if packed_dtype == torch.float4_e2m1fn_x2:
        numbers = torch.empty(num_experts, rows, 64 * spans, dtype=torch.uint8)
        return experts.StackedWeights(numbers, numbers.new_empty(num_experts, rows, 4 * spans), own_bias)
    numbers = torch.empty(num_experts, rows, inner, dtype=packed_dtype)
    scales = torch.empty(num_experts, 1 if quantizes_rows else spans, rows)
    return experts.StackedWeights(numbers, scales, own_bias, quantizes_rows=quantizes_rows)


def _run(
    shape: tuple[int, int, int],
    slots: int,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None,
    clamp: ClampedSwiglu | None,
    rows: tuple[int, ...],
    settings: Settings,
    quantizes_rows: bool = False,
) -> None:
    """Experts of a shape (E, H, I), with a bias where there is a clamp."""
    num_experts, hidden, inner = shape
    gate_up = _weight(num_experts, 2 * inner, hidden, dtype, packed_dtype, clamp is not None, quantizes_rows)
    down = _weight(num_experts, hidden, inner, dtype, packed_dtype, clamp is not None, quantizes_rows)
    for count in rows:
        x = torch.empty(count, hidden, dtype=dtype)
        ids, weights = torch.empty(count, slots, dtype=torch.int64), torch.empty(count, slots)
        experts.moe(x, ids, weights, experts.PackedExperts(0, gate_up, down, clamp), settings)


def _run_blocks(settings: Settings) -> None:
    """A rank's experts of DeepSeek-V3, as they are stored."""
    num_experts, hidden, inner = 32, 7168, 2048

    def blocks(rows: int, width: int) -> experts.StackedWeights:
        numbers = torch.empty(num_experts, rows, width, dtype=settings.target.fp8)
        return experts.StackedWeights(numbers, torch.empty(num_experts, width // 128, rows // 128), None, 128)

    gate_up, down = blocks(2 * inner, hidden), blocks(hidden, inner)
    ids, weights = torch.empty(8, 8, dtype=torch.int64), torch.empty(8, 8)
    x = torch.empty(8, hidden, dtype=torch.bfloat16)
    experts.moe(x, ids, weights, experts.PackedExperts(0, gate_up, down, None), settings)


def _moe(
    shape: tuple[int, int, int],
    slots: int,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None = None,
    clamp: ClampedSwiglu | None = None,
    rows: tuple[int, ...] = (8,),
) -> Case:
    run = partial(_run, shape, slots, dtype, packed_dtype, clamp, rows)
    return Case(run, matrix=frozenset({"_grouped_product_kernel"}))


def _run_codes(
    dtype: torch.dtype,
    bits: int,
    group: int,
    scale: torch.dtype,
    settings: Settings,
    has_zeros: bool = False,
    has_offsets: bool = False,
    has_order: bool = False,
) -> None:
    """Experts of Qwen3-30B-A3B in codes."""
    num_experts, hidden, inner = QWEN3

    def codes(rows: int, width: int) -> experts.StackedWeights:
        of_groups = (num_experts, width // group, rows)
        form = CodeForm(
            bits,
            group,
            torch.empty(of_groups, dtype=torch.uint8) if has_zeros else None,
            torch.empty(of_groups) if has_offsets else None,
            torch.empty(num_experts, width, dtype=torch.int32) if has_order else None,
        )
        numbers = torch.empty(num_experts, rows, width * bits // 8, dtype=torch.uint8)
        return experts.StackedWeights(numbers, torch.empty(of_groups, dtype=scale), None, codes=form)

    gate_up, down = codes(2 * inner, hidden), codes(hidden, inner)
    ids, weights = torch.empty(8, 8, dtype=torch.int64), torch.empty(8, 8)
    x = torch.empty(8, hidden, dtype=dtype)
    experts.moe(x, ids, weights, experts.PackedExperts(0, gate_up, down, None), settings)


def _codes(dtype: torch.dtype, bits: int, group: int, scale: torch.dtype, spills: int = 0, **parts: bool) -> Case:
    # NVIDIA's matrix instructions do not multiply float32 as such.
    matrix = frozenset[str]() if dtype == torch.float32 else frozenset({"_grouped_product_kernel"})
    return Case(
        lambda settings: _run_codes(dtype, bits, group, scale, settings, **parts),
        matrix,
        (("_grouped_product_kernel", spills),),
    )


QWEN3 = (128, 2048, 768)
GPT_OSS = (32, 2880, 2880)
CLAMP = ClampedSwiglu(1.702, 7.0)
CASES: dict[str, Case] = {
    "route-qwen3": _route(128, Routing(8, renormalize=True)),
    "route-deepseek": _route(256, Routing(8, "sigmoid", True, 8, 4, 2.5), correction=True),
    "route-gpt-oss": _route(32, Routing(4, "topk_softmax")),
    "moe-bf16": _moe(QWEN3, 8, torch.bfloat16, rows=(8, 2048)),
    "moe-fp16": _moe(QWEN3, 8, torch.float16),
    "moe-int8": _moe(QWEN3, 8, torch.bfloat16, torch.int8),
    "moe-fp8": Case(
        lambda settings: _run(QWEN3, 8, torch.bfloat16, settings.target.fp8, None, (8,), settings),
        matrix=frozenset({"_grouped_product_kernel"}),
    ),
    "moe-w8a8-int8": Case(
        lambda settings: _run(QWEN3, 8, torch.bfloat16, torch.int8, None, (8, 2048), settings, True),
        matrix=frozenset({"_grouped_product_kernel"}),
    ),
    "moe-w8a8-fp8": Case(
        lambda settings: _run(QWEN3, 8, torch.bfloat16, settings.target.fp8, None, (8, 2048), settings, True),
        matrix=frozenset({"_grouped_product_kernel"}),
    ),
    "moe-fp8-blocks": Case(_run_blocks, matrix=frozenset({"_grouped_product_kernel"})),
    # GPTQ with act-order. Four registers on sm_90, with a pipeline of three stages.
    "moe-codes": _codes(torch.bfloat16, 4, 128, torch.float16, spills=4, has_zeros=True, has_order=True),
    # GGUF's Q4_K; registers on sm_90, here and below.
    "moe-codes-offsets": _codes(torch.bfloat16, 4, 32, torch.float32, spills=8, has_zeros=True, has_offsets=True),
    # GGUF's Q6_K, as a GPU keeps it.
    "moe-codes-8-bits": _codes(torch.bfloat16, 8, 16, torch.float32),
    "moe-codes-8-bits-offsets": _codes(torch.bfloat16, 8, 32, torch.float32, spills=6, has_offsets=True),
    # `--quantize int4`.
    "moe-codes-fp16": _codes(torch.float16, 4, 32, torch.bfloat16),
    "moe-codes-float32": _codes(torch.float32, 4, 32, torch.bfloat16),
    "moe-codes-float32-offsets": _codes(
        torch.float32, 4, 32, torch.float32, spills=2, has_zeros=True, has_offsets=True
    ),
    "moe-mxfp4": _moe(GPT_OSS, 4, torch.bfloat16, torch.float4_e2m1fn_x2, CLAMP),
}
