"""The CPU back end: native kernels, batch-invariant by construction, with any number of threads.

Float32 and bfloat16 are native, with a KV cache in these, float16 or FP8 (E4M3). Models in float16 run on PyTorch's
kernels (kernels/torch_backend/backend.py), all but the choice of experts and sampling. Which of the two is decided by
dtype alone, at load, so it never changes between two steps of a model (docs/determinism.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu import attention, elementwise, experts, fused, instruction_sets, library, linear, sampling
from kernels.cpu.attention import SelectedTokens, StepArrays
from kernels.cpu.build import sources_digest
from kernels.cpu.experts import PanelExperts
from kernels.cpu.fused import NativeDecoder
from kernels.cpu.library import DTYPES, KV_DTYPES
from kernels.cpu.linear import PanelHeads, PanelLinear
from kernels.cpu.routing import route as choose_experts
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
from kernels.torch_backend.attention import AttentionPlan, PagedKVCache
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.linear import PackedHeads, PackedLinear
from kernels.torch_backend.moe import PackedExperts


class CpuPlan:
    """One step: what the native kernels take, and PyTorch's plan, made when one of its kernels asks.

    Attributes:
        arrays: for the native kernels.
    """

    def __init__(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> None:
        self.arrays = StepArrays(metadata)
        self._step = metadata, cache, num_heads
        self._for_torch: AttentionMetaData | None = None

    def for_torch(self, backend: TorchBackend) -> AttentionMetaData:
        """The step's metadata with PyTorch's plan."""
        if self._for_torch is None:
            self._for_torch = replace(self._step[0], plan=backend.plan_attention(*self._step))
        return self._for_torch


class CpuBackend:
    """KernelBackend on the native kernels, all of one instruction set, which is the process's.

    Args:
        instruction_set: a name, or `auto` (kernels/cpu/instruction_sets.py).

    Raises:
        LibraryUnavailableError: they can not serve on this machine.
    """

    name = "cpu"
    batch_invariant = True
    row_multiple = 1
    device = torch.device("cpu")
    graphs = None

    def __init__(self, instruction_set: str = instruction_sets.AUTO) -> None:
        self._library = library.load()
        self.instruction_set = instruction_sets.take(self._library, instruction_set)
        self._library.fissile_set_threads(torch.get_num_threads())
        self._torch = TorchBackend()
        self._delegates = False

    @property
    def description(self) -> str:
        """See KernelBackend."""
        return f"{self.name}:{self.instruction_set}"

    @property
    def numerics(self) -> tuple[object, ...]:
        """See KernelBackend. Threads and PyTorch count only where its kernels take part."""
        own = (self.name, self.instruction_set, sources_digest())
        return (*own, *self._torch.numerics) if self._delegates else own

    @property
    def layout(self) -> tuple[object, ...]:
        """See KernelBackend."""
        return (self.name, self.instruction_set, sources_digest())

    def join_ranks(self, ranks: object) -> None:
        """See KernelBackend: the caller adds up."""

    def adopt(self, packed: object) -> None:
        """See KernelBackend."""
        self._delegates |= isinstance(packed, PackedLinear | PackedHeads | PackedExperts)

    def is_fast(self, dtype: torch.dtype) -> bool:
        """See KernelBackend: native weights are widened in registers, so that narrow ones are faster."""
        return dtype in DTYPES or self._torch.is_fast(dtype)

    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        """See KernelBackend."""
        return PackedFormat(torch.int8) if name == "int8" and dtype in DTYPES else None

    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        """See KernelBackend: none."""
        return False

    def pack_linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PanelLinear | PackedLinear:
        """See KernelBackend."""
        if dtype in DTYPES:
            return linear.pack(self._library, as_floats(weight), bias, dtype, _packed_dtype(packed_format))
        self._delegates = True
        return self._torch.pack_linear(weight, bias, dtype, packed_format)

    def linear(self, x: torch.Tensor, packed: PanelLinear | PackedLinear) -> torch.Tensor:
        """See KernelBackend."""
        if isinstance(packed, PanelLinear):
            return linear.linear(self._library, x, packed)
        return self._torch.linear(x, packed)

    def packed_rows(self, packed: PanelLinear | PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        """See KernelBackend."""
        return linear.rows(packed, ids) if isinstance(packed, PanelLinear) else self._torch.packed_rows(packed, ids)

    def linear_argmax(self, x: torch.Tensor, packed: PanelLinear | PackedLinear, limit: int) -> torch.Tensor:
        """See KernelBackend; no more than some columns of the product are ever in memory."""
        if isinstance(packed, PanelLinear):
            return linear.argmax(self._library, x, packed, limit)
        return self._torch.linear_argmax(x, packed, limit)

    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PanelHeads | PackedHeads:
        """See KernelBackend."""
        if dtype in DTYPES:
            return linear.pack_heads(self._library, weight, dtype)
        self._delegates = True
        return self._torch.pack_heads(weight, dtype)

    def head_linear(self, x: torch.Tensor, packed: PanelHeads | PackedHeads) -> torch.Tensor:
        """See KernelBackend."""
        if isinstance(packed, PanelHeads):
            return linear.head_linear(self._library, x, packed)
        return self._torch.head_linear(x, packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return self._torch.rms_norm(x, weight, eps)
        return elementwise.norm(self._library, x, weight, eps)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        return elementwise.norm(self._library, x, weight, eps, residual=residual)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return self._torch.layer_norm(x, weight, bias, eps)
        return elementwise.norm(self._library, x, weight, eps, bias)[0]

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        if q.dtype not in DTYPES:
            return self._torch.rope(q, k, cos, sin)
        return elementwise.rope(self._library, q, cos, sin), elementwise.rope(self._library, k, cos, sin)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See KernelBackend; silu is rounded to the model dtype before the product."""
        return elementwise.silu_and_mul(self._library, x) if x.dtype in DTYPES else self._torch.silu_and_mul(x)

    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        return choose_experts(self._library, logits, routing, correction_bias)

    def pack_experts(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PanelExperts | PackedExperts:
        """See KernelBackend."""
        if dtype in DTYPES:
            return experts.pack(self._library, weights, first, clamp, dtype, _packed_dtype(packed_format))
        self._delegates = True
        return self._torch.pack_experts(weights, first, clamp, dtype, packed_format)

    def moe(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        packed: PanelExperts | PackedExperts,
    ) -> torch.Tensor:
        """See KernelBackend."""
        if isinstance(packed, PanelExperts):
            return experts.moe(self._library, x, topk_ids, topk_weights, packed)
        return self._torch.moe(x, topk_ids, topk_weights, packed)

    def allocate_kv(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> PagedKVCache:
        """See KernelBackend."""
        self._delegates |= dtype not in KV_DTYPES
        return self._torch.allocate_kv(spec, num_layers, num_blocks, block_size, dtype)

    def touch_kv(self, cache: PagedKVCache, progress: Callable[[int, int], None]) -> None:
        """See KernelBackend."""
        cache.touch(progress)

    def plan_attention(self, metadata: AttentionMetaData, cache: PagedKVCache, num_heads: int) -> CpuPlan:
        """See KernelBackend."""
        return CpuPlan(metadata, cache, num_heads)

    def write_kv(
        self, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        """See KernelBackend."""
        if _native(k, cache):
            attention.write_kv(self._library, cache, layer, k, v, metadata.plan.arrays)
        else:
            self._torch.write_kv(cache, layer, k, v, self._planned(metadata))

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
        if _native(q, cache):
            return attention.attention(self._library, q, cache, layer, metadata.plan.arrays, scale, window, sinks)
        return self._torch.attention(q, cache, layer, self._planned(metadata), scale, window, sinks)

    def write_latent(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend."""
        if _native(k, cache):
            attention.write_latent(self._library, cache, layer, k, metadata.plan.arrays)
        else:
            self._torch.write_latent(cache, layer, k, self._planned(metadata))

    def write_index(self, cache: PagedKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend."""
        if _native(k, cache):
            assert cache.index is not None
            attention.write_latent(self._library, cache.index, layer, k, metadata.plan.arrays)
        else:
            self._torch.write_index(cache, layer, k, self._planned(metadata))

    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: PagedKVCache, layer: int, metadata: AttentionMetaData
    ) -> SelectedTokens | AttentionPlan | None:
        """See KernelBackend."""
        if _native(q, cache):
            return attention.select_tokens(self._library, q, weights, cache, layer, metadata, metadata.plan.arrays)
        return self._torch.select_tokens(q, weights, cache, layer, self._planned(metadata))

    def latent_attention(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: SelectedTokens | AttentionPlan | None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        if _native(q, cache):
            assert selection is None or isinstance(selection, SelectedTokens)
            return attention.latent_attention(self._library, q, cache, layer, metadata.plan.arrays, scale, selection)
        assert not isinstance(selection, SelectedTokens)
        return self._torch.latent_attention(q, cache, layer, self._planned(metadata), scale, selection)

    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> NativeDecoder | None:
        """See KernelBackend."""
        if kv_dtype not in KV_DTYPES or not fused.is_native(decoder):
            return None
        return NativeDecoder(self._library, decoder)

    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        """See KernelBackend."""
        return self._torch.argmax(logits, limit)

    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        """See KernelBackend."""
        return self._torch.fetch(ids)

    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """See KernelBackend."""
        return torch.from_numpy(sampling.sample(self._library, logits.numpy(), params, seeds, positions, choices))

    def _planned(self, metadata: AttentionMetaData) -> AttentionMetaData:
        plan: CpuPlan = metadata.plan
        return plan.for_torch(self._torch)


def _native(x: torch.Tensor, cache: PagedKVCache) -> bool:
    return x.dtype in DTYPES and cache.data.dtype in KV_DTYPES


def _packed_dtype(packed_format: PackedFormat | None) -> torch.dtype | None:
    if packed_format is None:
        return None
    if packed_format.quantizes_rows:
        raise ValueError("native kernels do not quantize rows")
    return packed_format.dtype
