"""Writing to the cache and attention, in the shapes of Qwen3-8B, gpt-oss, Phi-2 and Gemma."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.triton_backend.attention import attention
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.kv_write import write_kv, write_rows
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.target import Settings
from tests.kernels.cases import Case

# Long enough for key tiles to be dealt out.
DECODE = Shape(rows=8, seqs=8, blocks=512, max_seqlen_q=1, max_seqlen_k=8000)
# 8 k tokens: one program walks all keys.
PREFILL = Shape(rows=8192, seqs=2, blocks=512, max_seqlen_q=8000, max_seqlen_k=8000)
MATRIX = frozenset({"_attention_kernel"})
# On sm_90 a program keeps two sums of weighted values, one of a key tile and one of all tiles before. It spills part of
# the second. Measured on an H200: 48 % of the matrix rate in tiles of 128 rows, 37 % in smaller tiles that spill less.
# On AMD GPUs, scalar registers spill to vector registers.
SPILLS = (("_attention_kernel", 120),)
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def cache_of(heads: int, dim: int, block_size: int, dtype: torch.dtype) -> DeviceKVCache:
    return DeviceKVCache(torch.empty(1, 2, 4, block_size, heads, dim, dtype=dtype), dim)


def plan_of(shape: Shape) -> StepPlan:
    return StepPlan.over(torch.zeros(sum(shape.sizes), dtype=torch.int32), shape)


def attending(
    shapes: tuple[Shape, ...],
    heads: tuple[int, int],
    dim: int,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    sinks: bool = False,
    softcap: float = 0.0,
) -> Callable[[Settings], object]:
    """A call for each shape; FP8 is that of the target."""

    def run(settings: Settings) -> None:
        stored = settings.target.fp8 if cache_dtype == FP8 else cache_dtype or dtype
        cache = cache_of(heads[1], dim, block_size, stored)
        for shape in shapes:
            q = torch.empty(shape.rows, (heads[0] + 2 * heads[1]) * dim, dtype=dtype)[:, : heads[0] * dim]
            attention(
                q.view(shape.rows, heads[0], dim),
                cache,
                0,
                plan_of(shape),
                0.1,
                settings,
                window,
                torch.empty(heads[0]) if sinks else None,
                softcap,
            )

    return run


def writing(settings: Settings) -> None:
    for dtype in (BF16, settings.target.fp8):
        k = torch.empty(8, 48 * 128, dtype=BF16)[:, : 8 * 128].view(8, 8, 128)
        write_kv(cache_of(8, 128, 16, dtype), 0, k, k, plan_of(DECODE))
        latent = DeviceKVCache(torch.empty(1, 1, 4, 16, 1, 576, dtype=dtype), 512)
        write_rows(latent, 0, torch.empty(8, 576, dtype=BF16), plan_of(DECODE))


CASES = {
    "write": Case(writing),
    "qwen3-8b": Case(attending((DECODE,), (32, 8), 128), MATRIX, SPILLS),
    "qwen3-8b block 64": Case(attending((PREFILL,), (32, 8), 128, 64), MATRIX, SPILLS),
    "qwen3-8b fp16": Case(attending((PREFILL,), (32, 8), 128, 64, FP16), MATRIX, SPILLS),
    "qwen3-8b fp8": Case(attending((DECODE,), (32, 8), 128, 64, BF16, FP8), MATRIX, SPILLS),
    "gpt-oss": Case(attending((DECODE, PREFILL), (64, 8), 64, 64, window=128, sinks=True), MATRIX, SPILLS),
    "phi-2": Case(attending((PREFILL,), (32, 32), 80, 16, FP16), MATRIX, SPILLS),
    "gemma": Case(attending((DECODE,), (8, 4), 256, 16, window=4096, softcap=50.0), MATRIX, SPILLS),
}
