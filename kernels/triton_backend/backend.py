"""The GPU back end on our own Triton kernels, for ROCm and CUDA; in Triton's interpreter on a CPU, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from typing_extensions import override

from kernels.interface import Decoder, KernelBackend, PackedFormat, QuantizedFormat, Ranks
from kernels.triton_backend import packed_weight, target
from kernels.triton_backend.agreement import TileAgreement
from kernels.triton_backend.attention import TritonAttentionOps
from kernels.triton_backend.decoder import TritonDecoder
from kernels.triton_backend.elementwise import TritonElementwiseOps
from kernels.triton_backend.experts import TritonExpertOps
from kernels.triton_backend.graphs import TritonGraphs
from kernels.triton_backend.kv_cache import TritonKVCacheOps
from kernels.triton_backend.latent import TritonLatentAttentionOps
from kernels.triton_backend.linear import TritonLinearOps
from kernels.triton_backend.sampling import TritonSamplingOps
from kernels.triton_backend.target import Settings

# How names of formats begin whose rows are quantized too.
_W8A8 = "w8a8_"


class TritonBackend(KernelBackend):
    """Back end of our own Triton kernels on a GPU. Not for two threads at a time.

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
        device = torch.device("cpu") if interpreted else torch.device("cuda", torch.cuda.current_device())
        settings = Settings(target.current(), batch_invariant)
        if batch_invariant and not interpreted:
            settings = replace(settings, agreement=TileAgreement(settings, device))
        self.settings = settings
        self.description = f"{self.name}:{settings.target.name}"
        self.batch_invariant = batch_invariant
        self.device = device
        self.graphs = TritonGraphs(device)
        self.layout = (self.name, settings.target.name)
        self.linear = TritonLinearOps(settings, device)
        self.elementwise = TritonElementwiseOps()
        self.experts = TritonExpertOps(settings, device)
        self.kv_cache = TritonKVCacheOps(device)
        self.attention = TritonAttentionOps(settings, device)
        self.latent_attention = TritonLatentAttentionOps(settings)
        self.sampling = TritonSamplingOps(device)

    @property
    @override
    def numerics(self) -> tuple[object, ...]:
        versions = (triton.__version__, torch.version.hip or torch.version.cuda)
        return (self.name, self.settings.target.name, self.batch_invariant, *versions)

    @override
    def join_ranks(self, ranks: Ranks) -> None:
        """Leaves sums to the caller."""

    @override
    def adopt(self, packed: Any) -> None:
        """Does nothing: this back end keeps no data of packed objects."""

    @override
    def is_fast(self, dtype: torch.dtype) -> bool:
        # Matrix instructions take narrow numbers.
        return dtype in packed_weight.MODEL_DTYPES

    @override
    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        fp8 = self.settings.target.fp8 if self.settings.target.has_fp8 else None
        numbers = {"int8": torch.int8, "int4": torch.quint4x2, "fp8": fp8}.get(name.removeprefix(_W8A8))
        if numbers is None or dtype not in packed_weight.MODEL_DTYPES:
            return None
        return PackedFormat(numbers, quantizes_rows=name.startswith(_W8A8))

    @override
    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        return packed_weight.keeps(stored, dtype, self.settings.target)

    @override
    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> TritonDecoder:
        return TritonDecoder(decoder, self)
