"""AMD's own kernels: AITER for the operations that it has and computes right, the Triton back end for all others.

Only modules of this package call AITER, always through `AiterLibrary.call` with a literal name: tests/kernels reads the
calls from their sources and binds each against every supported version. Only leading arguments, which no version has
moved, are passed by position; all others by name.

The back end of an operation is decided once for each kind of numbers of a model (dtype, sizes, architecture, AITER's
version), never by a step, and logged with the reason. With `Settings.batch_invariant` AITER only computes operations
without sums: its products, attention and norms choose kernels and splits by the number of rows.

We have never run AITER's computations on a GPU (docs/reference/rocm.md lists what was verified, and how).
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from typing_extensions import override

from kernels.aiter.attention import AiterAttentionOps, AiterLatentAttentionOps
from kernels.aiter.blocks import AiterBlockLinear, AiterBlocks
from kernels.aiter.decoder import AiterDecoder
from kernels.aiter.dispatch import AITER, NARROW, Choices
from kernels.aiter.elementwise import AiterElementwiseOps
from kernels.aiter.experts import AiterExpertOps, AiterExperts
from kernels.aiter.group import AiterGroup
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from kernels.aiter.linear import AiterLinear, AiterLinearOps, AiterScaledLinear
from kernels.interface import Decoder, KernelBackend, PackedFormat, QuantizedFormat, Ranks
from kernels.triton_backend.target import Settings

ARCHITECTURES: Final = ("gfx942", "gfx950")
# Numbers of ranks that AITER itself reduces between (CustomAllreduce._SUPPORTED_WORLD_SIZES).
_REDUCED_RANKS: Final = (2, 4, 6, 8)

# Environment variables: AITER's sums over ranks are RCCL's beyond a size, or of parts that are quantized.
SUM_VARIABLES: Final = ("AITER_CUSTOM_AR_MAX_SIZE", "AITER_QUICK_REDUCE_QUANTIZATION")


class AiterBackend(KernelBackend):
    """Back end of AITER's kernels, with another back end for the operations that AITER lacks.

    Args:
        fallback: does the rest. Its KV cache is a DeviceKVCache and its plan a StepPlan, as the Triton back end's are.
        library: AITER.
        settings: the architecture, and whether rows must not depend on the batch.
        expert_parallel: whether rows choose experts that other ranks hold.

    Attributes:
        fallback: as above.
        fp8: the dtype of E4M3 numbers of this architecture, which weights and the KV cache may have.

    Raises:
        AiterUnavailableError: it has no kernels for this architecture.
    """

    name = AITER
    row_multiple = 1

    def __init__(
        self,
        fallback: KernelBackend,
        library: AiterLibrary,
        settings: Settings,
        expert_parallel: bool = True,
    ) -> None:
        target = settings.target
        if target.name not in ARCHITECTURES:
            allowed = " and ".join(ARCHITECTURES)
            raise AiterUnavailableError(f"AITER's kernels are for {allowed}; this is {target.name}: --kernels triton")
        self.fallback = fallback
        self.fp8 = target.fp8
        self.description = f"{AITER}:{target.name}"
        self.batch_invariant = settings.batch_invariant and fallback.batch_invariant
        self.device = fallback.device
        # AITER's calls take the other back end's plan.
        self.graphs = fallback.graphs
        self._own = (AITER, library.version, target.name, settings.batch_invariant)
        # The settings decide which weights are shuffled.
        self.layout = (*self._own, expert_parallel, *fallback.layout)
        self._aiter = library
        self._choices = Choices(library, settings.batch_invariant, fallback.name)
        # True if it adds up over ranks.
        self._reduces = False
        self._assemble(expert_parallel)

    def _assemble(self, expert_parallel: bool) -> None:
        library, choices, fp8, other = self._aiter, self._choices, self.fp8, self.fallback
        blocks = AiterBlocks(library, choices, fp8, other.device)
        self.linear = AiterLinearOps(library, choices, blocks, fp8, other)
        self.elementwise = AiterElementwiseOps(library, choices, other.elementwise)
        self.experts = AiterExpertOps(library, choices, blocks, fp8, expert_parallel, other)
        self.kv_cache = other.kv_cache
        self.attention = AiterAttentionOps(library, choices, fp8, other)
        self.latent_attention = AiterLatentAttentionOps(library, choices, fp8, other)
        # Never AITER's, whose samplers take no seeds.
        self.sampling = other.sampling

    @property
    @override
    def numerics(self) -> tuple[object, ...]:
        sums = tuple(os.environ.get(name) for name in SUM_VARIABLES) if self._reduces else ()
        return (*self._own, torch.__version__, self._reduces, *sums, *self.fallback.numerics)

    @override
    def join_ranks(self, ranks: Ranks) -> AiterGroup | None:
        self._reduces = self._choices.takes("all_reduce", _refuse_ranks, ranks.size, ranks.in_order)
        return AiterGroup(self._aiter, ranks, self.device) if self._reduces else None

    @override
    def adopt(self, packed: Any) -> None:
        if not isinstance(packed, AiterLinear | AiterScaledLinear | AiterBlockLinear | AiterExperts):
            self.fallback.adopt(packed)

    @override
    def is_fast(self, dtype: torch.dtype) -> bool:
        return dtype in NARROW or self.fallback.is_fast(dtype)

    @override
    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        # Rows and weights in FP8 are AITER's; all else is the other's.
        if name == "w8a8_fp8" and dtype in NARROW:
            return PackedFormat(self.fp8, quantizes_rows=True)
        return self.fallback.packed_format(name, dtype)

    @override
    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        return self.fallback.keeps_quantized(stored, dtype)

    @override
    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> AiterDecoder:
        return AiterDecoder(decoder, self, self._aiter, self._choices)


def _refuse_ranks(size: int, in_order: bool) -> str | None:
    if size not in _REDUCED_RANKS:
        return f"AITER adds up over 2, 4, 6 or 8 ranks, not {size}"
    return None if in_order else "AITER adds up over ranks of one machine, each on the GPU of its number"
