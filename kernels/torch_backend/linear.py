"""Matrix products whose bits do not depend on the number of rows or a row's place.

MKL picks kernels by the number of rows, so every product is one fixed call shape: ROW_TILE rows, padded with zeros, out
of contiguous tensors whose tiles are aligned. A row's place in its tile is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from kernels.interface import AnyWeight, LinearOps, PackedFormat
from kernels.quantized_weight import as_floats
from kernels.torch_backend.sampling import argmax

# Rows per matrix product. 16 costs a single decode little and runs at two thirds of MKL's best rate on AVX2.
ROW_TILE = 16
# PyTorch's allocator gives this to every tensor; a view may begin anywhere, and MKL's bits may depend on it.
_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedLinear:
    """A weight in aligned memory, transposed for `x @ weight_t`.

    Attributes:
        weight_t: [K, N], a transposed view of contiguous [N, K].
        bias: [N] or None.
    """

    weight_t: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class PackedHeads:
    """A weight for each head, in aligned memory.

    Attributes:
        weights_t: [Hq, K, N], a transposed view of contiguous [Hq, N, K].
    """

    weights_t: torch.Tensor


class TorchLinearOps(LinearOps):
    """Products of fixed shapes, one for each tile of ROW_TILE rows; the heads of a tile are one batched product."""

    @override
    def pack(
        self,
        weight: AnyWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedLinear:
        require_float(packed_format)
        return pack(as_floats(weight), bias, dtype)

    @override
    def apply(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        tiles = _padded_rows(x)
        out = x.new_empty(tiles.shape[0], packed.weight_t.shape[1])
        multiply(tiles, out, [packed] * (len(tiles) // ROW_TILE))
        return out[: x.shape[0]]

    @override
    def has_rows(self, packed: PackedLinear) -> bool:
        return True

    @override
    def rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        return packed.weight_t.t().index_select(0, ids)

    @override
    def argmax(self, x: torch.Tensor, packed: PackedLinear, limit: int) -> torch.Tensor:
        return argmax(self.apply(x, packed), limit)

    @override
    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedHeads:
        return PackedHeads(_aligned(weight, dtype).transpose(1, 2))

    @override
    def apply_heads(self, x: torch.Tensor, packed: PackedHeads) -> torch.Tensor:
        rows, heads, width = x.shape
        tiles = _padded_rows(x.reshape(rows, heads * width)).view(-1, ROW_TILE, heads, width)
        by_head = tiles.transpose(1, 2).contiguous()
        out = x.new_empty(len(by_head), heads, ROW_TILE, packed.weights_t.shape[2])
        for tile, out_tile in zip(by_head, out, strict=True):
            torch.bmm(tile, packed.weights_t, out=out_tile)
        return out.transpose(1, 2).reshape(-1, heads, out.shape[3])[:rows]


def require_float(packed_format: PackedFormat | None) -> None:
    """Refuses weights of 8 bits.

    Raises:
        ValueError: a format is asked for.
    """
    if packed_format is not None:
        raise ValueError(f"PyTorch's kernels do not pack weights as {packed_format.dtype}")


def pack(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """Packs a weight [N, K] and a bias [N]; may share their memory."""
    return PackedLinear(_aligned(weight, dtype).t(), None if bias is None else _aligned(bias, dtype))


def multiply(x: torch.Tensor, out: torch.Tensor, weights: Sequence[PackedLinear]) -> None:
    """Multiplies each tile of x [tiles * ROW_TILE, K] by its own weight, into out [tiles * ROW_TILE, N]."""
    for tile, out_tile, packed in zip(_row_tiles(x), _row_tiles(out), weights, strict=True):
        if packed.bias is None:
            torch.mm(tile, packed.weight_t, out=out_tile)
        else:
            torch.addmm(packed.bias, tile, packed.weight_t, out=out_tile)


def _aligned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` itself if it is contiguous, in `dtype` and 64-byte aligned; otherwise a copy that is."""
    if tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], padded with zero rows to a multiple of ROW_TILE and contiguous; x itself if it is so already."""
    rows, width = x.shape
    padded = -(-rows // ROW_TILE) * ROW_TILE
    if rows == padded and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    tiles = x.new_zeros(padded, width)
    tiles[:rows] = x
    return tiles


def _row_tiles(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(-1, ROW_TILE, x.shape[1]).unbind()
