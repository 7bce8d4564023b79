"""The code of docs/how-to/library.md runs, in its order, on a small checkpoint."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from worker.llm_engine import LLMEngine

DOC = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "library.md"


def test_usage_in_the_docstring_of_llm_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "deploy" / "demo" / "checkpoint", "qwen3", num_hidden_layers=2, vocab_size=1024)
    monkeypatch.chdir(tmp_path)
    usage = re.search(r"Usage::\n\n(.*?)\n\n {4}\S", LLMEngine.__doc__ or "", re.DOTALL)
    assert usage is not None
    exec(compile(textwrap.dedent(usage[1]), "LLMEngine", "exec"), {})
    assert capsys.readouterr().out.endswith(" max_tokens\n")


def test_library_page_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "deploy" / "demo" / "checkpoint", "qwen3", num_hidden_layers=2, vocab_size=1024)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOC), "exec"), names)
    printed = capsys.readouterr().out
    assert "s per token" in printed
    assert re.search(r"^first .* max_tokens$", printed, re.MULTILINE)
    assert "\nfirst 20\n" in printed
    assert re.search(r"^\{.* (constraint|max_tokens)$", printed, re.MULTILINE | re.DOTALL)
    rate = int(re.search(r"(\d+) tokens per second\n$", printed)[1])  # type: ignore[index]
    # 64 000 prompt tokens at 39 000 per second, then 99 steps of 7 ms.
    assert rate == pytest.approx(6400 / (64_000 / 39_000 + 99 * 0.007), rel=0.05)
