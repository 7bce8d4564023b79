"""Finding AITER, and refusing other packages and unknown versions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.aiter import library as aiter_library
from kernels.aiter.dispatch import SINCE
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from tests.kernels.aiter.fake_aiter import lay

NORM = "aiter.ops.rmsnorm:rmsnorm2d_fwd"
LATEST = "0.1.20.post1"
without_aiter = pytest.mark.skipif(find_spec("aiter") is not None, reason="AITER is installed here")


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of imports; with a distribution beside the package, as an installed one has."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "amd_aiter-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 9.8.7\n", "utf-8")
    forget()
    yield tmp_path
    forget()


def refused() -> str:
    with pytest.raises(AiterUnavailableError) as caught:
        AiterLibrary.load(SINCE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@without_aiter
def test_missing_aiter_is_refused() -> None:
    assert refused() == "AITER is not installed; ROCm images bring it (docs/reference/rocm.md)"


def test_other_package_named_aiter_is_refused(place: Path) -> None:
    (place / "aiter").mkdir()
    (place / "aiter/__init__.py").write_text("from .map_aiter import map_aiter\n", "utf-8")
    (place / "aiter/map_aiter.py").write_text("raise AssertionError('it was imported')\n", "utf-8")
    assert "is not AMD's AITER but PyPI's asynchronous iterators of that name: `pip uninstall aiter`" in refused()


@pytest.mark.parametrize("tag", ["0.1.13", "0.1.16", "0.1.18", LATEST])
def test_supported_aiter_version_loads(place: Path, tag: str) -> None:
    lay(place, tag)
    library = AiterLibrary.load(SINCE)
    assert library.version == "9.8.7"
    assert (set(SINCE) <= library.functions) == (tag != "0.1.13")
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    assert library.call(NORM, x, weight, 1e-6).shape == (3, 16)
    assert library.enum("QuantType", "per_Token").name == "per_Token"
    with pytest.raises(AiterUnavailableError, match=r"9\.8\.7: no QuantType\.per_2x2"):
        library.enum("QuantType", "per_2x2")


def test_aiter_with_other_parameters_is_refused(place: Path) -> None:
    lay(place, LATEST, {NORM: "input, weight, gemma, epsilon"})
    message = refused()
    assert message == (
        f"unsupported aiter version 9.8.7: function {NORM} has parameters (input, weight, gemma, epsilon), unlike "
        "0.1.20.post1 with gemma and without use_model_sensitive_rmsnorm=0; supported tags: "
        "0.1.13, 0.1.16, 0.1.18, 0.1.20.post1"
    )
    assert "aiter" not in sys.modules


def test_parameters_in_another_order(place: Path) -> None:
    lay(place, LATEST, {NORM: "input, epsilon, weight, use_model_sensitive_rmsnorm=0"})
    assert "unlike 0.1.20.post1 in another order; supported" in refused()


def test_another_default_is_another_version(place: Path) -> None:
    lay(place, LATEST, {NORM: "input, weight, epsilon, use_model_sensitive_rmsnorm=1"})
    assert "with use_model_sensitive_rmsnorm=1 and without use_model_sensitive_rmsnorm=0; supported" in refused()


def test_missing_aiter_function_is_refused(place: Path) -> None:
    lay(place, LATEST, without=NORM)
    assert refused() == (
        f"unsupported aiter version 9.8.7: there is no function {NORM}; supported tags: "
        "0.1.13, 0.1.16, 0.1.18, 0.1.20.post1"
    )


def test_parameters_known_to_pytorch(place: Path) -> None:
    """The compiled functions are registered with PyTorch, under the parameters that they really have."""
    lay(place, LATEST)
    operations: Any = torch.library.Library("aiter", "FRAGMENT")  # type: ignore[no-untyped-call]
    operations.define(
        "layernorm2d_fwd(Tensor input, Tensor weight, Tensor bias, float epsilon, Tensor x_bias) -> Tensor"
    )
    operations.define("rmsnorm2d_fwd(Tensor input, Tensor gamma, float epsilon) -> Tensor")
    try:
        message = refused()
    finally:
        operations._destroy()
    assert "operation aiter.ops.rmsnorm:rmsnorm2d_fwd has parameters (input, gamma, epsilon), supported: (" in message


def test_failed_import_is_refused(place: Path) -> None:
    lay(place, LATEST)
    with (place / "aiter/__init__.py").open("a", encoding="utf-8") as file:
        file.write("raise RuntimeError('ROCm version file\\nnot found')\n")
    message = refused()
    assert message.startswith("aiter 9.8.7 cannot be imported here: ")
    assert message.endswith(": RuntimeError: ROCm version file not found")


@without_aiter
def test_aiter_source_tree_has_unknown_version(place: Path) -> None:
    lay(place, LATEST)
    (place / "amd_aiter-9.8.7.dist-info/METADATA").unlink()
    (place / "amd_aiter-9.8.7.dist-info").rmdir()
    assert aiter_library.find() == aiter_library.Installation(place, "unknown")
