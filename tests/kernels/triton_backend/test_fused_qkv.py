"""The fused kernel against the single operations, to the bit if no result is rounded in between."""

from __future__ import annotations

import pytest
import torch

from kernels import float8
from kernels.interface import KVSpec
from kernels.triton_backend.elementwise import rms_norm, rope
from kernels.triton_backend.fused_qkv import norm_rope_write
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.kv_write import write_kv
from kernels.triton_backend.plan import StepPlan, plan
from tests.unit.kernels.steps import Rows, metadata

pytestmark = pytest.mark.each_value

CPU = torch.device("cpu")
EPS = 1e-6
Norms = tuple[torch.Tensor, torch.Tensor] | None


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_plan() -> StepPlan:
    """Six rows of two sequences; one is written nowhere."""
    found = plan(metadata([Rows(3, 7, [4, 1]), Rows(0, 2, [6])], 4), CPU, 4)
    found.slot_mapping[1] = -1
    return found


def one_by_one(
    qkv: torch.Tensor, norms: Norms, cos: torch.Tensor, sin: torch.Tensor, cache: DeviceKVCache, step: StepPlan
) -> torch.Tensor:
    kv_heads, dim = cache.num_kv_heads, cache.head_dim
    heads = qkv.view(len(qkv), -1, dim)
    q, k, v = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    if norms is not None:
        q, k = rms_norm(q, norms[0], EPS), rms_norm(k, norms[1], EPS)
    q, k = rope(q, k, cos, sin)
    write_kv(cache, 1, k, v, step)
    return q


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float16),
        (torch.float16, torch.float8_e4m3fnuz),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rotary_dim", "normed"),
    [(4, 2, 16, 16, True), (3, 3, 24, 8, True), (18, 1, 33, 30, False), (1, 1, 200, 2, True)],
)
def test_fused_qkv_equals_single_operations(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    normed: bool,
) -> None:
    step = step_plan()
    qkv = (random(6, (q_heads + 2 * kv_heads) * head_dim, seed=0) * 300).to(dtype)
    first, second = ((random(head_dim, seed=seed) * 300).to(dtype) for seed in (1, 2))
    norms = (first, second) if normed else None
    angle = random(6, 1, rotary_dim // 2, seed=3) * 3.0
    fused, single = (DeviceKVCache.allocate(KVSpec(kv_heads, head_dim), 2, 8, 4, kv_dtype, CPU) for _ in range(2))
    expected = one_by_one(qkv, norms, angle.cos(), angle.sin(), single, step)
    found = norm_rope_write(qkv, norms, EPS, angle.cos(), angle.sin(), fused, 1, step)
    if dtype == torch.bfloat16:
        # The interpreter rounds after a kernel only.
        torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=2.0)
        torch.testing.assert_close(fused.data, single.data, rtol=1.6e-2, atol=2.0)
    else:
        assert torch.equal(found, expected)
        assert torch.equal(float8.raw(fused.data), float8.raw(single.data))


def test_no_rows() -> None:
    cache = DeviceKVCache.allocate(KVSpec(1, 8), 1, 8, 4, torch.float32, CPU)
    angles = torch.empty(0, 1, 4)
    assert norm_rope_write(torch.empty(0, 32), None, EPS, angles, angles, cache, 0, step_plan()).shape == (0, 2, 8)
