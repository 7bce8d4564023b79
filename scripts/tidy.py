"""Runs clang-tidy (.clang-tidy) over the native kernels: `python scripts/tidy.py [SOURCE...]`.

Every source is looked at as the package's build compiles it, arithmetic once: for vectors of 16 without instructions
that not every clang knows. Without clang-tidy it says so and ends well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from kernels.cpu import build

ROOT: Final = Path(__file__).resolve().parents[1]
# Also a virtual environment's folder: `pip install clang-tidy`.
_PLACES: Final = os.pathsep.join([str(ROOT / "build" / "clang-tidy" / "bin"), os.environ.get("PATH", "")])
_NAMES: Final = ("clang-tidy", *(f"clang-tidy-{version}" for version in range(25, 13, -1)))


def find() -> str | None:
    """Path of clang-tidy, the newest that the PATH has."""
    return next((found for name in _NAMES if (found := shutil.which(name, path=_PLACES))), None)


def compilations(wanted: list[str]) -> dict[str, list[str]]:
    """Flags of each source, or of those named `wanted`, without the compiler and the output."""
    flags: dict[str, list[str]] = {}
    # The build begins with the widest vectors, in AVX2's instructions.
    for command in build._compilations(build.find_compiler(), Path("unused")):
        source = command[-3]
        if not wanted or Path(source).name in wanted:
            flags.setdefault(source, [flag for flag in command[1:-4] if not flag.startswith("-Wno-")])
    return flags


def main() -> int:
    """Prints the findings; returns 1 if there are any."""
    command = find()
    if command is None:
        print(
            "left out: there is no clang-tidy (apt install clang-tidy, or pip install clang-tidy into build/clang-tidy)"
        )
        return 0

    def check(item: tuple[str, list[str]]) -> str:
        source, flags = item
        done = subprocess.run([command, "--quiet", source, "--", *flags], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as jobs:
        found = [text for text in jobs.map(check, compilations(sys.argv[1:]).items()) if text.strip()]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
