"""The AITER back end on a fallback that records its calls, and a stand-in for AITER's library."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from kernels.aiter.backend import AiterBackend
from kernels.interface import (
    AttentionMetaData,
    KVSpec,
    PackedFormat,
)
from kernels.torch_backend.attention_ops import TorchAttentionOps, TorchKVCacheOps, TorchLatentAttentionOps
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.linear import TorchLinearOps
from kernels.torch_backend.moe import TorchExpertOps
from kernels.triton_backend import plan as step_plan
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import StepPlan
from kernels.triton_backend.target import TARGETS, Settings

REFERENCE = TorchBackend()
CPU = torch.device("cpu")
TUNED = Settings(TARGETS["gfx942"], batch_invariant=False)
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
NARROW = [torch.bfloat16, torch.float16]
TAGS = ["0.1.13", "0.1.20.post1"]
# Groups of operations -> those that a Fallback remembers to have been asked for.
REMEMBERED = {
    "linear": ("pack", "apply"),
    "elementwise": ("rms_norm", "add_rms_norm", "layer_norm", "rope", "silu_and_mul"),
    "experts": ("route", "pack", "apply"),
    "attention": ("apply",),
    "latent_attention": ("write", "apply"),
    "sampling": ("argmax", "sample"),
}


class DeviceCaches(TorchKVCacheOps):
    """Allocates caches of the Triton back end."""

    def allocate(self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype) -> Any:
        return DeviceKVCache.allocate(spec, num_layers, num_blocks, block_size, dtype, CPU)


class PlannedAttention(TorchAttentionOps):
    """Plans as the Triton back end does, and attends to nothing."""

    def plan(self, metadata: AttentionMetaData, cache: Any, num_heads: int) -> Any:
        return step_plan.plan(metadata, CPU, cache.block_size)

    def write(self, cache: Any, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData) -> None:
        slots = metadata.plan.slot_mapping.long()
        for rows, stored in ((k, cache.keys(layer)), (v, cache.values(layer))):
            stored.flatten(0, 1)[slots[slots >= 0]] = rows[slots >= 0].to(cache.data.dtype)

    def apply(self, q: torch.Tensor, *given: Any) -> torch.Tensor:
        return q.new_zeros(q.shape)


class PlannedLatentAttention(TorchLatentAttentionOps):
    """Attends to nothing, over the Triton back end's plan."""

    def write(self, cache: Any, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        slots: StepPlan = metadata.plan
        cache.keys(layer).flatten(0, 1)[slots.slot_mapping.long(), 0] = k.to(cache.data.dtype)

    def apply(self, q: torch.Tensor, cache: Any, *given: Any) -> torch.Tensor:
        return q.new_zeros(*q.shape[:2], cache.value_dim)


class Watched:
    """A group of operations that tells which of them were asked for."""

    def __init__(self, group: str, operations: Any, asked: list[str]) -> None:
        self._group, self._operations, self._asked = group, operations, asked

    def __getattr__(self, name: str) -> Any:
        if name in REMEMBERED[self._group]:
            self._asked.append(f"{self._group}.{name}")
        return getattr(self._operations, name)


class Fallback(TorchBackend):
    """PyTorch's operations with the cache and the plan of the Triton back end; remembers what it was asked for."""

    name = "fallback"
    attention_ops: type[TorchAttentionOps] = PlannedAttention

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.kv_cache = DeviceCaches()
        self.attention = self.attention_ops()
        self.latent_attention = PlannedLatentAttention()
        for group in REMEMBERED:
            setattr(self, group, Watched(group, getattr(self, group), self.asked))


class Remembering(Fallback):
    """Packs nothing; remembers the formats that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[PackedFormat | None] = []
        formats = self.formats

        class Linear(TorchLinearOps):
            def pack(self, *given: Any) -> Any:
                formats.append(given[3])

        class Experts(TorchExpertOps):
            def pack(self, *given: Any) -> Any:
                formats.append(given[4])

        self.linear = cast(TorchLinearOps, Watched("linear", Linear(), self.asked))
        self.experts = cast(TorchExpertOps, Watched("experts", Experts(), self.asked))


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def fallback_of(backend: AiterBackend) -> list[str]:
    """What the other back end was asked for."""
    fallback = backend.fallback
    assert isinstance(fallback, Fallback)
    return fallback.asked


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
