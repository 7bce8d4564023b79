"""From a projection to the cache in one launch: norms and rotates heads, writes keys and values, returns queries.

The numbers are those of `rms_norm`, `rope` and `write_kv` in sequence, with the same roundings and, for sums over a
head, tiles of the same shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_backend.elementwise import RowTile
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import StepPlan


# Stores heads' numbers, clamped to +-largest if their dtype differs from that of `out`; NaN stays NaN.
@triton.jit
def _store(out, values, mask, largest, CLAMP: tl.constexpr):
    if CLAMP:
        wide = values.to(tl.float32)
        wide = tl.where(wide > largest, largest, wide)
        values = tl.where(wide < -largest, -largest, wide)
    tl.store(out, values.to(out.dtype.element_ty), mask=mask)


# Some columns of heads, scaled and weighted as by `rms_norm`.
@triton.jit
def _load_normed(x, weight, scale, head, head_dim, column, mask, NORM: tl.constexpr):
    values = tl.load(x + head * head_dim + column, mask=mask, other=0.0)
    if NORM:
        normed = (values.to(tl.float32) * scale).to(values.dtype).to(tl.float32)
        values = (normed * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)).to(values.dtype)
    return values


# Norms and rotates HEADS heads of one token, from head `first` on, and stores them side by side in `out`.
@triton.jit
def _norm_rotate_store(
    x,
    out,
    weight,
    cosines,
    sines,
    first,
    heads,
    head_dim,
    half,
    eps,
    largest,
    NORM: tl.constexpr,
    CLAMP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    head = (first + tl.arange(0, HEADS))[:, None]
    scale = 1.0
    if NORM:
        column = tl.arange(0, BLOCK)[None, :]
        mask = (head < heads) & (column < head_dim)
        wide = tl.load(x + head * head_dim + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / head_dim + eps)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (head < heads) & (pair < half)
    values = _load_normed(x, weight, scale, head, head_dim, pair, mask, NORM)
    low = values.to(tl.float32)
    high = _load_normed(x, weight, scale, head, head_dim, half + pair, mask, NORM).to(tl.float32)
    places = out + head * head_dim + pair
    _store(places, (low * cosines - high * sines).to(values.dtype), mask, largest, CLAMP)
    _store(places + half, (high * cosines + low * sines).to(values.dtype), mask, largest, CLAMP)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (column < head_dim)
        rest = _load_normed(x, weight, scale, head, head_dim, column, mask, NORM)
        _store(out + head * head_dim + column, rest, mask, largest, CLAMP)


# A program has HEADS heads of one token: query heads, then key heads, then value heads.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _norm_rope_write_kernel(
    qkv,
    q_out,
    keys,
    values,
    slots,
    q_norm,
    k_norm,
    cos,
    sin,
    qkv_stride,
    cos_stride,
    sin_stride,
    q_heads,
    kv_heads,
    head_dim,
    half,
    eps,
    largest,
    NORM: tl.constexpr,
    CLAMP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles, kv_tiles = tl.cdiv(q_heads, HEADS), tl.cdiv(kv_heads, HEADS)
    x = qkv + row * qkv_stride
    slot = tl.load(slots + row).to(tl.int64)
    pair = tl.arange(0, PAIRS)[None, :]
    cosines = tl.load(cos + row * cos_stride + pair, mask=pair < half, other=0.0)
    sines = tl.load(sin + row * sin_stride + pair, mask=pair < half, other=0.0)
    if tile < q_tiles:
        _norm_rotate_store(
            x,
            q_out + row * q_heads * head_dim,
            q_norm,
            cosines,
            sines,
            tile * HEADS,
            q_heads,
            head_dim,
            half,
            eps,
            largest,
            NORM,
            False,
            HEADS,
            BLOCK,
            PAIRS,
            REST,
        )
    elif slot >= 0:
        if tile < q_tiles + kv_tiles:
            _norm_rotate_store(
                x + q_heads * head_dim,
                keys + slot * kv_heads * head_dim,
                k_norm,
                cosines,
                sines,
                (tile - q_tiles) * HEADS,
                kv_heads,
                head_dim,
                half,
                eps,
                largest,
                NORM,
                CLAMP,
                HEADS,
                BLOCK,
                PAIRS,
                REST,
            )
        else:
            head = ((tile - q_tiles - kv_tiles) * HEADS + tl.arange(0, HEADS))[:, None]
            column = tl.arange(0, BLOCK)[None, :]
            mask = (head < kv_heads) & (column < head_dim)
            found = tl.load(x + (q_heads + kv_heads + head) * head_dim + column, mask=mask, other=0.0)
            _store(values + (slot * kv_heads + head) * head_dim + column, found, mask, largest, CLAMP)


def norm_rope_write(
    qkv: torch.Tensor,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: DeviceKVCache,
    layer: int,
    plan: StepPlan,
) -> torch.Tensor:
    """Norms and rotates queries and keys, writes keys and values to the cache, returns the queries [T, Hq, D].

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], concatenated queries, keys and values, in the model dtype; rows of any stride.
        head_norms: as `DecoderLayer.head_norms`, [D] of queries and [D] of keys; None for none.
        eps: of both norms.
        cos: float32 [T, 1, R/2], R <= D.
        sin: float32 [T, 1, R/2].
        cache: of Hkv heads of D, keys and values.
        layer: of the cache.
        plan: of the step; rows whose slot is -1 are not written.
    """
    head_dim, kv_heads = cache.head_dim, cache.num_kv_heads
    rows, q_heads, half = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, cos.shape[-1]
    out = torch.empty(rows, q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    tile, rest = RowTile.of(head_dim), head_dim - 2 * half
    q_norm, k_norm = (qkv, qkv) if head_norms is None else head_norms
    launch(
        _norm_rope_write_kernel,
        (rows, triton.cdiv(q_heads, tile.rows) + 2 * triton.cdiv(kv_heads, tile.rows)),
        *(qkv, out, cache.keys(layer), cache.values(layer), plan.slot_mapping, q_norm, k_norm, cos, sin),
        *(qkv.stride(0), cos.stride(0), sin.stride(0), q_heads, kv_heads, head_dim, half, eps),
        float(torch.finfo(cache.data.dtype).max),
        NORM=head_norms is not None,
        CLAMP=qkv.dtype != cache.data.dtype,
        PAIRS=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0,
        HEADS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    return out
