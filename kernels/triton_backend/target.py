"""Target that the kernels are compiled for, and their tuning settings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

INTERPRETER = "interpreter"
# The first of NVIDIA's architectures whose FP8 (E4M3) Triton compiles: Ada.
_FIRST_FP8 = 89


@dataclass(frozen=True)
class CompileTarget:
    """GPU architecture that kernels are compiled for, or the interpreter.

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
        CompileTarget("gfx942", True, 65_536, torch.float8_e4m3fnuz),
        CompileTarget("gfx950", True, 163_840),
        CompileTarget("sm_90", False, 232_448),
        CompileTarget(INTERPRETER, False, 1 << 31),
    )
}


class Agreement(Protocol):
    """Says whether tiles of different shapes give a row the same bits: see agreement.py."""

    def of_products(self, dtype: torch.dtype) -> bool:
        """True if the tiles of products agree."""
        ...

    def of_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        """True if the tiles of attention agree."""
        ...


@dataclass(frozen=True)
class Settings:
    """Settings by which launchers choose tiles.

    Attributes:
        target: of the compiler.
        batch_invariant: True if a row's bits must not depend on the other rows (docs/explanation/determinism.md):
            splits are chosen without the number of rows or sequences, and so are tiles that do not agree.
        agreement: knows which tiles agree on this GPU; None if tiles of different shapes count as different.
    """

    target: CompileTarget
    batch_invariant: bool = True
    agreement: Agreement | None = field(default=None, compare=False)

    def products_agree(self, dtype: torch.dtype) -> bool:
        """True if products of this dtype give the same bits with tiles of any shape."""
        return self.agreement is not None and self.agreement.of_products(dtype)

    def attention_agrees(self, dtype: torch.dtype, head_dim: int) -> bool:
        """True if attention gives the same bits with tiles of any number of rows."""
        return self.agreement is not None and self.agreement.of_attention(dtype, head_dim)


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter on CPU tensors."""
    return bool(knobs.runtime.interpret)


@functools.cache
def current() -> CompileTarget:
    """Target of this process; an architecture without measured figures gets the smallest tiles of its maker.

    Raises:
        RuntimeError: there is no GPU, and kernels are not interpreted.
    """
    if interpreted():
        return TARGETS[INTERPRETER]
    return of(driver.active.get_current_target())


def of(gpu: GPUTarget) -> CompileTarget:
    """Target for Triton's name of a GPU; an unknown GPU gets the name of its own architecture."""
    if gpu.backend == "hip":
        name = str(gpu.arch)
        least = replace(TARGETS["gfx942"], name=name, has_fp8=False)
    else:
        name = f"sm_{gpu.arch}"
        least = CompileTarget(name, False, 101_376, has_fp8=int(gpu.arch) >= _FIRST_FP8)
    return TARGETS.get(name, least)
