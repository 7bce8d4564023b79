"""Target of the kernels: what they are compiled for, and how they are tuned."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

INTERPRETER = "interpreter"
# The first of NVIDIA's architectures whose FP8 (E4M3) Triton compiles: Ada.
_FIRST_FP8 = 89


@dataclass(frozen=True)
class Target:
    """An architecture, or the interpreter.

    Attributes:
        name: `gfx942`, `gfx950`, `sm_90`, ...; or `interpreter`.
        is_amd: whether it is one of AMD's.
        shared_bytes: of memory that a program may use on the chip.
        fp8: the dtype of E4M3 numbers that its matrix instructions take; gfx942's have other exponents.
        has_fp8: whether it converts them at all.
    """

    name: str
    is_amd: bool
    shared_bytes: int
    fp8: torch.dtype = torch.float8_e4m3fn
    has_fp8: bool = True


TARGETS = {
    target.name: target
    for target in (
        Target("gfx942", True, 65_536, torch.float8_e4m3fnuz),
        Target("gfx950", True, 163_840),
        Target("sm_90", False, 232_448),
        Target(INTERPRETER, False, 1 << 31),
    )
}


@dataclass(frozen=True)
class Settings:
    """Settings by which launchers choose tiles.

    Attributes:
        target: what is compiled for.
        batch_invariant: whether tiles and splits are chosen without looking at how many rows or sequences there are, so
            that a row's bits do not depend on the others (docs/determinism.md).
    """

    target: Target
    batch_invariant: bool = True


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on tensors of the CPU."""
    return bool(knobs.runtime.interpret)


@functools.cache
def current() -> Target:
    """The target of this process; an architecture that we have no figures of is taken for the smallest of its maker.

    Raises:
        RuntimeError: there is no GPU, and kernels are not interpreted.
    """
    if interpreted():
        return TARGETS[INTERPRETER]
    return of(driver.active.get_current_target())


def of(gpu: GPUTarget) -> Target:
    """The target that Triton names so, as `current` says; an unknown one has the name of its own architecture."""
    if gpu.backend == "hip":
        name = str(gpu.arch)
        least = replace(TARGETS["gfx942"], name=name, has_fp8=False)
    else:
        name = f"sm_{gpu.arch}"
        least = Target(name, False, 101_376, has_fp8=int(gpu.arch) >= _FIRST_FP8)
    return TARGETS.get(name, least)
