"""The reference back end: plain PyTorch, batch-invariant on a CPU.

Where PyTorch's bits could depend on the batch, and what is done (measured with MKL 2024.2; tests/unit/kernels):
- Matrix products: kernels/torch_backend/linear.py. Experts: kernels/torch_backend/moe.py.
- Batched products in attention: a fixed number of items per call, 8 n rows per item (6 rows differ by batch size).
- Elementwise functions with an exp in them: kernels/torch_backend/elementwise.py. Sums along a contiguous row, softmax,
  rsqrt and arithmetic are row by row already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from kernels import sampling
from kernels.interface import (
    AttentionMetaData,
    ClampedSwiglu,
    Decoder,
    ExpertWeights,
    KVSpec,
    PackedFormat,
    QuantizedFormat,
    QuantizedWeight,
    Routing,
    SampleParams,
)
from kernels.quantized_weight import as_floats
from kernels.torch_backend import attention as paged_attention
from kernels.torch_backend import linear as row_tiles
from kernels.torch_backend import moe as experts
from kernels.torch_backend import token_selection
from kernels.torch_backend.attention import AttentionPlan, PagedKVCache, StepPlan
from kernels.torch_backend.linear import ROW_TILE, PackedHeads, PackedLinear
from kernels.torch_backend.moe import PackedExperts

# Names of `torch.cpu.get_capabilities` for what multiplies a dtype.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16"),
}


class TorchBackend:
    """KernelBackend on PyTorch's CPU operations."""

    name = "torch"
    description = "torch"
    batch_invariant = True
    row_multiple = ROW_TILE
    device = torch.device("cpu")
    graphs = None

    def __init__(self) -> None:
        self._attention = paged_attention.PagedAttention()
        self._selector = token_selection.TokenSelector()

    @property
    def numerics(self) -> tuple[object, ...]:
        """See KernelBackend."""
        capability = torch.backends.cpu.get_cpu_capability()
        return (self.name, torch.__version__, capability, torch.get_num_threads())

    @property
    def layout(self) -> tuple[object, ...]:
        """See KernelBackend."""
        return (self.name,)

    def join_ranks(self, ranks: object) -> None:
        """See KernelBackend: the caller adds up."""

    def adopt(self, packed: object) -> None:
        """See KernelBackend."""

    def is_fast(self, dtype: torch.dtype) -> bool:
        """See KernelBackend: PyTorch's bfloat16 is ten times slower than float32 without instructions for it."""
        capabilities = torch.cpu.get_capabilities()
        return dtype == torch.float32 or any(capabilities.get(name, False) for name in _INSTRUCTIONS[dtype])

    def packed_format(self, name: str, dtype: torch.dtype) -> None:
        """See KernelBackend: none."""
        return

    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        """See KernelBackend: none."""
        return False

    def pack_linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedLinear:
        """See KernelBackend."""
        _require_float(packed_format)
        return row_tiles.pack(as_floats(weight), bias, dtype)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See KernelBackend: one fixed-shape product per tile of ROW_TILE rows."""
        return row_tiles.linear(x, packed)

    def packed_rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        """See KernelBackend."""
        return packed.weight_t.t().index_select(0, ids)

    def linear_argmax(self, x: torch.Tensor, packed: PackedLinear, limit: int) -> torch.Tensor:
        """See KernelBackend."""
        return self.argmax(self.linear(x, packed), limit)

    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedHeads:
        """See KernelBackend."""
        return row_tiles.pack_heads(weight, dtype)

    def head_linear(self, x: torch.Tensor, packed: PackedHeads) -> torch.Tensor:
        """See KernelBackend: one fixed-shape batched product per tile of ROW_TILE rows."""
        return row_tiles.head_linear(x, packed)

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
        return experts.silu_and_mul(x)

    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        return experts.route(logits, routing, correction_bias)

    def pack_experts(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedExperts:
        """See KernelBackend."""
        _require_float(packed_format)
        return experts.pack(weights, first, clamp, dtype)

    def moe(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PackedExperts
    ) -> torch.Tensor:
        """See KernelBackend."""
        return experts.moe(x, topk_ids, topk_weights, packed)

    def allocate_kv(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedKVCache:
        """See KernelBackend."""
        return PagedKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype)

    def touch_kv(self, cache: PagedKVCache, progress: Callable[[int, int], None]) -> None:
        """See KernelBackend."""
        cache.touch(progress)

    def plan_attention(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> StepPlan:
        """See KernelBackend."""
        return StepPlan(metadata, cache, num_heads, token_selection.plan(metadata, cache, num_heads))

    def write_kv(
        self, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        """See KernelBackend."""
        plan: StepPlan = metadata.plan
        tokens = metadata.num_tokens
        cache.write(layer, plan.slot_rows, k[:tokens], v[:tokens])

    def attention(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        plan: StepPlan = metadata.plan
        return self._attention.attend(q, cache, layer, plan.attention(window), scale, sinks)

    def write_latent(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend."""
        plan: StepPlan = metadata.plan
        cache.write(layer, plan.slot_rows, k[: metadata.num_tokens])

    def write_index(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend. The cache has one head, so index keys lie in the same rows as keys."""
        plan: StepPlan = metadata.plan
        assert cache.index is not None
        cache.index.write(layer, plan.slot_rows, k[: metadata.num_tokens])

    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: PagedKVCache, layer: int, metadata: AttentionMetaData
    ) -> AttentionPlan | None:
        """See KernelBackend."""
        plan: StepPlan = metadata.plan
        if plan.selection is None:
            return None
        return self._selector.select(q, weights, cache, layer, metadata, plan.selection)

    def latent_attention(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: AttentionPlan | None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        if selection is not None:
            return self._attention.attend(q, cache.by_token(), layer, selection, scale)
        plan: StepPlan = metadata.plan
        return self._attention.attend(q, cache, layer, plan.attention(None), scale)

    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> None:
        """See KernelBackend: single operations only."""
        return

    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        """See KernelBackend."""
        return torch.from_numpy(sampling.greedy(logits[:, :limit].float().numpy()))

    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        """See KernelBackend: they are on the host."""
        return ids.tolist

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


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def _require_float(packed_format: PackedFormat | None) -> None:
    if packed_format is not None:
        raise ValueError(f"PyTorch's kernels do not pack weights as {packed_format.dtype}")
