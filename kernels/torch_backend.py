"""The reference back end: plain PyTorch, batch-invariant on a CPU.

Where PyTorch's bits could depend on the batch, and what is done (measured with MKL 2024.2; tests/unit/kernels):
- Matrix products: MKL picks kernels by M. Every product here is one fixed call shape: `ROW_TILE` rows, zero-padded,
  out of fresh or step-wide contiguous tensors, so each tile is 64-byte aligned. A row's place in its tile is free.
- Batched products in attention: a fixed number of items per call, 8 n rows per item (6 rows differ by batch size).
- Elementwise functions with an exp in them: kernels/elementwise.py. Sums along a contiguous row, softmax, rsqrt and
  arithmetic are row by row already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels import elementwise, paged_attention, sampling
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


class TorchBackend:
    """KernelBackend on PyTorch's CPU operations."""

    name = "torch"
    batch_invariant = True
    row_multiple = ROW_TILE

    def __init__(self) -> None:
        self._attention = paged_attention.PagedAttention()

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
        return PagedKVCache(num_layers, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype)

    def plan_attention(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> AttentionPlan:
        """See KernelBackend."""
        return paged_attention.plan(metadata, cache, num_heads)

    def write_kv(
        self, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        """See KernelBackend."""
        plan: AttentionPlan = metadata.plan
        tokens = metadata.num_tokens
        cache.write(layer, plan.slot_rows, k[:tokens], v[:tokens])

    def attention(
        self, q: torch.Tensor, cache: PagedKVCache, layer: int, metadata: AttentionMetaData, scale: float
    ) -> torch.Tensor:
        """See KernelBackend."""
        return self._attention.attend(q, cache, layer, metadata.plan, scale)

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
