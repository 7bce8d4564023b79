"""Routing and experts of Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-20b."""

from __future__ import annotations

import torch

from kernels.interface import ClampedSwiglu, Routing
from kernels.triton_backend import experts
from kernels.triton_backend.routing import route
from kernels.triton_backend.target import Settings
from tests.kernels.cases import Case


def _route(num_experts: int, routing: Routing, correction: bool = False) -> Case:
    logits, bias = torch.empty(64, num_experts), torch.empty(num_experts)
    return Case(lambda _: route(logits, routing, bias if correction else None))


def _weight(
    num_experts: int, rows: int, inner: int, dtype: torch.dtype, packed_dtype: torch.dtype, bias: bool
) -> experts.StackedWeights:
    """Memory that is never touched costs nothing."""
    scaled = packed_dtype != dtype
    return experts.StackedWeights(
        torch.empty(num_experts, rows, inner, dtype=packed_dtype),
        torch.empty(num_experts, rows, -(-inner // 128)) if scaled else None,
        torch.empty(num_experts, rows, dtype=dtype) if bias else None,
    )


def _moe(
    shape: tuple[int, int, int],
    slots: int,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None = None,
    clamp: ClampedSwiglu | None = None,
    rows: tuple[int, ...] = (8,),
) -> Case:
    """Experts of a shape (E, H, I)."""
    num_experts, hidden, inner = shape
    bias = clamp is not None
    packed = experts.PackedExperts(
        0,
        _weight(num_experts, 2 * inner, hidden, dtype, packed_dtype or dtype, bias),
        _weight(num_experts, hidden, inner, dtype, packed_dtype or dtype, bias),
        clamp,
    )

    def run(settings: Settings) -> None:
        for count in rows:
            x = torch.empty(count, hidden, dtype=dtype)
            ids, weights = torch.empty(count, slots, dtype=torch.int64), torch.empty(count, slots)
            experts.moe(x, ids, weights, packed, settings)

    return Case(run, matrix=frozenset({"_grouped_product_kernel"}))


QWEN3 = (128, 2048, 768)
GPT_OSS = (32, 2880, 2880)
CASES: dict[str, Case] = {
    "route-qwen3": _route(128, Routing(8, renormalize=True)),
    "route-deepseek": _route(256, Routing(8, "sigmoid", True, 8, 4, 2.5), correction=True),
    "route-gpt-oss": _route(32, Routing(4, "topk_softmax")),
    "moe-bf16": _moe(QWEN3, 8, torch.bfloat16, rows=(8, 512, 2048)),
    "moe-fp16": _moe(QWEN3, 8, torch.float16),
    "moe-gpt-oss": _moe(GPT_OSS, 4, torch.bfloat16, clamp=ClampedSwiglu(1.702, 7.0)),
    "moe-int8": _moe(QWEN3, 8, torch.bfloat16, torch.int8, rows=(8, 2048)),
}
