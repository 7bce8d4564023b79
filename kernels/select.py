"""Chooses the kernel back end, once, at load (design-details section 3: never per call)."""

from __future__ import annotations

import structlog

from kernels.cpu.backend import CpuBackend
from kernels.cpu.instruction_sets import AUTO, CHOICES
from kernels.cpu.library import PLAIN, LibraryUnavailableError
from kernels.interface import KernelBackend
from kernels.torch_backend import TorchBackend

TORCH, CPU = "torch", "cpu"
BACKENDS = (TORCH, CPU)
_log = structlog.get_logger(__name__)


def select_backend(name: str = AUTO, cpu_isa: str = AUTO) -> KernelBackend:
    """The back end called `name`; `auto` takes the native kernels where they are fast, else PyTorch's.

    Args:
        name: `auto`, `cpu` or `torch`.
        cpu_isa: the native kernels' instruction set, or `auto`; a name makes `auto` take the native kernels.

    Raises:
        ValueError: there is no such back end or instruction set, or it can not serve here; names the choices, or the
            reason.
    """
    if name not in (AUTO, *BACKENDS):
        raise ValueError(f"kernels {name!r} is not known; choose one of: {', '.join([AUTO, *BACKENDS])}")
    if cpu_isa not in CHOICES:
        raise ValueError(f"cpu_isa {cpu_isa!r} is not known; choose one of: {', '.join(CHOICES)}")
    if name == TORCH and cpu_isa != AUTO:
        raise ValueError(f"cpu_isa {cpu_isa!r}: PyTorch's kernels choose for themselves; take kernels 'cpu', or 'auto'")
    if name == TORCH:
        return TorchBackend()
    if name == AUTO and cpu_isa == AUTO:
        return _best_backend()
    try:
        return CpuBackend(cpu_isa)
    except LibraryUnavailableError as error:
        raise ValueError(f"kernels {CPU!r}: {error}") from error


def _best_backend() -> KernelBackend:
    try:
        native = CpuBackend()
    except LibraryUnavailableError as error:
        reason = str(error)
    else:
        if native.instruction_set != PLAIN:
            return native
        reason = "this processor has no AVX2"
    _log.info("PyTorch's kernels serve", reason=reason)
    return TorchBackend()
