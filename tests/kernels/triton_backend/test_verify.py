"""What is to be run on a GPU runs, and can fail: a part of it in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.triton_backend import elementwise
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.target import INTERPRETER, TARGETS
from tests.covering import slow_but
from tests.kernels import verify_triton
from tests.kernels.row_alone import multiply_rows_alone
from tests.kernels.triton_backend.targets import backend_for
from tests.kernels.verify_triton import BitVerifier, StoredVerifier


def test_verify_triton_reports_passed_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_triton.main(["rope"]) == 0
    assert "ok     rope of a part of heads" in capsys.readouterr().out


def test_wrong_kernel_fails_verification(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(elementwise, "rope", lambda q, k, cos, sin: (q, k))
    assert verify_triton.main(["rope"]) == 1
    assert "FAILED rope " in capsys.readouterr().out


PARTS = ("rows of", "chunks", "drafts", "selected", "sampled", "captured")


@pytest.mark.parametrize("part", slow_but({"sampled"}, PARTS))
def test_bits(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    multiply_rows_alone(monkeypatch)
    checks = list(BitVerifier(TritonBackend(), inner=32, outer=48, rows=70, tokens=310, vocab=500).all(part))
    assert [check.name for check in checks if not check.passed] == []
    assert checks


def test_stored_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()
    verifier = StoredVerifier(backend, inner=160, outer=128, rows=3)
    checks = list(verifier.all(""))
    assert [str(check) for check in checks if not check.passed] == []
    assert len(checks) == 2 * len(verify_triton.STORED)
    monkeypatch.setattr(backend.linear, "apply", lambda x, packed: x[:, :128] * 0 + 1)
    assert not any(check.passed for check in verifier.all("linear"))


def test_rows_dependent_on_row_count_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()
    monkeypatch.setattr(backend.linear, "apply", lambda x, packed: x + len(x))
    checks = BitVerifier(backend, inner=32, outer=48, rows=20).all("rows of")
    assert not any(check.passed for check in checks)


def test_formats_unsupported_by_gpu_are_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise bfloat16 would be verified under the formats' names."""
    backend = backend_for(replace(TARGETS[INTERPRETER], has_fp8=False))
    monkeypatch.setattr(verify_triton, "select_backend", lambda _: backend)
    assert verify_triton.main(["no such check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["skip   weights fp8", "skip   weights w8a8_fp8"]
    monkeypatch.setattr(BitVerifier, "rows", lambda *_: True)
    names = [check.name.split()[-1] for check in BitVerifier(backend).all("weights")]
    assert names == ["bfloat16", "int4", "int8", "w8a8_int8"]


def test_verify_triton_without_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("kernels.triton_backend.target.interpreted", lambda: False)
    assert verify_triton.main([]) == 2
    assert "PyTorch sees no GPU" in capsys.readouterr().err
