"""Compiles kernels/cpu/native into one shared object: `python -m kernels.cpu.build`. Needs only a C++ compiler.

Sources with arithmetic are compiled once for each instruction set, each into its own namespace; the library chooses one
when it is loaded. The package's build (hatch_build.py) and `make setup` call this after a change.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "native"
LIBRARY = FOLDER / "libfissile_cpu.so"
# Compiled for each instruction set that is no other's variant; `VARIANTS` for some, the others once.
ARITHMETIC = ("linear", "grouped", "attention", "elementwise", "routing", "sampling", "table")
VARIANTS = ("linear_amx", "linear_bf16", "grouped_bf16")
COMPILERS = ("c++", "g++", "clang++")
# The command for a person to type, with this Python.
COMMAND = shlex.join([sys.executable, "-m", "kernels.cpu.build"])
# Scores are written as float and read as pairs of bfloat16, which strict aliasing would let a compiler reorder.
_CODE = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall")
_FLAGS = (*_CODE, "-fno-math-errno", "-ffp-contract=off")
_QUIET = ("-Wno-psabi", "-Wno-attributes")
# The compiler's own libraries are linked statically and hidden, so that machines without them or with other versions
# can load the result. Unused functions are left out, and with them the newest glibc that they would need.
_LINK = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL,--gc-sections")
_MARK = "fissile-sources:"


class BuildError(Exception):
    """The kernels could not be compiled; one line."""


class NoCompilerError(BuildError):
    """There is no C++ compiler here."""


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set that arithmetic is compiled for.

    Attributes:
        name: of its namespace.
        width: floats of a vector.
        flags: for the compiler.
        base: the instruction set whose kernels it uses beside its own; "" if all are its own.
        own: the sources of its own kernels.
        newest: an instruction that not every compiler and assembler knows.
    """

    name: str
    width: int
    flags: tuple[str, ...] = ()
    base: str = ""
    own: tuple[str, ...] = ARITHMETIC
    newest: str = ""


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_EMULATED = "-DFISSILE_EMULATED"
# Attention by products of pairs of bfloat16, or of tiles of them, too.
_PAIRS, _TILES = "-DFISSILE_PAIRS", "-DFISSILE_TILES"
_OF_BF16 = ("linear_bf16", "grouped_bf16", "attention")
_OF_AMX = ("linear_amx", "grouped_bf16", "attention")
_PLAIN = (InstructionSet("plain", 8),)
# avx2x16 is the 16-wide code on machines without AVX-512; the emulated sets stand for newer instructions. Both are
# for tests.
_X86 = (
    *_PLAIN,
    InstructionSet("avx2", 8, _AVX2),
    InstructionSet("avx2x16", 16, _AVX2),
    InstructionSet("avx512", 16, _AVX512),
    InstructionSet("amx_emulated", 16, (*_AVX2, _EMULATED, _TILES), "avx2x16", _OF_AMX),
    InstructionSet("avx512bf16_emulated", 16, (*_AVX2, _EMULATED, _PAIRS), "avx2x16", _OF_BF16),
)
# Both convert int8 to bfloat16 with AVX512-VBMI, which their processors have, except Cooper Lake.
_AVX512_VBMI = (*_AVX512, "-mavx512vbmi")
# Instructions that not every compiler and assembler knows. native/dispatch.cpp is told which ones are compiled in.
NEWER = (
    InstructionSet(
        "amx",
        16,
        (*_AVX512_VBMI, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", _TILES),
        "avx512",
        _OF_AMX,
        "tdpbf16ps %tmm2, %tmm1, %tmm0",
    ),
    InstructionSet(
        "avx512bf16",
        16,
        (*_AVX512_VBMI, "-mavx512bf16", _PAIRS),
        "avx512",
        _OF_BF16,
        "vdpbf16ps %zmm2, %zmm1, %zmm0",
    ),
)


def instruction_sets(compiler: list[str]) -> tuple[InstructionSet, ...]:
    """Instruction sets of this kind of processor that the compiler knows; the library finds out which ones the
    processor has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return _PLAIN
    return (*_X86, *(one for one in NEWER if _accepts(compiler, one)))


def _accepts(compiler: list[str], one: InstructionSet) -> bool:
    try:
        _run([*compiler, *one.flags, "-c", "-x", "c++", "-", "-o", os.devnull], f'asm("{one.newest}");')
    except BuildError:
        return False
    return True


def platform_tag() -> str:
    """Platform tag of a wheel with the library in it: the machine that compiled it and its like."""
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, or the first of c++, g++ and clang++.

    Raises:
        NoCompilerError: none is installed.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None:
        raise NoCompilerError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH; set CXX to one")
    return [found]


def has_compiler() -> bool:
    """True if `find_compiler` finds one."""
    try:
        find_compiler()
    except NoCompilerError:
        return False
    return True


def sources_digest() -> str:
    """Digest of everything that the library is made from."""
    digest = hashlib.blake2b(digest_size=16)
    for path in [*sorted(SOURCES.iterdir()), Path(__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current() -> bool:
    """True if the library is there and made from these sources."""
    return LIBRARY.is_file() and (_MARK + sources_digest()).encode() in LIBRARY.read_bytes()


def build(library: Path = LIBRARY) -> None:
    """Compiles and links the library, which replaces the one that is there only when it is whole.

    Raises:
        NoCompilerError: there is no compiler.
        BuildError: the compiler refused the sources, or cannot be run.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="fissile-kernels-") as folder:
        commands = list(_compilations(compiler, Path(folder)))
        with ThreadPoolExecutor(int(os.environ.get("FISSILE_BUILD_JOBS", _usable_cores()))) as jobs:
            list(jobs.map(_run, commands))
        # Beside the library, so that it can be renamed over it: a process that has the old one loaded keeps it.
        linked = library.with_name(f".{library.name}.{os.getpid()}")
        try:
            _run([*compiler, *_LINK, *(command[-1] for command in commands), "-o", str(linked)])
            linked.replace(library)
        finally:
            linked.unlink(missing_ok=True)


