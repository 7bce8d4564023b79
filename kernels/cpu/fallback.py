"""PyTorch's kernels as fallback of the native ones. Dtypes alone decide which are used, never a step."""

from __future__ import annotations

from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.linear import PackedHeads, PackedLinear
from kernels.torch_backend.moe import TorchPackedExperts


class Fallback:
    """PyTorch's back end, for operations that the native one lacks.

    Attributes:
        backend: PyTorch's.
        used: True if it computes a part of a model, whose numerics class then depends on it.
    """

    def __init__(self) -> None:
        self.backend = TorchBackend()
        self.used = False

    def adopt(self, packed: object) -> None:
        """Remembers whose kernels multiply by a packed object of another process."""
        self.used |= isinstance(packed, PackedLinear | PackedHeads | TorchPackedExperts)
