"""All layers of a model: the single operations in order, fused between projection and attention."""

from __future__ import annotations

import torch

from kernels.decoder_layers import DecoderLayers
from kernels.interface import AttentionMetaData, Decoder, DecoderLayer, KernelBackend
from kernels.triton_backend.fused_qkv import norm_rope_write
from kernels.triton_backend.kv_cache import DeviceKVCache


class TritonDecoder:
    """FusedDecoder that fuses the norm and rotation of heads with the write to the cache.

    Args:
        decoder: its weights are packed by `backend`.
        backend: the Triton one.
    """

    def __init__(self, decoder: Decoder, backend: KernelBackend) -> None:
        self._layers = DecoderLayers(decoder, backend)

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
        eps, plan = self._layers.decoder.eps, metadata.plan

        def rope_write(qkv: torch.Tensor, layer: DecoderLayer, index: int) -> torch.Tensor:
            return norm_rope_write(qkv, layer.head_norms, eps, cos, sin, cache, index, plan)

        return self._layers.run(x, cache, metadata, rope_write, embedded)
