"""All layers of a model: the single operations in their order, what is between projection and attention fused."""

from __future__ import annotations

import torch

from kernels.interface import AttentionMetaData, Decoder, DecoderLayer
from kernels.triton_backend.attention import attention
from kernels.triton_backend.elementwise import add_rms_norm, rms_norm, silu_and_mul
from kernels.triton_backend.fused_qkv import norm_rope_write
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.linear import linear
from kernels.triton_backend.plan import StepPlan
from kernels.triton_backend.target import Settings


class TritonDecoder:
    """FusedDecoder: norm and rotation of heads and the write to the cache are one kernel.

    Args:
        decoder: its weights are those of `packed_weight.pack`.
        settings: what tiles are chosen by.
    """

    def __init__(self, decoder: Decoder, settings: Settings) -> None:
        self._decoder = decoder
        self._settings = settings

    def run(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: DeviceKVCache, metadata: AttentionMetaData
    ) -> torch.Tensor:
        """See FusedDecoder."""
        eps, plan = self._decoder.eps, metadata.plan
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self._decoder.layers):
            if residual is None:
                normed, residual = rms_norm(x, layer.input_norm, eps), x
            else:
                normed, residual = add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(normed, layer, index, (cos, sin), cache, plan)
            normed, residual = add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._network(normed, layer)
        if residual is None:
            return rms_norm(x, self._decoder.norm, eps)
        return add_rms_norm(x, residual, self._decoder.norm, eps)[0]

    def _attention(
        self,
        x: torch.Tensor,
        layer: DecoderLayer,
        index: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        cache: DeviceKVCache,
        plan: StepPlan,
    ) -> torch.Tensor:
        qkv = linear(x, layer.qkv, self._settings)
        q = norm_rope_write(qkv, layer.head_norms, self._decoder.eps, *cos_sin, cache, index, plan)
        scale = self._decoder.scale
        out = attention(q, cache, index, plan, scale, self._settings, layer.window, layer.sinks)
        return self._reduced(linear(out.flatten(1), layer.out, self._settings))

    def _network(self, x: torch.Tensor, layer: DecoderLayer) -> torch.Tensor:
        if layer.network is not None:
            return layer.network(x)
        inner = silu_and_mul(linear(x, layer.gate_up, self._settings))
        return self._reduced(linear(inner, layer.down, self._settings))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        reduce = self._decoder.all_reduce
        return x if reduce is None else reduce(x)
