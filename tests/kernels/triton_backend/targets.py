"""Back ends for other targets than the interpreter."""

from __future__ import annotations

from unittest.mock import patch

from kernels.triton_backend import target
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.target import CompileTarget


def backend_for(gpu: CompileTarget, batch_invariant: bool = True) -> TritonBackend:
    """A back end that takes `gpu` to be what its kernels run on."""
    with patch.object(target, "current", lambda: gpu):
        return TritonBackend(batch_invariant)
