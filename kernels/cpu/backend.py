"""The CPU back end: native kernels, batch-invariant by construction, with any number of threads.

Float32 and bfloat16 are native, with a KV cache in these, float16 or FP8 (E4M3). Models in float16 run on PyTorch's
kernels (kernels/torch_backend/backend.py), all but the choice of experts and sampling. Which of the two is decided by
dtype alone, at load, so it never changes between two steps of a model (docs/explanation/determinism.md).
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from kernels.cpu import drafts, fused, instruction_sets, library
from kernels.cpu.attention import CpuAttentionOps, CpuKVCacheOps, CpuLatentAttentionOps
from kernels.cpu.build import sources_digest
from kernels.cpu.drafts import NativeDrafts
from kernels.cpu.elementwise import CpuElementwiseOps
from kernels.cpu.experts import CpuExpertOps
from kernels.cpu.fallback import Fallback
from kernels.cpu.fused import NativeDecoder
from kernels.cpu.library import DTYPES, KV_DTYPES
from kernels.cpu.linear import FORMATS, CpuLinearOps
from kernels.cpu.sampling import CpuSamplingOps
from kernels.interface import GROUPED, Decoder, DraftHead, KernelBackend, PackedFormat, QuantizedFormat, Ranks


class CpuBackend(KernelBackend):
    """The native kernels, all of one instruction set, which is the process's.

    Args:
        instruction_set: a name, or `auto` (kernels/cpu/instruction_sets.py).

    Attributes:
        instruction_set: its name.

    Raises:
        LibraryUnavailableError: they cannot serve on this machine, or another set serves in this process.
    """

    name = "cpu"
    batch_invariant = True
    row_multiple = 1
    device = torch.device("cpu")
    graphs = None
    instruction_set: str

    def __init__(self, instruction_set: str = instruction_sets.AUTO) -> None:
        native = library.load()
        self._library = native
        instruction_sets.hold(self, native, instruction_set)
        native.fissile_set_threads(torch.get_num_threads())
        self.description = f"{self.name}:{self.instruction_set}"
        self.layout = (self.name, self.instruction_set, sources_digest())
        self._fallback = Fallback()
        other = self._fallback.backend
        self.linear = CpuLinearOps(native, self._fallback)
        self.elementwise = CpuElementwiseOps(native, other.elementwise)
        self.experts = CpuExpertOps(native, self._fallback)
        self.kv_cache = CpuKVCacheOps(self._fallback)
        self.attention = CpuAttentionOps(native, other)
        self.latent_attention = CpuLatentAttentionOps(native, other)
        self.sampling = CpuSamplingOps(native)

    @property
    @override
    def numerics(self) -> tuple[object, ...]:
        # Threads and PyTorch change bits only if PyTorch's kernels compute something.
        own = (self.name, self.instruction_set, sources_digest())
        return (*own, *self._fallback.backend.numerics) if self._fallback.used else own

    @override
    def join_ranks(self, ranks: Ranks) -> None:
        """Leaves sums to the caller."""

    @override
    def adopt(self, packed: Any) -> None:
        self._fallback.adopt(packed)

    @override
    def is_fast(self, dtype: torch.dtype) -> bool:
        # Native weights are widened in registers, so that narrow ones are faster.
        return dtype in DTYPES or self._fallback.backend.is_fast(dtype)

    @override
    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        return PackedFormat(FORMATS[name]) if name in FORMATS and dtype in DTYPES else None

    @override
    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        return stored == GROUPED and dtype in DTYPES

    @override
    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> NativeDecoder | None:
        if kv_dtype not in KV_DTYPES or not fused.is_native(decoder):
            return None
        return NativeDecoder(self._library, decoder)

    @override
    def fuse_drafts(self, head: DraftHead, kv_dtype: torch.dtype) -> NativeDrafts | None:
        if kv_dtype not in KV_DTYPES or not drafts.is_native(head):
            return None
        return NativeDrafts(self._library, head)
