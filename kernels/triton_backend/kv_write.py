"""Writes keys and values to the paged cache: one program a row (and part of it), rounded to the cache's dtype.

The slots can begin anywhere in the plan's memory, and their alignment must not select other kernels.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import StepPlan

# Numbers that a program writes to a side of the cache, at most.
_BLOCK = 2048


@triton.jit
def _store_part(
    x,
    row,
    row_stride,
    head_stride,
    out,
    slot,
    columns,
    width,
    largest,
    HEAD_DIM: tl.constexpr,
    CLAMP: tl.constexpr,
):
    mask = columns < width
    places = row * row_stride + columns // HEAD_DIM * head_stride + columns % HEAD_DIM
    found = tl.load(x + places, mask=mask, other=0.0)
    if CLAMP:
        # Comparisons and not minimum and maximum, so that NaN stays NaN.
        wide = found.to(tl.float32)
        wide = tl.where(wide > largest, largest, wide)
        found = tl.where(wide < -largest, -largest, wide)
    tl.store(out + slot * width + columns, found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_rows_kernel(x, out, slots, row_stride, width, largest, CLAMP: tl.constexpr, B: tl.constexpr):
    """Program (row, part): writes B of the row's `width` numbers to its slot; padding rows have none."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        columns = tl.program_id(1) * B + tl.arange(0, B)
        _store_part(x, row, row_stride, 0, out, slot, columns, width, largest, B, CLAMP)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kv_kernel(
    k,
    v,
    keys,
    values,
    slots,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    width,
    largest,
    HEAD_DIM: tl.constexpr,
    CLAMP: tl.constexpr,
    B: tl.constexpr,
):
    """Program (row, part): writes keys and values as `_write_rows_kernel` writes one of them."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        columns = tl.program_id(1) * B + tl.arange(0, B)
        _store_part(k, row, k_row_stride, k_head_stride, keys, slot, columns, width, largest, HEAD_DIM, CLAMP)
        _store_part(v, row, v_row_stride, v_head_stride, values, slot, columns, width, largest, HEAD_DIM, CLAMP)


def write_kv(cache: DeviceKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, plan: StepPlan) -> None:
    """Stores k and v [T, Hkv, D] of any float dtype in the plan's slots; see KernelBackend.

    If the cache's dtype differs from that of k and v, numbers beyond its range become its largest. Rows and heads may
    have gaps (parts of a fused projection), a head's numbers not. Rows whose slot is -1 are not stored.
    """
    width = cache.num_kv_heads * cache.head_dim
    launch(
        _write_kv_kernel,
        _grid(k, width),
        k,
        v,
        cache.keys(layer),
        cache.values(layer),
        plan.slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        width,
        _largest(cache),
        HEAD_DIM=cache.head_dim,
        CLAMP=k.dtype != cache.data.dtype,
        B=_block(width),
        num_warps=4,
    )


def write_rows(cache: DeviceKVCache, layer: int, k: torch.Tensor, plan: StepPlan) -> None:
    """Stores k [T, D] in a latent cache, or a cache of index keys, as `write_kv` does."""
    width = cache.head_dim
    launch(
        _write_rows_kernel,
        _grid(k, width),
        k,
        cache.keys(layer),
        plan.slot_mapping,
        k.stride(0),
        width,
        _largest(cache),
        CLAMP=k.dtype != cache.data.dtype,
        B=_block(width),
        num_warps=4,
    )


def _grid(k: torch.Tensor, width: int) -> tuple[int, int]:
    return (k.shape[0], math.ceil(width / _block(width)))


def _block(width: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(width)))


def _largest(cache: DeviceKVCache) -> float:
    return float(torch.finfo(cache.data.dtype).max)
