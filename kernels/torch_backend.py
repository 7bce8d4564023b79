"""The reference back end: plain PyTorch, batch-invariant on a CPU.

Where PyTorch's bits could depend on the batch, and what is done (measured with MKL 2024.2; tests/unit/kernels):
- Matrix products: MKL picks kernels by M. Every product here is one fixed call shape: `ROW_TILE` rows, zero-padded,
  out of fresh or step-wide contiguous tensors, so each tile is 64-byte aligned. A row's place in its tile is free.
- Batched products in attention: a fixed number of items per call, 8 n rows per item (6 rows differ by batch size).
- Elementwise functions with an exp in them: kernels/elementwise.py. Sums along a contiguous row, softmax, rsqrt and
  arithmetic are row by row already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels import elementwise, paged_attention, sampling, token_selection
from kernels.interface import AttentionMetaData, KVSpec, SampleParams
from kernels.paged_attention import AttentionPlan, PagedKVCache

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
    """A matrix for each head.

    Attributes:
        weights_t: [Hq, K, N], a transposed view of contiguous [Hq, N, K].
    """

    weights_t: torch.Tensor


class TorchBackend:
    """KernelBackend on PyTorch's CPU operations."""

    name = "torch"
    batch_invariant = True
    row_multiple = ROW_TILE

    def __init__(self) -> None:
        self._attention = paged_attention.PagedAttention()
        self._selector = token_selection.TokenSelector()

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """See KernelBackend."""
        return PackedLinear(_aligned(weight, dtype).t(), None if bias is None else _aligned(bias, dtype))

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See KernelBackend: one fixed-shape product per tile of ROW_TILE rows."""
        rows = x.shape[0]
        tiles = _padded_rows(x)
        out = x.new_empty(tiles.shape[0], packed.weight_t.shape[1])
        pairs = zip(_row_tiles(tiles), _row_tiles(out), strict=True)
        if packed.bias is None:
            for tile, out_tile in pairs:
                torch.mm(tile, packed.weight_t, out=out_tile)
        else:
            for tile, out_tile in pairs:
                torch.addmm(packed.bias, tile, packed.weight_t, out=out_tile)
        return out[:rows]

    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedHeads:
        """See KernelBackend."""
        return PackedHeads(_aligned(weight, dtype).transpose(1, 2))

    def head_linear(self, x: torch.Tensor, packed: PackedHeads) -> torch.Tensor:
        """See KernelBackend: one fixed-shape batched product per tile of ROW_TILE rows."""
        rows, heads, width = x.shape
        tiles = _padded_rows(x.reshape(rows, heads * width)).view(-1, ROW_TILE, heads, width)
        by_head = tiles.transpose(1, 2).contiguous()
        out = x.new_empty(len(by_head), heads, ROW_TILE, packed.weights_t.shape[2])
        for tile, out_tile in zip(by_head, out, strict=True):
            torch.bmm(tile, packed.weights_t, out=out_tile)
        return out.transpose(1, 2).reshape(-1, heads, out.shape[3])[:rows]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        wide = x.float()
        mean_square = (wide * wide).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square.add_(eps))).to(x.dtype).mul_(weight)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred.mul_(torch.rsqrt(variance.add_(eps))).mul_(weight).add_(bias).to(x.dtype)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend; products and sums apart, so nothing can be fused differently."""
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See KernelBackend; silu is rounded to the model dtype before the product."""
        gate, up = x.chunk(2, dim=-1)
        return elementwise.silu(gate).to(x.dtype).mul_(up)

    def allocate_kv(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedKVCache:
        """See KernelBackend."""
        return PagedKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype)

    def plan_attention(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> AttentionPlan:
        """See KernelBackend."""
        selection = token_selection.plan(metadata, cache, num_heads)
        return replace(paged_attention.plan(metadata, cache, num_heads), selection=selection)

    def write_kv(
        self,
        cache: PagedKVCache,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor | None,
        metadata: AttentionMetaData,
    ) -> None:
        """See KernelBackend."""
        plan: AttentionPlan = metadata.plan
        tokens = metadata.num_tokens
        cache.write(layer, plan.slot_rows, k[:tokens], None if v is None else v[:tokens])

    def write_index(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend. The cache has one head, so index keys lie in the same rows as keys."""
        plan: AttentionPlan = metadata.plan
        assert cache.index is not None
        cache.index.write(layer, plan.slot_rows, k[: metadata.num_tokens], None)

    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: PagedKVCache, layer: int, metadata: AttentionMetaData
    ) -> AttentionPlan | None:
        """See KernelBackend."""
        plan: AttentionPlan = metadata.plan
        if plan.selection is None:
            return None
        return self._selector.select(q, weights, cache, layer, metadata, plan.selection)

    def attention(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        if selection is None:
            return self._attention.attend(q, cache, layer, metadata.plan, scale)
        return self._attention.attend(q, cache.by_token(), layer, selection, scale)

    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """See KernelBackend."""
        return torch.from_numpy(sampling.sample(logits.numpy(), params, seeds, positions, choices))


def _aligned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as it is if it is contiguous `dtype` in 64-byte aligned memory, else a copy that is."""
    if tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] with zero rows up to a multiple of ROW_TILE, contiguous; x itself when it is that already."""
    rows, width = x.shape
    padded = -(-rows // ROW_TILE) * ROW_TILE
    if rows == padded and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    tiles = x.new_zeros(padded, width)
    tiles[:rows] = x
    return tiles


def _row_tiles(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.view(-1, ROW_TILE, x.shape[1]).unbind()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
