"""All layers of a decoder by a back end's single operations, but for what it does between projection and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.interface import AttentionMetaData, Decoder, DecoderLayer, KernelBackend, KVCache

# Rotates queries and keys, normed by head where the layer says so, writes keys and values to the cache, and gives the
# queries [T, Hq, D]: of a projection's [T, (Hq + 2 Hkv) * D], its layer, and that one's index.
RopeWrite = Callable[[torch.Tensor, DecoderLayer, int], torch.Tensor]


@dataclass(frozen=True)
class DecoderLayers:
    """The layers of a model.

    Attributes:
        decoder: its weights are packed by `backend`.
        backend: does the single operations.
    """

    decoder: Decoder
    backend: KernelBackend

    def run(self, x: torch.Tensor, cache: KVCache, metadata: AttentionMetaData, rope_write: RopeWrite) -> torch.Tensor:
        """All layers and the last norm, over one step: x [T, H] -> [T, H]; see FusedDecoder."""
        backend, eps = self.backend, self.decoder.eps
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.decoder.layers):
            if residual is None:
                normed, residual = backend.rms_norm(x, layer.input_norm, eps), x
            else:
                normed, residual = backend.add_rms_norm(x, residual, layer.input_norm, eps)
            q = rope_write(backend.linear(normed, layer.qkv), layer, index)
            found = backend.attention(q, cache, index, metadata, self.decoder.scale, layer.window, layer.sinks)
            x = self._reduced(backend.linear(found.flatten(1), layer.out))
            normed, residual = backend.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._network(normed, layer)
        if residual is None:
            return backend.rms_norm(x, self.decoder.norm, eps)
        return backend.add_rms_norm(x, residual, self.decoder.norm, eps)[0]

    def _network(self, x: torch.Tensor, layer: DecoderLayer) -> torch.Tensor:
        if layer.network is not None:
            return layer.network(x)
        inner = self.backend.silu_and_mul(self.backend.linear(x, layer.gate_up))
        return self._reduced(self.backend.linear(inner, layer.down))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        reduce = self.decoder.all_reduce
        return x if reduce is None else reduce(x)
