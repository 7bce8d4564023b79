"""transformers' continuous batching as the benchmark of GPU steps runs it, here on a CPU: it answers what we answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from common.config import Config
from tests.bench import gpu_steps
from tests.bench.gpu_transformers import Transformers, Work, compare, own_answers
from tests.checkpoints import make_checkpoint
from worker.llm_engine import LLMEngine

WORK = Work(batch=3, context=20, tokens=5, budget=64)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLMEngine, Transformers]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=False, num_hidden_layers=1)
    config = Config(model=str(folder), dtype="float32", kernels="torch", max_model_len=32, num_kvcache_blocks=8)
    return LLMEngine(config), Transformers(folder, "float32", torch.device("cpu"))


def test_both_engines_give_equal_answers(pair: tuple[LLMEngine, Transformers]) -> None:
    engine, peer = pair
    prompts = [WORK.prompts(repetition) for repetition in (0, 1)]
    assert prompts[0] != prompts[1]
    assert {len(prompt) for prompt in prompts[0]} == {20}
    with peer.session(WORK) as theirs:
        for each in prompts:
            assert theirs(each) == own_answers(engine, each, WORK.tokens)


def test_tokens_are_counted(pair: tuple[LLMEngine, Transformers], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that fail at once must not look like a high rate."""
    engine, peer = pair
    monkeypatch.setattr("tests.bench.gpu_transformers.own_answers", lambda engine, prompts, tokens: [[1], [], [1]])
    with pytest.raises(RuntimeError, match=re.escape("fissile gave 3 answers of [0, 1] tokens, not 3 of 5")):
        compare(engine, peer, WORK, 1)


@pytest.mark.slow
def test_command_keeps_figures_of_both_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--batches 1 --prefill 16 --context 8 --steps 3 --compared 1 2 --repetitions 2"
    arguments = ["--shape", "tiny", "--kernels", "torch", "--dtype", "float32", *sizes.split()]
    gpu_steps.main([*arguments, "--ways", "invariant, graphs", "--json", str(tmp_path / "figures.json")])
    kept = json.loads((tmp_path / "figures.json").read_text())["throughputs"]
    found = [(each["engine"], each["work"]["batch"], len(each["tokens_per_s"])) for each in kept]
    assert found == [(name, batch, 2) for batch in (1, 2) for name in ("fissile", "transformers")]
    assert min(min(each["tokens_per_s"]) for each in kept) > 0
    assert "invariant, graphs: 2 requests: " in capsys.readouterr().out
