"""Chooses the kernel back end, once, at load (docs/explanation/determinism.md)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import structlog
import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.instruction_sets import AUTO, CHOICES, in_use
from kernels.cpu.library import PLAIN, LibraryUnavailableError
from kernels.interface import KernelBackend
from kernels.torch_backend.backend import TorchBackend

if TYPE_CHECKING:
    from kernels.triton_backend.backend import TritonBackend

TORCH, CPU, TRITON, AITER = "torch", "cpu", "triton", "aiter"
CPU_BACKENDS = (TORCH, CPU)
BACKENDS = (*CPU_BACKENDS, TRITON, AITER)
_INSTALL_TRITON = "In a checkout of Fissile: pip install ./protos '.[worker,triton]'"
_log = structlog.get_logger(__name__)


def select_backend(
    name: str = AUTO, cpu_isa: str = AUTO, batch_invariant: bool = True, expert_parallel: bool = True
) -> KernelBackend:
    """The back end called `name`; `auto` is a GPU's if there is one, otherwise the native kernels if they are fast
    here, otherwise PyTorch's.

    Args:
        name: `auto`, or one of BACKENDS.
        cpu_isa: the native kernels' instruction set, or `auto`; with a name, `auto` chooses the native kernels.
        batch_invariant: see Config; on a CPU a row's bits never depend on the batch.
        expert_parallel: True if rows choose experts that other ranks hold, which AITER must know.

    Raises:
        ValueError: the back end or instruction set is unknown, or cannot serve here; names the choices, or the reason.
    """
    if name not in (AUTO, *BACKENDS):
        raise ValueError(f"kernels {name!r} is not known; choose one of: {', '.join([AUTO, *BACKENDS])}")
    if cpu_isa not in CHOICES:
        raise ValueError(f"cpu_isa {cpu_isa!r} is not known; choose one of: {', '.join(CHOICES)}")
    if name not in (AUTO, CPU) and cpu_isa != AUTO:
        raise ValueError(f"cpu_isa {cpu_isa!r}: of native kernels only; take kernels 'cpu', or 'auto'")
    if name == TORCH:
        return TorchBackend()
    if name in (TRITON, AITER):
        return _gpu_backend(name, batch_invariant, expert_parallel)
    if name == AUTO and cpu_isa == AUTO:
        return _gpu_backend(AUTO, batch_invariant, expert_parallel) if _sees_gpu() else _best_backend()
    try:
        return CpuBackend(cpu_isa)
    except LibraryUnavailableError as error:
        raise ValueError(f"kernels {CPU!r}: {error}") from error


def _sees_gpu() -> bool:
    """True if GPU kernels can be used; logs a line for a GPU without Triton."""
    if not torch.cuda.is_available():
        return False
    has_triton = importlib.util.find_spec("triton") is not None
    if not has_triton:
        _log.warning("the GPU is not used", reason=f"Triton is not installed. {_INSTALL_TRITON}")
    return has_triton


def _gpu_backend(name: str, batch_invariant: bool, expert_parallel: bool) -> KernelBackend:
    """Triton's kernels, or AITER's above them: chosen by `name`, or for `auto` by what is installed.

    Raises:
        ValueError: they cannot serve here; gives the reason.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"kernels {name!r}: Triton is not installed. {_INSTALL_TRITON}")
    # Triton finds out at its import whether kernels are interpreted, and takes half a second.
    from kernels.aiter.library import AiterUnavailableError  # noqa: PLC0415
    from kernels.triton_backend.backend import TritonBackend  # noqa: PLC0415

    try:
        own = TritonBackend(batch_invariant)
        return own if name == TRITON else _above(own, expert_parallel)
    except RuntimeError as error:
        raise ValueError(f"kernels {name!r}: {error}") from error
    except AiterUnavailableError as error:
        if name == AITER:
            raise ValueError(f"kernels {AITER!r}: {error}") from error
        _log.info("Triton's kernels serve", reason=str(error))
        return own


def _above(own: TritonBackend, expert_parallel: bool) -> KernelBackend:
    """AITER's kernels above Triton's, which do what AITER lacks; see AiterBackend."""
    from kernels.aiter.backend import AiterBackend  # noqa: PLC0415
    from kernels.aiter.dispatch import SINCE  # noqa: PLC0415
    from kernels.aiter.library import AiterLibrary  # noqa: PLC0415

    return AiterBackend(own, AiterLibrary.load(SINCE), own.settings, expert_parallel)


def _best_backend() -> KernelBackend:
    beside = in_use()
    try:
        native = CpuBackend()
    except LibraryUnavailableError as error:
        _log.warning("PyTorch's kernels serve, which take several times as long as native ones", reason=str(error))
        return TorchBackend()
    if native.instruction_set != PLAIN:
        return native
    is_held = beside == PLAIN
    reason = "another engine of this process computes by plain ones" if is_held else "this processor has no AVX2"
    # On a processor that has more than these, they take several times as long.
    _log.warning("PyTorch's kernels serve", reason=reason)
    return TorchBackend()
