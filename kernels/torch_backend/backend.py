"""The reference back end: plain PyTorch, batch-invariant on a CPU.

Where PyTorch's bits could depend on the batch, and what is done (measured with MKL 2024.2; tests/unit/kernels):
- Matrix products: kernels/torch_backend/linear.py. Experts: kernels/torch_backend/moe.py.
- Batched products in attention: a fixed number of items per call, 8 n rows per item (6 rows differ by batch size).
- Elementwise functions with an exp in them: kernels/torch_backend/elementwise.py. Sums along a contiguous row, softmax,
  rsqrt and arithmetic are row by row already.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from kernels.interface import Decoder, KernelBackend, QuantizedFormat, Ranks
from kernels.torch_backend.attention_ops import TorchAttentionOps, TorchKVCacheOps, TorchLatentAttentionOps
from kernels.torch_backend.elementwise import TorchElementwiseOps
from kernels.torch_backend.linear import ROW_TILE, TorchLinearOps
from kernels.torch_backend.moe import TorchExpertOps
from kernels.torch_backend.sampling import TorchSamplingOps

# Names of `torch.cpu.get_capabilities` for what multiplies a dtype.
_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16"),
}


class TorchBackend(KernelBackend):
    """PyTorch's CPU operations."""

    name = "torch"
    description = "torch"
    batch_invariant = True
    device = torch.device("cpu")
    graphs = None
    row_multiple = ROW_TILE
    layout = ("torch",)

    def __init__(self) -> None:
        self.linear = TorchLinearOps()
        self.elementwise = TorchElementwiseOps()
        self.experts = TorchExpertOps()
        self.kv_cache = TorchKVCacheOps()
        self.attention = TorchAttentionOps()
        self.latent_attention = TorchLatentAttentionOps()
        self.sampling = TorchSamplingOps()

    @property
    @override
    def numerics(self) -> tuple[object, ...]:
        capability = torch.backends.cpu.get_cpu_capability()
        return (self.name, torch.__version__, capability, torch.get_num_threads())

    @override
    def join_ranks(self, ranks: Ranks) -> None:
        """Leaves sums to the caller."""

    @override
    def adopt(self, packed: Any) -> None:
        """Does nothing: this back end keeps no data of packed objects."""

    @override
    def is_fast(self, dtype: torch.dtype) -> bool:
        # PyTorch's bfloat16 is ten times slower than float32 without instructions for it.
        capabilities = torch.cpu.get_capabilities()
        return dtype == torch.float32 or any(capabilities.get(name, False) for name in _INSTRUCTIONS[dtype])

    @override
    def packed_format(self, name: str, dtype: torch.dtype) -> None:
        return None

    @override
    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        return False

    @override
    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> None:
        return None