def _usable_cores() -> int:
    """Cores of this process, but no more than the machine has memory for compilers."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


def _compilations(compiler: list[str], folder: Path) -> Iterator[list[str]]:
    """Commands, each ending with the object file that it makes; the longest first."""
    once = [path for path in sorted(SOURCES.glob("*.cpp")) if path.stem not in (*ARITHMETIC, *VARIANTS)]
    sets = instruction_sets(compiler)
    for target in sorted(sets, key=lambda one: (bool(one.base), -one.width)):
        names = (f"-DFISSILE_ISA={target.name}", f"-DFISSILE_WIDTH={target.width}", f"-DFISSILE_BASE={target.base}")
        for name in target.own:
            made = str(folder / f"{name}.{target.name}.o")
            source = str(SOURCES / f"{name}.cpp")
            yield [*compiler, *_FLAGS, *target.flags, *names, *_QUIET, "-c", source, "-o", made]
    defined = [f'-DFISSILE_SOURCES="{sources_digest()}"']
    defined += [f"-DFISSILE_{one.name.upper()}" for one in sets if one in NEWER]
    for path in once:
        yield [*compiler, *_FLAGS, *defined, "-c", str(path), "-o", str(folder / f"{path.stem}.o")]


def _run(command: list[str], source: str = "") -> None:
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")


def main() -> int:
    """Builds what is out of date. Returns 0, also without a compiler (PyTorch's kernels are used then); 1 if the
    compiler fails."""
    if is_current():
        return 0
    try:
        build()
    except NoCompilerError as error:
        LIBRARY.unlink(missing_ok=True)
        print(f"the CPU kernels were not compiled, PyTorch's serve instead: {error}", file=sys.stderr)
    except BuildError as error:
        LIBRARY.unlink(missing_ok=True)
        print(f"the CPU kernels do not compile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
