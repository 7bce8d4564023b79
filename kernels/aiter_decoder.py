"""All layers of a model over AITER's operations, what is between projection and attention fused.

Rotation and the write to the cache are one kernel of AITER's where that can serve, else our Triton one, which norms
heads too (kernels/triton_backend/fused_qkv.py).

Of AITER's fused kernels that norm heads none serves: they take cosines in the model's dtype, where ours are float32,
and read scales on the host (csrc/kernels/fused_qk_norm_rope_cache_quant.cu); most write another layout of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.aiter_library import AiterLibrary
from kernels.interface import AttentionMetaData, Decoder, DecoderLayer
from kernels.triton_backend.fused_qkv import norm_rope_write
from kernels.triton_backend.kv_cache import DeviceKVCache

if TYPE_CHECKING:
    from kernels.aiter_backend import AiterBackend, Choices


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share.

    Attributes:
        cos: float32 [T, 1, R/2].
        sin: likewise.
        rows: int64 [T], 0 to T - 1, where AITER rotates and writes; None where it does not.
        cache: of all layers.
        metadata: of the step.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None
    cache: DeviceKVCache
    metadata: AttentionMetaData


class AiterDecoder:
    """FusedDecoder. Its numbers are the single operations', but for AITER's and our Triton rotation, which may differ.

    Args:
        decoder: its weights are packed by `backend`.
        backend: does the single operations.
        library: AITER.
        choices: decides whether rotation and write are AITER's.
    """

    def __init__(self, decoder: Decoder, backend: AiterBackend, library: AiterLibrary, choices: Choices) -> None:
        self._decoder = decoder
        self._backend = backend
        self._aiter = library
        self._choices = choices
        self._norms_heads = any(layer.head_norms is not None for layer in decoder.layers)
        # AITER takes scales even where there is nothing to scale.
        self._one = torch.ones(1, dtype=torch.float32, device=backend.device)

    def run(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: DeviceKVCache, metadata: AttentionMetaData
    ) -> torch.Tensor:
        """See FusedDecoder."""
        backend, eps = self._backend, self._decoder.eps
        step = _Step(cos, sin, self._rows(x, cos, cache), cache, metadata)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._decoder.layers):
            if residual is None:
                normed, residual = backend.rms_norm(x, layer.input_norm, eps), x
            else:
                normed, residual = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(normed, layer, index, step)
            normed, residual = backend.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._network(normed, layer)
        if residual is None:
            return backend.rms_norm(x, self._decoder.norm, eps)
        return backend.add_rms_norm(x, residual, self._decoder.norm, eps)[0]

    def _rows(self, x: torch.Tensor, cos: torch.Tensor, cache: DeviceKVCache) -> torch.Tensor | None:
        """See `_Step`. Made anew in each step, so that a captured one has its own."""
        facts = (self._norms_heads, x.dtype, cache.data.dtype, 2 * cos.shape[-1], cache.head_dim, cache.block_size)
        if not len(x) or not self._choices.takes("rope_write", _refuse_rope_write, *facts):
            return None
        return torch.arange(len(x), device=x.device)

    def _attention(self, x: torch.Tensor, layer: DecoderLayer, index: int, step: _Step) -> torch.Tensor:
        backend = self._backend
        q = self._rope_write(backend.linear(x, layer.qkv), layer, index, step)
        out = backend.attention(q, step.cache, index, step.metadata, self._decoder.scale, layer.window, layer.sinks)
        return self._reduced(backend.linear(out.flatten(1), layer.out))

    def _network(self, x: torch.Tensor, layer: DecoderLayer) -> torch.Tensor:
        if layer.network is not None:
            return layer.network(x)
        inner = self._backend.silu_and_mul(self._backend.linear(x, layer.gate_up))
        return self._reduced(self._backend.linear(inner, layer.down))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        reduce = self._decoder.all_reduce
        return x if reduce is None else reduce(x)

    def _rope_write(self, qkv: torch.Tensor, layer: DecoderLayer, index: int, step: _Step) -> torch.Tensor:
        """See `norm_rope_write`: gives the queries [T, Hq, D]; keys and values are written."""
        cache, plan = step.cache, step.metadata.plan
        if step.rows is None:
            return norm_rope_write(qkv, layer.head_norms, self._decoder.eps, step.cos, step.sin, cache, index, plan)
        heads, kv_heads = qkv.view(len(qkv), -1, cache.head_dim), cache.num_kv_heads
        rotated, *_ = self._aiter.call(
            "aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache",
            heads[:, : -2 * kv_heads],
            heads[:, -2 * kv_heads : -kv_heads],
            heads[:, -kv_heads:],
            cache.keys(index),
            cache.values(index),
            plan.slot_mapping,
            step.rows,
            step.cos.squeeze(1),
            step.sin.squeeze(1),
            self._one,
            self._one,
            is_neox=True,
            flash_layout=True,
            apply_scale=False,
            output_zeros=False,
        )
        queries: torch.Tensor = rotated
        return queries


def _refuse_rope_write(
    norms_heads: bool, dtype: torch.dtype, stored: torch.dtype, rotated: int, head_dim: int, block_size: int
) -> str | None:
    """Why rotation and write are not AITER's: aiter/ops/triton/fusions/fused_kv_cache.py asserts most of it."""
    if norms_heads:
        return "AITER's fused norm and rotation of heads has cosines in the model's dtype, not in float32"
    if dtype != torch.bfloat16 or stored != dtype:
        found = " and ".join(str(each).removeprefix("torch.") for each in dict.fromkeys((dtype, stored)))
        return f"AITER's rotation and write as one are for a model and a cache in bfloat16, not {found}"
    if rotated != head_dim or any(size & (size - 1) for size in (head_dim, block_size)):
        sizes = f"{rotated} of {head_dim} rotated, in blocks of {block_size}"
        return f"AITER's rotation and write as one are for whole heads and blocks of powers of 2, not {sizes}"
    return None
