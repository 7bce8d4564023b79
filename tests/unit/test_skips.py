"""Skips of a strict run, with and without pytest-xdist, and their permitted reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, library
from kernels.cpu.library import Ability
from tests import native
from tests.skips import ALLOWED, STRICT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = "from tests.conftest import pytest_addoption, pytest_configure\n"
TESTS = """
import pytest
def test_amx(): pytest.skip("this processor has no amx_tile, which amx kernels need")
def test_tool(): pytest.skip("buf is not installed: make setup")
def test_passes(): pass
"""
FAULT = 'def test_fault(): pytest.skip("the CPU kernels were not compiled")\n'


def run(folder: Path, tests: str, strict: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(tests)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            *options,
            str(folder),
        ],
        env={**os.environ, STRICT_VARIABLE: strict, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_strict_run_fails_for_forbidden_skip(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Regression: with a broken library 1,656 tests were skipped and CI was green."""
    done = run(tmp_path, TESTS + FAULT, "1", *options)
    assert done.returncode == 1, done.stdout
    assert "    1  FORBIDDEN  the CPU kernels were not compiled\n" in done.stdout
    assert "    1  this processor has no amx_tile, which amx kernels need\n" in done.stdout


def test_strict_run_passes_with_permitted_skips(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS, "1")
    assert done.returncode == 0, done.stdout
    assert "skipped, by reason" in done.stdout


def test_lenient_run_shows_skip_table(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS + FAULT, "")
    assert done.returncode == 0, done.stdout
    assert "    1  the CPU kernels were not compiled\n" in done.stdout


@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512bf16", "amx"])
def test_only_a_processor_that_lacks_an_instruction_set_skips_it(name: str) -> None:
    """A library that lacks an instruction set of the processor is a fault, whatever its reason."""
    needed = frozenset(native._FLAGS[name])
    assert native.reason_to_skip(Ability.ABSENT, name, needed) is None
    assert native.reason_to_skip(Ability.USABLE, name, frozenset()) is None
    for flags, ability in ((needed - {native._FLAGS[name][-1]}, Ability.ABSENT), (needed, Ability.DENIED)):
        reason = native.reason_to_skip(ability, name, flags)
        assert reason is not None
        assert ALLOWED.match(reason)


def test_unloadable_library_fails_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a compiler or a library present, a build or load failure is no reason to skip."""
    broken = tmp_path / "library.so"
    broken.write_bytes(b"no library")
    load = library.load
    monkeypatch.setattr(library, "load", lambda: load(broken))
    monkeypatch.setattr(build, "LIBRARY", broken)
    with pytest.raises(library.LibraryUnavailableError):
        native.native_library()
    broken.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no C\+\+ compiler"):
        native.native_library()
