"""The comparisons that verify AITER on an AMD GPU, over a stand-in: they pass, and they can fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.aiter import decoder
from kernels.aiter.dispatch import OPERATIONS, SINCE
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from kernels.triton_backend.target import TARGETS, Settings
from tests.kernels import verify_aiter
from tests.kernels.aiter.fake_aiter import lay
from tests.kernels.dense_layers import REFERENCE
from tests.kernels.verify_aiter import Comparison, Verifier, verify

CPU = torch.device("cpu")
LATEST = "0.1.20.post1"
SETTINGS = Settings(TARGETS["gfx942"], batch_invariant=False)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], AiterLibrary]]:
    lay(tmp_path, LATEST)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield lambda: AiterLibrary.load(SINCE)
    forget()


@pytest.mark.slow
def test_everything_is_compared(load: Callable[[], AiterLibrary]) -> None:
    library = load()
    comparisons = verify(library, SETTINGS, CPU)
    assert [comparison for comparison in comparisons if not comparison.passed] == []
    # Sums need several GPUs.
    alone = [operation for name, operation in OPERATIONS.items() if name != "all_reduce"]
    assert library.called >= {name for operation in alone for name in operation.functions}


def test_wrong_kernel_fails_verification(load: Callable[[], AiterLibrary], tmp_path: Path) -> None:
    for module in ("activation", "rope"):
        file = tmp_path / f"aiter/ops/{module}.py"
        text = (
            file.read_text("utf-8")
            .replace("silu(gate) * up", "silu(up) * gate")
            .replace("x[..., half", "0 * x[..., half")
        )
        file.write_text(text, "utf-8")
    library = load()
    compared = [each for part in ("silu", "rope", "layer_norm") for each in verify(library, SETTINGS, CPU, part)]
    assert [each.name for each in compared if not each.passed] == [
        "silu_and_mul, 1 rows",
        "silu_and_mul, 33 rows",
        "rope",
        "rope of a part of heads",
    ]
    assert [each.name for each in compared if each.passed] == ["layer_norm"]


@pytest.mark.slow
def test_triton_rotation_fails_verification(load: Callable[[], AiterLibrary], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our Triton kernel, interpreted, gives the right numbers then."""
    monkeypatch.setattr(decoder, "_refuse_rope_write", lambda *_: "refused")
    compared = verify(load(), SETTINGS, CPU, "decoder layers, decode")
    assert [(each.passed, each.reason) for each in compared] == [
        (False, "AssertionError: rotation and write were not AITER's")
    ]


@pytest.mark.parametrize("wrong", [pytest.param("slot_mapping >= -1", marks=pytest.mark.slow), "slot_mapping != 0"])
def test_written_padding_fails_verification(load: Callable[[], AiterLibrary], tmp_path: Path, wrong: str) -> None:
    """A slot of -1 is the last one to a kernel that does not look."""
    file = tmp_path / "aiter/ops/triton/fusions/fused_kv_cache.py"
    text = file.read_text("utf-8")
    assert text.count("slot_mapping >= 0") == 2
    file.write_text(text.replace("slot_mapping >= 0", wrong), "utf-8")
    (compared,) = verify(load(), SETTINGS, CPU, "decoder layers, captured")
    assert (compared.passed, compared.reason) == (
        False,
        "AssertionError: keys or values of other tokens were overwritten",
    )


def test_missing_format_fails_verification() -> None:
    """Otherwise bfloat16 would be verified under the format's name; verify_triton skips formats that a GPU lacks."""
    verifier = Verifier(REFERENCE, torch.float8_e4m3fn, CPU, ("fp8",))
    compared = list(verifier.all("fp8"))
    assert len(compared) == 4
    assert {(each.passed, each.reason) for each in compared} == {(False, "AssertionError: no weights in fp8 here")}


def test_unsupported_kernel_fails_verification() -> None:
    assert not Comparison("moe", float("inf"), 0.01, "no such kernel").passed
    assert str(Comparison("moe", float("inf"), 0.01, "no such kernel")).endswith("inf (at most 1e-02) no such kernel")


def test_verify_without_aiter_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(since: object) -> None:
        raise AiterUnavailableError("AITER is not installed")

    monkeypatch.setattr(AiterLibrary, "load", fail)
    assert verify_aiter.main([]) == 2
    assert capsys.readouterr().err == "error: AITER is not installed\n"
