"""The build of the native kernels, and what happens where it can not be done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, library

SOURCE = 'extern "C" const char* fissile_sources() { return "fissile-sources:" FISSILE_SOURCES; }'


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ is on the PATH"):
        build.build(tmp_path / "library.so")


@pytest.mark.parametrize(
    ("compiler", "message"), [("/nowhere/c++", "can not be run: No such file"), ("false", "false failed: exit code 1")]
)
def test_a_compiler_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=message):
        build.build(tmp_path / "library.so")
    assert list(tmp_path.iterdir()) == []


def test_an_install_without_a_compiler_succeeds_and_says_so(tmp_path: Path) -> None:
    """As the build hook runs it, on a copy, since what can not be rebuilt is removed."""
    folder = tmp_path / "kernels" / "cpu"
    (folder / "native").mkdir(parents=True)
    for path in (build.FOLDER / "build.py", build.FOLDER / "__init__.py", build.FOLDER.parent / "__init__.py"):
        (tmp_path / path.relative_to(build.FOLDER.parents[1])).write_bytes(path.read_bytes())
    (folder / "libfissile_cpu.so").write_bytes(b"an older one")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.cpu.build"],
        cwd=tmp_path,
        env={**os.environ, "CXX": "false", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ("the CPU kernels were not compiled, PyTorch's serve instead: false failed: exit code 1\n")
    assert not (folder / "libfissile_cpu.so").exists()


def test_a_missing_library_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(library.LibraryUnavailableError, match="no C\\+\\+ compiler when Fissile was installed"):
        library.load(tmp_path / "library.so")


def test_a_file_that_is_no_library_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"text")
    with pytest.raises(library.LibraryUnavailableError, match="can not be loaded"):
        library.load(tmp_path / "library.so")


def test_a_change_of_a_source_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "api.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "instruction_sets", lambda compiler: ())
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "library.so")
    assert not build.is_current()
    try:
        build.build(build.LIBRARY)
    except build.BuildError as error:
        pytest.skip(str(error))
    assert build.is_current()
    (sources / "api.cpp").write_text(SOURCE + "\n")
    assert not build.is_current()


def test_nothing_of_the_standard_library_is_compiled_for_one_instruction_set() -> None:
    """The linker keeps one copy of an inline function; it must not be one that only some machines can run."""
    allowed = {"cstdint", "immintrin.h", "cmath"}
    shared = [build.SOURCES / name for name in ("vec.hpp", "bf16_rows.hpp", "tiles.hpp")]
    for name in (*build.ARITHMETIC, *build.VARIANTS):
        sources = [build.SOURCES / f"{name}.cpp", *build.SOURCES.glob(f"{name}.hpp"), *shared]
        for path in sources:
            lines = [line for line in path.read_text().splitlines() if line.startswith("#include <")]
            assert {line[len("#include <") : -1] for line in lines} <= allowed, path


def test_a_compiler_that_does_not_know_an_instruction_leaves_its_kernels_out(tmp_path: Path) -> None:
    script = tmp_path / "old-c++"
    script.write_text('#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\nexit 0\n')
    script.chmod(0o755)
    names = {one.name for one in build.instruction_sets([str(script)])}
    assert "plain" in names
    assert "amx" not in names
    assert ("avx512bf16" in names) == ("avx512" in names)
