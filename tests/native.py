"""Facts of this machine that decide which kernels a test can run here. A fault of the kernels never makes a skip."""

from __future__ import annotations

import functools
from ctypes import CDLL
from pathlib import Path

import pytest

from kernels.cpu import build, library
from kernels.cpu.library import Ability
from kernels.interface import KernelBackend
from kernels.select import CPU, select_backend

NO_COMPILER = "no C++ compiler is installed, and the CPU kernels were not built"
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# Flags of /proc/cpuinfo that each instruction set needs (kernels/cpu/native/dispatch.cpp).
_FLAGS = {
    "plain": (),
    "avx2": _AVX2,
    "avx2x16": _AVX2,
    "amx_emulated": _AVX2,
    "avx512bf16_emulated": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "avx512vbmi", "avx512_bf16"),
    "amx": (*_AVX512, "avx512vbmi", "avx512_vnni", "amx_tile", "amx_bf16"),
}


@functools.cache
def processor_flags() -> frozenset[str]:
    """Names of the processor's instructions, as the kernel lists them; empty on other systems and processors."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def native_library() -> CDLL:
    """The compiled kernels; skips the test where no compiler could have made them, fails it where they do not load."""
    if not build.LIBRARY.is_file() and not build.has_compiler():
        pytest.skip(NO_COMPILER)
    return library.load()


def backend_or_skip(name: str) -> KernelBackend:
    """The back end called `name`; skips the test only where the native one was never built for want of a compiler."""
    if name == CPU:
        native_library()
    return select_backend(name)


def reason_to_skip(ability: Ability, name: str, flags: frozenset[str]) -> str | None:
    """Fact that keeps this machine from running an instruction set; None if it should run."""
    if ability == Ability.DENIED:
        return f"this processor has no {name} that the operating system lets be used"
    missing = [flag for flag in _FLAGS[name] if flag not in flags]
    if ability == Ability.ABSENT and missing:
        return f"this processor has no {missing[0]}, which {name} kernels need"
    return None


def select_or_skip(native: CDLL, name: str) -> None:
    """Selects an instruction set; skips the test where the processor lacks it, fails it where the library does."""
    ability = library.abilities(native).get(name, Ability.ABSENT)
    if reason := reason_to_skip(ability, name, processor_flags()):
        pytest.skip(reason)
    library.select(native, name)
