"""Chooses the kernel back end, once, at load (design-details section 3: never per call)."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import PLAIN, LibraryUnavailableError
from kernels.interface import KernelBackend
from kernels.torch_backend import TorchBackend

BACKENDS: dict[str, Callable[[], KernelBackend]] = {"torch": TorchBackend, "cpu": CpuBackend}
AUTO = "auto"
_log = structlog.get_logger(__name__)


def select_backend(name: str = AUTO) -> KernelBackend:
    """The back end called `name`; `auto` takes the native kernels where they are fast, else PyTorch's.

    Raises:
        ValueError: there is no such back end, or it can not serve here; names the choices, or the reason.
    """
    if name == AUTO:
        return _best_backend()
    if name not in BACKENDS:
        raise ValueError(f"kernels {name!r} is not known; choose one of: {', '.join([AUTO, *BACKENDS])}")
    try:
        return BACKENDS[name]()
    except LibraryUnavailableError as error:
        raise ValueError(f"kernels {name!r}: {error}") from error


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
