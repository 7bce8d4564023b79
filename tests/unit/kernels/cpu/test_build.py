"""The build of the native kernels, and its failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, library
from tests.native import NO_COMPILER

# Exported, as the library's own: a link leaves out what nothing can call.
SOURCE = (
    'extern "C" __attribute__((visibility("default"))) '
    'const char* fissile_sources() { return "fissile-sources:" FISSILE_SOURCES; }'
)


def test_missing_compiler_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ is on the PATH"):
        build.build(tmp_path / "library.so")


@pytest.mark.parametrize(
    ("compiler", "message"), [("/nowhere/c++", "cannot be run: No such file"), ("false", "false failed: exit code 1")]
)
def test_failing_compiler_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=message):
        build.build(tmp_path / "library.so")
    assert list(tmp_path.iterdir()) == []


def build_a_copy(tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs the build as make and the build hook do, on a copy of its script and of no sources; the library's folder."""
    folder = tmp_path / "kernels" / "cpu"
    (folder / "native").mkdir(parents=True)
    for path in (build.FOLDER / "build.py", build.FOLDER / "__init__.py", build.FOLDER.parent / "__init__.py"):
        (tmp_path / path.relative_to(build.FOLDER.parents[1])).write_bytes(path.read_bytes())
    (folder / "libfissile_cpu.so").write_bytes(b"an older one")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.cpu.build"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, folder


def test_install_without_compiler_succeeds_with_message(tmp_path: Path) -> None:
    done, folder = build_a_copy(tmp_path, CXX="", PATH=str(tmp_path))
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("the CPU kernels were not compiled, PyTorch's serve instead: no C++ compiler: ")
    assert not (folder / "libfissile_cpu.so").exists()


@pytest.mark.parametrize("compiler", ["false", "/nowhere/c++"])
def test_failing_compiler_exits_with_1(tmp_path: Path, compiler: str) -> None:
    """A broken source printed a line and exited with 0, and CI continued without the kernels."""
    done, folder = build_a_copy(tmp_path, CXX=compiler)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"the CPU kernels do not compile: {compiler} ")
    assert not (folder / "libfissile_cpu.so").exists()


HOOK = """
import sys, types
interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
interface.BuildHookInterface = type("BuildHookInterface", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[interface.__name__] = interface
import hatch_build
hatch_build.build.main = lambda: int(sys.argv[1])
hatch_build.KernelsBuildHook().initialize("editable", {})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_install_exit_follows_build_exit(code: int) -> None:
    """Former fault: `pip install` continued after a failed compiler. Hatchling exists only in a package's build."""
    root = build.FOLDER.parents[1]
    assert subprocess.run([sys.executable, "-c", HOOK, str(code)], cwd=root, check=False).returncode == code


def test_missing_library_error_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        library.LibraryUnavailableError,
        match=r"no C\+\+ compiler when Fissile was installed",
    ):
        library.load(tmp_path / "library.so")


def test_non_library_file_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"text")
    with pytest.raises(library.LibraryUnavailableError, match="cannot be loaded"):
        library.load(tmp_path / "library.so")


def test_changed_source_makes_library_outdated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "api.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "instruction_sets", lambda compiler: ())
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "library.so")
    assert not build.is_current()
    if not build.has_compiler():
        pytest.skip(NO_COMPILER)
    build.build(build.LIBRARY)
    assert build.is_current()
    (sources / "api.cpp").write_text(SOURCE + "\n")
    assert not build.is_current()


def test_standard_library_code_is_compiled_for_plain_set_only() -> None:
    """The linker keeps one copy of an inline function; it must not be one that only some machines can run."""
    allowed = {"cstdint", "immintrin.h", "cmath"}
    shared = [build.SOURCES / name for name in ("vec.hpp", "bf16_rows.hpp", "tiles.hpp")]
    for name in (*build.ARITHMETIC, *build.VARIANTS):
        sources = [build.SOURCES / f"{name}.cpp", *build.SOURCES.glob(f"{name}.hpp"), *shared]
        for path in sources:
            lines = [line for line in path.read_text().splitlines() if line.startswith("#include <")]
            assert {line[len("#include <") : -1] for line in lines} <= allowed, path


def test_no_source_is_compiled_with_strict_aliasing(tmp_path: Path) -> None:
    """Scores are written as float32 and read as bfloat16, which a compiler might put in another order."""
    commands = list(build._compilations(["false"], tmp_path))
    assert {Path(command[-3]).name for command in commands} == {path.name for path in build.SOURCES.glob("*.cpp")}
    assert all("-fno-strict-aliasing" in command for command in commands)


def test_compiler_without_instruction_set_omits_its_kernels(tmp_path: Path) -> None:
    script = tmp_path / "old-c++"
    script.write_text('#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\nexit 0\n')
    script.chmod(0o755)
    names = {one.name for one in build.instruction_sets([str(script)])}
    assert "plain" in names
    assert "amx" not in names
    assert ("avx512bf16" in names) == ("avx512" in names)
