"""Norms, rotary embedding and activation: one program a row, in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_backend.launch import launch


@triton.jit
def _silu_and_mul_kernel(x, out, x_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + inner + columns, mask=mask, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * inner + columns, (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See KernelBackend; silu is rounded to the model dtype before the product."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, inner)
    block = min(1024, triton.next_power_of_2(inner))
    launch(
        _silu_and_mul_kernel, (rows, triton.cdiv(inner, block)), x, out, x.stride(0), inner, BLOCK=block, num_warps=4
    )
    return out
