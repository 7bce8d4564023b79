from __future__ import annotations

import sys
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from kernels import select
from kernels.cpu import build, instruction_sets, library
from kernels.select import select_backend
from tests.native import native_library

load = library.load


def test_torch_backend_is_available() -> None:
    assert select_backend("torch").name == "torch"


def test_auto_selects_native_kernels_on_fast_machines() -> None:
    chosen = library.select(native_library())
    assert select_backend().name == ("torch" if chosen == library.PLAIN else "cpu")


@pytest.fixture(params=["not compiled", "compiled from other sources"])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What is the matter with the library that there is."""
    path = tmp_path / "library.so"
    monkeypatch.setattr(build, "LIBRARY", path)
    monkeypatch.setattr(library, "load", lambda: load(path))
    if request.param != "not compiled":
        path.write_bytes(b"fissile-sources:of yesterday")
    return str(request.param)


def test_auto_without_native_kernels_warns_and_takes_torch(fault: str) -> None:
    with capture_logs() as logs:
        assert select_backend().description == "torch"
    (line,) = logs
    assert fault in line["reason"]
    assert line["reason"].endswith(f"run: {sys.executable} -m kernels.cpu.build")
    assert (line["log_level"], "several times as long" in line["event"]) == ("warning", True)


@pytest.mark.parametrize("asked", [("cpu", "auto"), ("auto", "avx2")], ids=" ".join)
def test_requested_native_kernels_never_fall_back(fault: str, asked: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"kernels 'cpu': the CPU kernels were {fault}.* run: .*kernels.cpu.build$"):
        select_backend(*asked)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [(None, "this processor has no AVX2"), (library.PLAIN, "another engine of this process computes by plain ones")],
)
def test_auto_without_avx2_warns_and_takes_torch(
    monkeypatch: pytest.MonkeyPatch, beside: str | None, reason: str
) -> None:
    native_library()

    def plain_only(native: CDLL, instruction_set: str) -> str:
        return library.select(native, library.PLAIN)

    monkeypatch.setattr(instruction_sets, "take", plain_only)
    monkeypatch.setattr(select, "in_use", lambda: beside)
    with capture_logs() as logs:
        assert select_backend().name == "torch"
    assert [(line["log_level"], line["reason"]) for line in logs] == [("warning", reason)]
    library.select(load())


def test_unknown_kernels_name_lists_choices() -> None:
    with pytest.raises(ValueError, match="'cuda' is not known; choose one of: auto, torch, cpu, triton, aiter"):
        select_backend("cuda")


@pytest.mark.parametrize("name", ["triton", "aiter"])
def test_gpu_kernels_need_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    # Tests of kernels in this process may have switched the interpreter on.
    monkeypatch.setattr("kernels.triton_backend.target.interpreted", lambda: False)
    with pytest.raises(ValueError, match=f"kernels '{name}': (PyTorch sees no GPU|Triton is not installed)"):
        select_backend(name)


def test_instruction_sets_are_of_native_kernels() -> None:
    with pytest.raises(ValueError, match="cpu_isa 'avx2': of native kernels only"):
        select_backend("triton", "avx2")
