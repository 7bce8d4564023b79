"""Attention, its indexer and the writing of the KV cache by the native kernels (kernels/cpu/native/attention.cpp)."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels.cpu.fallback import Fallback
from kernels.cpu.library import DTYPES, KV_DTYPES, address, check
from kernels.interface import AttentionMetaData, AttentionOps, KVSpec, LatentAttentionOps
from kernels.torch_backend.attention import AttentionPlan, PagedKVCache
from kernels.torch_backend.attention_ops import TorchKVCacheOps
from kernels.torch_backend.backend import TorchBackend


class StepArrays:
    """Metadata of a step as arrays for the native kernels, made once per step; keeps the arrays alive.

    Attributes:
        tokens: rows that are tokens.
        slots: address of the tokens' slots.
        sequences: the arguments that say whose rows and keys are where.

    Raises:
        ValueError: an array is not contiguous int64, which the kernels would misread.
    """

    def __init__(self, metadata: AttentionMetaData) -> None:
        self.tokens = metadata.num_tokens
        self.slots = _address(metadata.slot_mapping)
        tables = metadata.block_tables
        if tables.dtype != np.int64 or tables.strides[1] != tables.itemsize:
            raise ValueError(f"block tables: rows of int64 expected, not {tables.dtype} with strides {tables.strides}")
        self.sequences = (
            tables.ctypes.data,
            tables.strides[0] // tables.itemsize,
            len(metadata.seq_lens),
            _address(metadata.cu_seqlens_q),
            _address(metadata.seq_lens),
        )
        self._kept = metadata


@dataclass(frozen=True)
class SelectedTokens:
    """The tokens that each row of a step attends to.

    Attributes:
        positions: int64 [tokens, topk], ascending; a row that sees fewer tokens has them first.
    """

    positions: torch.Tensor


class CpuPlan:
    """Arrays of one step for the native kernels. PyTorch's plan is made when one of its kernels needs it.

    Attributes:
        arrays: for the native kernels.
    """

    def __init__(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> None:
        self.arrays = StepArrays(metadata)
        self._step = metadata, cache, num_heads
        self._for_torch: AttentionMetaData | None = None

    def for_torch(self, backend: TorchBackend) -> AttentionMetaData:
        """The step's metadata with PyTorch's plan."""
        if self._for_torch is None:
            self._for_torch = replace(self._step[0], plan=backend.attention.plan(*self._step))
        return self._for_torch


class CpuKVCacheOps(TorchKVCacheOps):
    """Caches of PyTorch's back end, which the native kernels read and write too."""

    def __init__(self, fallback: Fallback) -> None:
        self._fallback = fallback

    @override
    def allocate(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedKVCache:
        self._fallback.used |= dtype not in KV_DTYPES
        return super().allocate(spec, num_layers, num_blocks, block_size, dtype)


class CpuAttentionOps(AttentionOps):
    """Attention by native kernels if they support the dtypes of rows and cache, otherwise by PyTorch."""

    def __init__(self, library: CDLL, other: TorchBackend) -> None:
        self._library = library
        self._torch = other

    @override
    def plan(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> CpuPlan:
        return CpuPlan(metadata.moved(cache.block_size), cache, num_heads)

    @override
    def write(
        self, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        plan: CpuPlan = metadata.plan
        if _native(k, cache):
            write_kv(self._library, cache, layer, k, v, plan.arrays)
        else:
            self._torch.attention.write(cache, layer, k, v, plan.for_torch(self._torch))

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        plan: CpuPlan = metadata.plan
        if _native(q, cache):
            return attention(self._library, q, cache, layer, plan.arrays, scale, window, sinks, softcap)
        return self._torch.attention.apply(q, cache, layer, plan.for_torch(self._torch), scale, window, sinks, softcap)


class CpuLatentAttentionOps(LatentAttentionOps):
    """Latent attention by native kernels if they support the dtypes of rows and cache, otherwise by PyTorch."""

    def __init__(self, library: CDLL, other: TorchBackend) -> None:
        self._library = library
        self._torch = other

    @override
    def write(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        plan: CpuPlan = metadata.plan
        if _native(k, cache):
            write_latent(self._library, cache, layer, k, plan.arrays)
        else:
            self._torch.latent_attention.write(cache, layer, k, plan.for_torch(self._torch))

    @override
    def write_index(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        plan: CpuPlan = metadata.plan
        if _native(k, cache):
            assert cache.index is not None
            write_latent(self._library, cache.index, layer, k, plan.arrays)
        else:
            self._torch.latent_attention.write_index(cache, layer, k, plan.for_torch(self._torch))

    @override
    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: PagedKVCache, layer: int, metadata: AttentionMetaData
    ) -> SelectedTokens | AttentionPlan | None:
        plan: CpuPlan = metadata.plan
        if _native(q, cache):
            return select_tokens(self._library, q, weights, cache, layer, metadata, plan.arrays)
        selection: AttentionPlan | None = self._torch.latent_attention.select_tokens(
            q, weights, cache, layer, plan.for_torch(self._torch)
        )
        return selection

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: SelectedTokens | AttentionPlan | None,
    ) -> torch.Tensor:
        plan: CpuPlan = metadata.plan
        if _native(q, cache):
            assert selection is None or isinstance(selection, SelectedTokens)
            return latent_attention(self._library, q, cache, layer, plan.arrays, scale, selection)
        assert not isinstance(selection, SelectedTokens)
        return self._torch.latent_attention.apply(q, cache, layer, plan.for_torch(self._torch), scale, selection)


def _native(x: torch.Tensor, cache: PagedKVCache) -> bool:
    return x.dtype in DTYPES and cache.data.dtype in KV_DTYPES


def write_kv(
    library: CDLL, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, step: StepArrays
) -> None:
    """Stores the rows of k and v [T, Hkv, D] that are tokens (the first ones) in their slots."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    sides = cache.data[layer]
    values = v.data_ptr(), v.stride(0), v.stride(1), sides[1].data_ptr()
    _write(library, cache, sides[0], k, k.stride(1), values, step)


def write_latent(library: CDLL, cache: PagedKVCache, layer: int, k: torch.Tensor, step: StepArrays) -> None:
    """Stores the rows of k [T, D] that are tokens (the first ones) in their slots of a cache with one key head."""
    k = k if k.stride(1) == 1 else k.contiguous()
    _write(library, cache, cache.data[layer, 0], k, 0, (None, 0, 0, None), step)


def _write(
    library: CDLL,
    cache: PagedKVCache,
    keys: torch.Tensor,
    k: torch.Tensor,
    k_head_stride: int,
    values: tuple[int | None, int, int, int | None],
    step: StepArrays,
) -> None:
    """Writes rows of k into `keys`. `values`: address of v, strides of its rows and heads, destination address."""
    library.fissile_write_kv(
        DTYPES[k.dtype],
        KV_DTYPES[cache.data.dtype],
        k.data_ptr(),
        k.stride(0),
        k_head_stride,
        *values[:3],
        step.tokens,
        cache.num_kv_heads,
        cache.head_dim,
        cache.block_size,
        step.slots,
        keys.data_ptr(),
        values[3],
    )


def attention(
    library: CDLL,
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    step: StepArrays,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over the cache: [T, Hq, D]; see AttentionOps.apply."""
    if q.stride(2) != 1:
        q = q.contiguous()
    rows, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype) if rows == step.tokens else torch.zeros(q.shape, dtype=q.dtype)
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    sides = cache.data[layer]
    check(
        library.fissile_attention(
            DTYPES[q.dtype],
            KV_DTYPES[cache.data.dtype],
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            sides[0].data_ptr(),
            sides[1].data_ptr(),
            heads,
            cache.num_kv_heads,
            dim,
            cache.block_size,
            *step.sequences,
            scale,
            softcap,
            window or 0,
            None if wide_sinks is None else wide_sinks.data_ptr(),
            heads * dim,
            out.data_ptr(),
        )
    )
    return out


def select_tokens(
    library: CDLL,
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetaData,
    step: StepArrays,
) -> SelectedTokens | None:
    """Tokens that each row attends to, by index queries q [T, Hi, Di] and weights float32 [T, Hi]; see
    LatentAttentionOps."""
    spec, index = cache.index_spec, cache.index
    if spec is None or index is None or metadata.seq_lens.max() <= spec.topk:
        return None
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights.contiguous()
    positions = torch.zeros(step.tokens, spec.topk, dtype=torch.int64)
    check(
        library.fissile_select_tokens(
            DTYPES[q.dtype],
            KV_DTYPES[index.data.dtype],
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            weights.data_ptr(),
            index.data[layer].data_ptr(),
            spec.num_heads,
            spec.head_dim,
            index.block_size,
            *step.sequences,
            spec.topk,
            positions.data_ptr(),
        )
    )
    return SelectedTokens(positions)


def latent_attention(
    library: CDLL,
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    step: StepArrays,
    scale: float,
    selection: SelectedTokens | None,
) -> torch.Tensor:
    """Attention of q [T, Hq, D] over a latent cache: [T, Hq, Dv]; see LatentAttentionOps.apply."""
    q = q if q.stride(2) == 1 else q.contiguous()
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, cache.value_dim, dtype=q.dtype)
    out[step.tokens :] = 0.0
    check(
        library.fissile_latent_attention(
            DTYPES[q.dtype],
            KV_DTYPES[cache.data.dtype],
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            cache.data[layer].data_ptr(),
            heads,
            dim,
            cache.value_dim,
            cache.block_size,
            *step.sequences,
            scale,
            None if selection is None else selection.positions.data_ptr(),
            0 if selection is None else selection.positions.shape[1],
            out.data_ptr(),
        )
    )
    return out


def _address(values: npt.NDArray[np.int64]) -> int:
    """Address of int64 numbers.

    Raises:
        ValueError: they are something else, which the kernels would misread.
    """
    if values.dtype != np.int64:
        raise ValueError(f"attention metadata: int64 expected, not {values.dtype}")
    return address(values)
