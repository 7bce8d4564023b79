"""The example of lm-evaluation-harness gives what `transformers` computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.e2e.service import REPOSITORY, running_service

PAIRS = [
    ("the cat", " sat on the mat"),
    ("the cat", " ran"),
    ("the dog ", "sat"),
    ("", "the cat sat"),
    ("x" * 400, " y"),
]


def example() -> Any:
    spec = importlib.util.spec_from_file_location("lm_eval_model", REPOSITORY / "examples" / "lm_eval_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logprobs(reference: Any, ids: list[int], start: int, num_ids: int) -> tuple[float, bool]:
    """Sum over the tokens from `start` on, and whether each is the most likely one."""
    with torch.inference_mode():
        every = reference(torch.tensor([ids])).logits[0, :, :num_ids].double().log_softmax(-1)
    rows = every[start - 1 : -1]
    own = rows.gather(1, torch.tensor(ids[start:]).unsqueeze(1)).squeeze(1)
    return own.sum().item(), bool((own == rows.max(1).values).all())


def test_log_likelihoods_and_answers(tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    from transformers import Qwen3ForCausalLM

    folder = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
    tokenizer = Tokenizer.from_folder(folder)
    reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_ids = min(tokenizer.vocab_size, reference.config.vocab_size)
    options = ["--max-model-len", "128", "--dtype", "float32", "--prefix-caching"]
    with running_service(tmp_path, folder, worker_options=options) as service:
        model = example().FissileLM(address=service.router.address)
        asked = [SimpleNamespace(args=pair) for pair in PAIRS]
        for (context, continuation), (total, is_greedy) in zip(PAIRS, model.loglikelihood(asked), strict=True):
            ids = tokenizer.encode(context + continuation)
            start = len(tokenizer.encode(context.rstrip())) if context else 0
            if not start:
                assert tokenizer.bos_token_id is not None
                ids, start = [tokenizer.bos_token_id, *ids], 1
            cut = max(0, len(ids) - 127)
            expected = logprobs(reference, ids[cut:], start - cut, num_ids)
            assert (total, is_greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
        text = "the cat sat on the mat and the dog ran to the cat again " * 4
        (rolling,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
        assert rolling < 0
        again = model.loglikelihood_rolling([SimpleNamespace(args=(text,))] * 3)
        assert again == [rolling] * 3
        short = "the cat sat"
        (one,) = model.loglikelihood_rolling([SimpleNamespace(args=(short,))])
        assert tokenizer.bos_token_id is not None
        ids = [next(iter(model._model.eos_token_ids), tokenizer.bos_token_id), *tokenizer.encode(short)]
        assert one == pytest.approx(logprobs(reference, ids, 1, num_ids)[0], abs=1e-3)
        until = {"until": ["\n"], "max_gen_toks": 5}
        answers = model.generate_until([SimpleNamespace(args=("the cat", until))] * 2)
        assert len(answers) == 2
        assert answers[0] == answers[1]
