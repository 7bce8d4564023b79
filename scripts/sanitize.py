"""Runs the native kernels under the compiler's sanitizers: `python scripts/sanitize.py [memory|threads]`.

`memory` finds accesses outside of allocated memory, and undefined behaviour. It compiles the sources of
`kernels.cpu.build` into a library of its own in build/sanitize. All processes of the tests use it: the tests of the
kernels, on every instruction set that this machine has, and the tests of the layers and the model runner, which call
kernels with a model's shapes. Whole models and services are left out: they would take hours and call nothing else.
`threads` finds data races in the thread pool, the only state that threads share, with a program that has two threads
share work. A sanitizer that cannot run here is named and skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from kernels.cpu import build

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "build" / "sanitize"
TESTS: Final = ("tests/unit/kernels", "tests/unit/worker/model")
STRESS: Final = ROOT / "tests" / "unit" / "kernels" / "cpu" / "pool_stress.cpp"
# Readable stacks, in little time.
_CODE: Final = ("-O1", "-g1", "-fno-omit-frame-pointer", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
_MEMORY: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_THREADS: Final = ("-std=c++17", "-fsanitize=thread", "-pthread")
# Limits of the address space leave no room for the shadow of memory.
_LEFT_OUT: Final = "not test_memory and not test_build and not fork"
# Python keeps memory until its end.
_OPTIONS: Final = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONMALLOC": "malloc"}
# Every Python that finds this as `sitecustomize` takes another library than the package's.
_SITE: Final = """
import pathlib
from kernels.cpu import build
build.LIBRARY = pathlib.Path({library!r})
"""


class UnavailableError(Exception):
    """A sanitizer cannot run here; one line."""


def library() -> Path:
    """Path of the library for `memory`, compiled anew if the sources have changed.

    Raises:
        UnavailableError: the compiler does not have the sanitizer.
    """
    made = FOLDER / "libfissile_cpu.memory.so"
    digest = made.with_suffix(".digest")
    wanted = f"{build.sources_digest()} {' '.join((*_CODE, *_MEMORY))}"
    if made.is_file() and digest.is_file() and digest.read_text() == wanted:
        return made
    FOLDER.mkdir(parents=True, exist_ok=True)
    compiler = build.find_compiler()
    with tempfile.TemporaryDirectory(prefix="fissile-sanitize-") as folder:
        # Each ends with `-c SOURCE -o OBJECT`.
        commands = [
            [*command[:-4], *_CODE, *_MEMORY, *command[-4:]] for command in build._compilations(compiler, Path(folder))
        ]
        with ThreadPoolExecutor(int(os.environ.get("FISSILE_BUILD_JOBS", os.cpu_count() or 1))) as jobs:
            list(jobs.map(_compile, commands))
        objects = [command[-1] for command in commands]
        _compile([*compiler, *_MEMORY, "-shared", "-pthread", *objects, "-o", str(made)])
    digest.write_text(wanted)
    return made


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def _runtime(name: str) -> str:
    compiler = build.find_compiler()
    asked = [*compiler, f"-print-file-name={name}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise UnavailableError(f"{compiler[0]} has no {name} (Debian: package libgcc-12-dev, or that of your version)")
    return str(Path(path).resolve())


def memory() -> int:
    """Exit code of the tests with that library; not 0 after a report.

    Raises:
        UnavailableError: it cannot run here.
    """
    made, site = library(), FOLDER / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE.format(library=str(made)))
    found = os.pathsep.join(map(str, (site, ROOT, ROOT / "protos")))
    # The sanitizer looks for the C++ library at the start, and ends a process without it at the first exception.
    preloaded = " ".join(map(_runtime, ("libasan.so", "libstdc++.so")))
    environment = {**os.environ, **_OPTIONS, "LD_PRELOAD": preloaded, "PYTHONPATH": found}
    given = ["-q", "-p", "no:cacheprovider", "-m", "not long", "-k", _LEFT_OUT]
    command = [sys.executable, "-m", "pytest", *TESTS, *given]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def threads() -> int:
    """Exit code of the program; not 0 after a report.

    Raises:
        UnavailableError: it cannot run here.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    program = str(FOLDER / "pool_stress")
    sources = [str(STRESS), *(str(build.SOURCES / f"{name}.cpp") for name in ("pool", "scratch"))]
    _compile([*build.find_compiler(), *_CODE, *_THREADS, f"-I{build.SOURCES}", *sources, "-o", program])
    # The sanitizer does not know every layout of the address space (vm.mmap_rnd_bits above 28).
    return subprocess.run(["setarch", "-R", program], check=False).returncode


def main() -> int:
    """Runs one, or both: 1 if something is found."""
    every = {"memory": memory, "threads": threads}
    worst = 0
    for name in sys.argv[1:] or every:
        print(f"== {name}", flush=True)
        try:
            worst |= bool(every[name]())
        except (UnavailableError, build.NoCompilerError) as error:
            print(f"left out: {error}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
