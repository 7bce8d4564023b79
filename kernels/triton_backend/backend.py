"""The GPU back end on our own Triton kernels, for ROCm and CUDA; in Triton's interpreter on a CPU, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import triton

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
from kernels.triton_backend import (
    attention,
    elementwise,
    experts,
    kv_write,
    latent,
    linear,
    packed_weight,
    plan,
    sampling,
    target,
)
from kernels.triton_backend.decoder import TritonDecoder
from kernels.triton_backend.experts import PackedExperts
from kernels.triton_backend.graphs import TritonGraphs
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.packed_weight import PackedWeight
from kernels.triton_backend.plan import StepPlan
from kernels.triton_backend.routing import route as choose_experts
from kernels.triton_backend.selection import select_tokens as choose_tokens
from kernels.triton_backend.target import Settings

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How names of formats begin whose rows are quantized too.
_W8A8 = "w8a8_"


class TritonBackend:
    """KernelBackend on a GPU. Not for two threads at a time.

    Args:
        batch_invariant: whether tiles and splits are chosen without looking at how much work there is.

    Attributes:
        settings: what tiles are chosen by.

    Raises:
        RuntimeError: there is no GPU, and kernels are not interpreted.
    """

    name = "triton"
    row_multiple = 1

    def __init__(self, batch_invariant: bool = True) -> None:
        interpreted = target.interpreted()
        if not interpreted and not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU (TRITON_INTERPRET=1 interprets the kernels, very slowly)")
        self.device = torch.device("cpu") if interpreted else torch.device("cuda", torch.cuda.current_device())
        self.batch_invariant = batch_invariant
        self.graphs = TritonGraphs(self.device)
        self.settings = Settings(target.current(), batch_invariant)
        self._copies = None if interpreted else torch.cuda.Stream(self.device)

    @property
    def description(self) -> str:
        """See KernelBackend."""
        return f"{self.name}:{self.settings.target.name}"

    @property
    def numerics(self) -> tuple[object, ...]:
        """See KernelBackend."""
        versions = (triton.__version__, torch.version.hip or torch.version.cuda)
        return (self.name, self.settings.target.name, self.batch_invariant, *versions)

    @property
    def layout(self) -> tuple[object, ...]:
        """See KernelBackend."""
        return (self.name, self.settings.target.name)

    def join_ranks(self, ranks: object) -> None:
        """See KernelBackend: the caller adds up."""

    def adopt(self, packed: object) -> None:
        """See KernelBackend."""

    def is_fast(self, dtype: torch.dtype) -> bool:
        """See KernelBackend: matrix instructions take narrow numbers."""
        return dtype in _DTYPES

    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        """See KernelBackend."""
        fp8 = self.settings.target.fp8 if self.settings.target.has_fp8 else None
        numbers = {"int8": torch.int8, "fp8": fp8}.get(name.removeprefix(_W8A8))
        if numbers is None or dtype not in _DTYPES:
            return None
        return PackedFormat(numbers, quantizes_rows=name.startswith(_W8A8))

    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        """See KernelBackend: all but FP8 that the target has not, or has not all numbers of."""
        return dtype in _DTYPES and packed_weight.keeps(stored, self.settings.target)

    def pack_linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedWeight:
        """See KernelBackend."""
        kept = self._kept(weight, dtype, packed_format)
        if isinstance(kept, QuantizedWeight):
            return packed_weight.from_quantized(kept, bias, dtype, self.settings.target.fp8, self.device)
        if packed_format is None:
            return packed_weight.pack(kept, bias, dtype, None, self.device)
        pack = packed_weight.pack_w8a8 if packed_format.quantizes_rows else packed_weight.pack
        return pack(kept, bias, dtype, packed_format.dtype, self.device)

    def _kept(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, packed_format: PackedFormat | None
    ) -> torch.Tensor | QuantizedWeight:
        """A weight as it is packed: stored numbers only where they stay, floats elsewhere."""
        if isinstance(weight, QuantizedWeight) and packed_format is None and self.keeps_quantized(weight.format, dtype):
            return weight
        return as_floats(weight)

    def linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """See KernelBackend."""
        return linear.linear(x, packed, self.settings)

    def packed_rows(self, packed: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        """See KernelBackend."""
        return linear.rows(packed, ids)

    def linear_argmax(self, x: torch.Tensor, packed: PackedWeight, limit: int) -> torch.Tensor:
        """See KernelBackend; no more than some columns of the product are ever in memory."""
        return linear.argmax(x, packed, limit, self.settings)

    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedWeight:
        """See KernelBackend."""
        return packed_weight.pack_heads(weight, dtype, self.device)

    def head_linear(self, x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """See KernelBackend."""
        return linear.head_linear(x, packed, self.settings)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        return elementwise.layer_norm(x, weight, bias, eps)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        return elementwise.rope(q, k, cos, sin)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See KernelBackend; silu is rounded to the model dtype before the product."""
        return elementwise.silu_and_mul(x)

    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend."""
        return choose_experts(logits, routing, correction_bias)

    def pack_experts(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedExperts:
        """See KernelBackend."""
        kept = (
            replace(
                each,
                gate_up=self._kept(each.gate_up, dtype, packed_format),
                down=self._kept(each.down, dtype, packed_format),
            )
            for each in weights
        )
        return experts.pack(kept, first, clamp, dtype, packed_format, self.device, self.settings.target.fp8)

    def moe(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PackedExperts
    ) -> torch.Tensor:
        """See KernelBackend."""
        return experts.moe(x, topk_ids, topk_weights, packed, self.settings)

    def allocate_kv(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> DeviceKVCache:
        """See KernelBackend."""
        return DeviceKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype, self.device)

    def touch_kv(self, cache: DeviceKVCache, progress: Callable[[int, int], None]) -> None:
        """See KernelBackend: the device has given them."""

    def plan_attention(self, metadata: AttentionMetaData, cache: DeviceKVCache, num_heads: int) -> StepPlan:
        """See KernelBackend."""
        return plan.plan(metadata, self.device)

    def write_kv(
        self, cache: DeviceKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        """See KernelBackend."""
        kv_write.write_kv(cache, layer, k, v, metadata.plan)

    def attention(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        return attention.attention(q, cache, layer, metadata.plan, scale, self.settings, window, sinks)

    def write_latent(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend."""
        kv_write.write_rows(cache, layer, k, metadata.plan)

    def write_index(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend."""
        assert cache.index is not None
        kv_write.write_rows(cache.index, layer, k, metadata.plan)

    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: DeviceKVCache, layer: int, metadata: AttentionMetaData
    ) -> torch.Tensor | None:
        """See KernelBackend."""
        return choose_tokens(q, weights, cache, layer, metadata.plan)

    def latent_attention(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: torch.Tensor | None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        return latent.latent_attention(q, cache, layer, metadata.plan, scale, selection, self.settings)

    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> TritonDecoder:
        """See KernelBackend."""
        return TritonDecoder(decoder, self)

    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        """See KernelBackend."""
        return sampling.greedy(logits, limit)

    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        """See KernelBackend: on a stream of its own, so that later steps do not delay it."""
        if self._copies is None:
            return ids.tolist
        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        # The thread that waits sleeps instead of turning on a core, which other threads and ranks need
        # (cudaEventBlockingSync; hipEventBlockingSync is documented alike).
        arrived = torch.cuda.Event(blocking=True)
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            host.copy_(ids, non_blocking=True)
            arrived.record(self._copies)
        ids.record_stream(self._copies)

        def wait() -> list[int]:
            arrived.synchronize()
            return host.tolist()

        return wait

    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """See KernelBackend."""
        if params.penalties is not None:
            sampling.penalize(logits, params.penalties)
        return sampling.sample(logits, sampling.prepare(params, seeds, positions, choices, self.device))
