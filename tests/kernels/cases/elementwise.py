"""Elementwise kernels on the rows of Qwen3-8B, of a wide model, and of heads that are rotated in part."""

from __future__ import annotations

import torch

from kernels.interface import KVSpec
from kernels.triton_backend import elementwise
from kernels.triton_backend.fused_qkv import norm_rope_write
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.target import Settings
from tests.kernels.cases import Case


def _norms(dtype: torch.dtype, *shape: int) -> None:
    x, weight = torch.empty(shape, dtype=dtype), torch.empty(shape[-1], dtype=dtype)
    elementwise.rms_norm(x, weight, 1e-6)
    elementwise.add_rms_norm(x, x, weight, 1e-6)


def _rope(dtype: torch.dtype, rotary_dim: int) -> None:
    heads = torch.empty(7, 32 + 2 * 8, 128, dtype=dtype)
    q, k = heads[:, :32], heads[:, 32:40]
    angles = torch.empty(7, 1, rotary_dim // 2)
    elementwise.rope(q, k, angles, angles)


def _layer_norm(dtype: torch.dtype) -> None:
    weight = torch.empty(128, dtype=dtype)
    elementwise.layer_norm(torch.empty(7, 128, dtype=dtype), weight, weight, 1e-6)


def _norm_rope_write(dtype: torch.dtype, kv_dtype: torch.dtype, normed: bool) -> None:
    cache = DeviceKVCache.allocate(KVSpec(8, 128), 1, 4, 16, kv_dtype, torch.device("cpu"))
    shape = Shape(rows=7, seqs=1, blocks=4, max_seqlen_q=7, max_seqlen_k=64)
    plan = StepPlan.over(torch.zeros(sum(shape.sizes), dtype=torch.int32), shape)
    weight, angles = torch.empty(128, dtype=dtype), torch.empty(7, 1, 64)
    norms = (weight, weight) if normed else None
    norm_rope_write(torch.empty(7, 48 * 128, dtype=dtype), norms, 1e-6, angles, angles, cache, 0, plan)


def _norm_rope_write_fp8(settings: Settings) -> None:
    _norm_rope_write(torch.bfloat16, settings.target.fp8, normed=False)


CASES = {
    "silu_and_mul": Case(lambda _: elementwise.silu_and_mul(torch.empty(7, 24_576, dtype=torch.bfloat16))),
    "gelu_and_mul": Case(lambda _: elementwise.silu_and_mul(torch.empty(7, 18_432, dtype=torch.bfloat16), gelu=True)),
    "softcap": Case(lambda _: elementwise.softcap(torch.empty(7, 256_000), 30.0)),
    "norms": Case(lambda _: _norms(torch.bfloat16, 7, 4096)),
    "norms_float16": Case(lambda _: _norms(torch.float16, 7, 4096)),
    "norms_of_heads": Case(lambda _: elementwise.rms_norm(torch.empty(7, 48, 128), torch.empty(128), 1e-6)),
    "norms_of_heads_bfloat16": Case(
        lambda _: elementwise.rms_norm(
            torch.empty(7, 48, 128, dtype=torch.bfloat16), torch.empty(128, dtype=torch.bfloat16), 1e-6
        )
    ),
    "norms_wide": Case(lambda _: _norms(torch.bfloat16, 7, 16_384)),
    "layer_norm": Case(lambda _: _layer_norm(torch.bfloat16)),
    "rope": Case(lambda _: _rope(torch.bfloat16, 128)),
    "norm_rope_write": Case(lambda _: _norm_rope_write(torch.bfloat16, torch.bfloat16, normed=True)),
    "norm_rope_write_float16": Case(lambda _: _norm_rope_write(torch.float16, torch.float16, normed=True)),
    "rope_write_fp8": Case(_norm_rope_write_fp8),
    "rope_float16_partial": Case(lambda _: _rope(torch.float16, 96)),
}
