"""Runs all layers of a decoder with a back end's single operations; only `RopeWrite` is the back end's own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.interface import AttentionMetaData, Decoder, DecoderLayer, KernelBackend, KVCache

# Rotates queries and keys (normed by head if the layer has such norms), writes keys and values to the cache, and
# returns the queries [T, Hq, D]. Input: a projection's [T, (Hq + 2 Hkv) * D], its layer, and the layer's index.
RopeWrite = Callable[[torch.Tensor, DecoderLayer, int], torch.Tensor]


class DecoderLayers:
    """Layers of a model, run with single operations.

    Args:
        decoder: its weights are packed by `backend`.
        backend: its single operations are used.

    Attributes:
        decoder: as given.
    """

    def __init__(self, decoder: Decoder, backend: KernelBackend) -> None:
        self.decoder = decoder
        self._linear = backend.linear
        self._elementwise = backend.elementwise
        self._attention = backend.attention

    def run(
        self,
        x: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetaData,
        rope_write: RopeWrite,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All layers and the last norm, over one step: x [T, H] -> [T, (1 + n) H]; see FusedDecoder."""
        linear, norm, add_norm = self._linear.apply, self._elementwise.rms_norm, self._elementwise.add_rms_norm
        attend, eps, scale = self._attention.apply, self.decoder.eps, self.decoder.scale
        residual: torch.Tensor | None = None
        streams: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.decoder.layers):
            if residual is None:
                normed, residual = self._begin(x, layer, embedded)
            else:
                normed, residual = add_norm(x, residual, layer.input_norm, eps)
            if index in self.decoder.aux_layers:
                streams[index] = residual
            q = rope_write(linear(normed, layer.qkv), layer, index)
            found = attend(q, cache, index, metadata, scale, layer.window, layer.sinks)
            x = self._reduced(linear(found.flatten(1), layer.out))
            normed, residual = add_norm(x, residual, layer.post_norm, eps)
            x = self._network(normed, layer)
        if residual is None:
            return norm(x, self.decoder.norm, eps)
        states, streams[len(self.decoder.layers)] = add_norm(x, residual, self.decoder.norm, eps)
        aux = [streams[index] for index in self.decoder.aux_layers]
        return torch.cat((states, *aux), dim=1) if aux else states

    def _begin(
        self, x: torch.Tensor, layer: DecoderLayer, embedded: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the input of the first layer's attention and the residual stream."""
        norm, eps, stream_norm = self._elementwise.rms_norm, self.decoder.eps, self.decoder.stream_norm
        if embedded is None or stream_norm is None:
            return norm(x, layer.input_norm, eps), x
        stream = norm(x, stream_norm, eps)
        both = torch.cat((norm(embedded, layer.input_norm, eps), stream), dim=1)
        return both, stream if self.decoder.norms_first else x

    def _network(self, x: torch.Tensor, layer: DecoderLayer) -> torch.Tensor:
        if layer.network is not None:
            return layer.network(x)
        inner = self._elementwise.silu_and_mul(self._linear.apply(x, layer.gate_up))
        return self._reduced(self._linear.apply(inner, layer.down))

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        reduce = self.decoder.all_reduce
        return x if reduce is None else reduce(x)
