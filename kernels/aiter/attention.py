"""Attention by AITER, over the Triton back end's cache and plan."""

from __future__ import annotations

from typing import Final

import torch
from typing_extensions import override

from kernels.aiter.dispatch import Choices, refuse_stored
from kernels.aiter.library import AiterLibrary
from kernels.interface import (
    AttentionMetaData,
    AttentionOps,
    AttentionPlan,
    KernelBackend,
    LatentAttentionOps,
    TokenSelection,
)
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan

_LEAST_HEAD, _LARGEST_HEAD = 32, 256
_LEAST_TILE: Final = 16
# Heads of a rank; aiter/ops/triton/attention/mla.py had no more before 0.1.20.
_LATENT_HEADS: Final = 16


class StoredScale:
    """Scale that AITER applies to the numbers of an FP8 KV cache: 1, since they are stored without a scale.

    Attributes:
        fp8: the FP8 of the architecture.
    """

    def __init__(self, fp8: torch.dtype, device: torch.device) -> None:
        self.fp8 = fp8
        self._one = torch.ones(1, dtype=torch.float32, device=device)

    def of(self, cache: DeviceKVCache) -> torch.Tensor | None:
        """The scale as float32 [1]; None for a cache in the model's dtype."""
        return self._one if cache.data.dtype == self.fp8 else None


class AiterAttentionOps(AttentionOps):
    """Attention by AITER, or by the back end `other` if AITER lacks it. `other` always writes the KV cache here."""

    def __init__(self, library: AiterLibrary, choices: Choices, fp8: torch.dtype, other: KernelBackend) -> None:
        self._aiter = library
        self._choices = choices
        self._scales = StoredScale(fp8, other.device)
        self._other = other.attention

    @override
    def plan(self, metadata: AttentionMetaData, cache: DeviceKVCache, num_heads: int) -> AttentionPlan:
        return self._other.plan(metadata, cache, num_heads)

    @override
    def write(
        self, cache: DeviceKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        self._other.write(cache, layer, k, v, metadata)

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        facts = (q.dtype, cache.data.dtype, self._scales.fp8, cache.head_dim, softcap > 0.0)
        if not q.numel() or not self._choices.takes("attention", _refuse_attention, *facts):
            return self._other.apply(q, cache, layer, metadata, scale, window, sinks, softcap)
        plan: StepPlan = metadata.plan
        # Rows of padding are not written.
        out = q.new_zeros(q.shape)
        stored_scale = self._scales.of(cache)
        self._aiter.call(
            "aiter.ops.triton.attention.unified_attention:unified_attention",
            q,
            cache.keys(layer),
            cache.values(layer),
            out,
            plan.cu_seqlens_q,
            _max_seqlen_q(plan.shape),
            plan.seq_lens,
            plan.shape.max_seqlen_k,
            scale,
            True,
            (-1, -1) if window is None else (window - 1, 0),
            plan.block_tables,
            0.0,
            None,
            stored_scale,
            stored_scale,
            sinks=sinks,
        )
        return out


class AiterLatentAttentionOps(LatentAttentionOps):
    """Latent attention by AITER for rows that attend to all earlier tokens; `other` does the rest, and all writes."""

    def __init__(self, library: AiterLibrary, choices: Choices, fp8: torch.dtype, other: KernelBackend) -> None:
        self._aiter = library
        self._choices = choices
        self._scales = StoredScale(fp8, other.device)
        self._other = other.latent_attention

    @override
    def write(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        self._other.write(cache, layer, k, metadata)

    @override
    def write_index(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        self._other.write_index(cache, layer, k, metadata)

    @override
    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: DeviceKVCache, layer: int, metadata: AttentionMetaData
    ) -> TokenSelection | None:
        return self._other.select_tokens(q, weights, cache, layer, metadata)

    @override
    def apply(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: TokenSelection | None,
    ) -> torch.Tensor:
        if selection is not None or not q.numel() or not self._takes(q, cache):
            return self._other.apply(q, cache, layer, metadata, scale, selection)
        plan: StepPlan = metadata.plan
        out = q.new_zeros(*q.shape[:2], cache.value_dim)
        if plan.shape.max_seqlen_q == 1 and plan.shape.seqs == plan.shape.rows:
            self._decode(q, cache, layer, plan, scale, out)
        else:
            self._prefill(q, cache, layer, plan, scale, out)
        return out

    def _takes(self, q: torch.Tensor, cache: DeviceKVCache) -> bool:
        sizes = (cache.value_dim, cache.head_dim - cache.value_dim, cache.block_size)
        facts = (q.dtype, cache.data.dtype, self._scales.fp8, q.shape[1], sizes)
        return self._choices.takes("latent_attention", _refuse_latent, *facts)

    def _decode(
        self, q: torch.Tensor, cache: DeviceKVCache, layer: int, plan: StepPlan, scale: float, out: torch.Tensor
    ) -> None:
        """Computes a step in which all sequences have equally many rows; the keys are split among programs."""
        self._aiter.call(
            "aiter.ops.triton.attention.mla:mla_decode_fwd",
            q,
            cache.keys(layer),
            out,
            plan.cu_seqlens_q,
            plan.seq_lens,
            plan.shape.max_seqlen_k,
            plan.block_tables,
            scale,
            kv_lora_rank=cache.value_dim,
            qk_rope_head_dim=cache.head_dim - cache.value_dim,
            causal=True,
            q_descale=None,
            kv_descale=self._scales.of(cache),
        )

    def _prefill(
        self, q: torch.Tensor, cache: DeviceKVCache, layer: int, plan: StepPlan, scale: float, out: torch.Tensor
    ) -> None:
        """Computes a step of any mixture of sequences."""
        self._aiter.call(
            "aiter.ops.triton.attention.mla:mla_prefill_fwd",
            q,
            cache.keys(layer),
            out,
            plan.cu_seqlens_q,
            plan.seq_lens,
            plan.shape.max_seqlen_k,
            plan.block_tables,
            scale,
            kv_lora_rank=cache.value_dim,
            qk_rope_head_dim=cache.head_dim - cache.value_dim,
            causal=True,
            q_descale=None,
            kv_descale=self._scales.of(cache),
        )


def _max_seqlen_q(shape: Shape) -> int:
    """Value of AITER's `max_seqlen_q`. With 1 AITER writes one row per sequence, padding included."""
    return max(2, shape.max_seqlen_q) if shape.seqs > shape.rows else shape.max_seqlen_q


def _refuse_attention(
    dtype: torch.dtype, stored: torch.dtype, fp8: torch.dtype, head_dim: int, is_capped: bool
) -> str | None:
    if is_capped:
        return "our attention alone bounds scores"
    if not _LEAST_HEAD <= head_dim <= _LARGEST_HEAD or head_dim % _LEAST_TILE:
        return f"AITER's attention is for heads of {_LEAST_HEAD} to {_LARGEST_HEAD}, by 16, not {head_dim}"
    return refuse_stored(dtype, stored, fp8)


def _refuse_latent(
    dtype: torch.dtype, stored: torch.dtype, fp8: torch.dtype, num_heads: int, sizes: tuple[int, ...]
) -> str | None:
    if num_heads > _LATENT_HEADS:
        return f"AITER's latent attention is for {_LATENT_HEADS} heads of a rank at most, not {num_heads}"
    if any(size < _LEAST_TILE or size & (size - 1) for size in sizes):
        return f"AITER's latent attention is for powers of 2 from 16: latent, rotated part and block are {sizes}"
    return refuse_stored(dtype, stored, fp8)
