"""Chooses the kernel back end, once, at load (design-details section 3: never per call)."""

from __future__ import annotations

from collections.abc import Callable

from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import LibraryUnavailableError
from kernels.interface import KernelBackend
from kernels.torch_backend import TorchBackend

BACKENDS: dict[str, Callable[[], KernelBackend]] = {"torch": TorchBackend, "cpu": CpuBackend}
AUTO = "auto"


def select_backend(name: str = AUTO) -> KernelBackend:
    """The back end called `name`; `auto` takes the first that is available.

    Raises:
        ValueError: there is no such back end, or it can not serve here; names the choices, or the reason.
    """
    if name == AUTO:
        return BACKENDS["torch"]()
    if name not in BACKENDS:
        raise ValueError(f"kernels {name!r} is not known; choose one of: {', '.join([AUTO, *BACKENDS])}")
    try:
        return BACKENDS[name]()
    except LibraryUnavailableError as error:
        raise ValueError(f"kernels {name!r}: {error}") from error
