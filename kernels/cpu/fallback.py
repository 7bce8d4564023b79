"""PyTorch's kernels behind the native ones: which serve follows from dtypes alone, so never from a step."""

from __future__ import annotations

from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.linear import PackedHeads, PackedLinear
from kernels.torch_backend.moe import PackedExperts


class Fallback:
    """PyTorch's back end behind the native one.

    Attributes:
        backend: does what is left to it.
        used: whether it takes part in the numbers of a model, whose class then depends on it.
    """

    def __init__(self) -> None:
        self.backend = TorchBackend()
        self.used = False

    def adopt(self, packed: object) -> None:
        """Remembers whose kernels multiply by a packed object of another process."""
        self.used |= isinstance(packed, PackedLinear | PackedHeads | PackedExperts)
