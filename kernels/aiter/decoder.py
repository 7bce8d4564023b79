"""All layers of a model with AITER's operations; the operations between projection and attention are fused.

Rotation and the write to the cache are one kernel of AITER's if it can be used, otherwise our Triton one, which norms
heads too (kernels/triton_backend/fused_qkv.py).

None of AITER's fused kernels that norm heads can be used: they take cosines in the model's dtype, while ours are
float32, and read scales on the host (csrc/kernels/fused_qk_norm_rope_cache_quant.cu); most write another cache layout.
"""

from __future__ import annotations

import torch

from kernels.aiter.dispatch import Choices, text
from kernels.aiter.library import AiterLibrary
from kernels.decoder_layers import DecoderLayers, RopeWrite
from kernels.interface import AttentionMetaData, Decoder, DecoderLayer, KernelBackend
from kernels.triton_backend.decoder import TritonDecoder
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import StepPlan


class AiterDecoder:
    """FusedDecoder with the bits of the single operations; only AITER's rotation and our Triton one may differ.

    Args:
        decoder: its weights are packed by `backend`.
        backend: AITER's; its single operations are used.
        library: AITER.
        choices: decides whether rotation and write are AITER's.
    """

    def __init__(self, decoder: Decoder, backend: KernelBackend, library: AiterLibrary, choices: Choices) -> None:
        self._layers = DecoderLayers(decoder, backend)
        self._own = TritonDecoder(decoder, backend)
        self._aiter = library
        self._choices = choices
        self._norms_heads = any(layer.head_norms is not None for layer in decoder.layers)
        # AITER wants scales even if nothing is scaled.
        self._one = torch.ones(1, dtype=torch.float32, device=backend.device)

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: DeviceKVCache,
        metadata: AttentionMetaData,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes all layers and the last norm for one step; see FusedDecoder.run."""
        facts = (self._norms_heads, x.dtype, cache.data.dtype, 2 * cos.shape[-1], cache.head_dim, cache.block_size)
        if not len(x) or not self._choices.takes("rope_write", _refuse_rope_write, *facts):
            return self._own.run(x, cos, sin, cache, metadata, embedded)
        rope_write = self._rope_write(cos.squeeze(1), sin.squeeze(1), cache, metadata.plan)
        return self._layers.run(x, cache, metadata, rope_write, embedded)

    def _rope_write(self, cos: torch.Tensor, sin: torch.Tensor, cache: DeviceKVCache, plan: StepPlan) -> RopeWrite:
        """Rotates by AITER and writes keys and values, in a step with cosines and sines float32 [T, D/2]."""
        # Each row has its own cosines. They are made in each step, so that a captured step contains them.
        rows, kv_heads = torch.arange(len(cos), device=cos.device), cache.num_kv_heads

        def rope_write(qkv: torch.Tensor, layer: DecoderLayer, index: int) -> torch.Tensor:
            heads = qkv.view(len(qkv), -1, cache.head_dim)
            rotated, *_ = self._aiter.call(
                "aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache",
                heads[:, : -2 * kv_heads],
                heads[:, -2 * kv_heads : -kv_heads],
                heads[:, -kv_heads:],
                cache.keys(index),
                cache.values(index),
                plan.slot_mapping,
                rows,
                cos,
                sin,
                self._one,
                self._one,
                is_neox=True,
                flash_layout=True,
                apply_scale=False,
                output_zeros=False,
            )
            queries: torch.Tensor = rotated
            return queries

        return rope_write


def _refuse_rope_write(
    norms_heads: bool, dtype: torch.dtype, stored: torch.dtype, rotated: int, head_dim: int, block_size: int
) -> str | None:
    """Reason why AITER cannot rotate and write the cache for a model; None if it can."""
    if norms_heads:
        return "AITER's fused norm and rotation of heads has cosines in the model's dtype, not in float32"
    if dtype != torch.bfloat16 or stored != dtype:
        found = " and ".join(text(each) for each in dict.fromkeys((dtype, stored)))
        return f"AITER's rotation and write as one are for a model and a cache in bfloat16, not {found}"
    if rotated != head_dim or any(size & (size - 1) for size in (head_dim, block_size)):
        sizes = f"{rotated} of {head_dim} rotated, in blocks of {block_size}"
        return f"AITER's rotation and write as one are for whole heads and blocks of powers of 2, not {sizes}"
    return None
