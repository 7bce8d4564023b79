"""The demo model's EAGLE-3 head: the training script computes the served head, and the head drafts well."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config, SpeculativeConfig
from common.params.config_parts import EAGLE3
from common.text.tokenizer import Tokenizer
from deploy.demo import batches, draft_head
from deploy.demo.questions import questions
from deploy.demo.train import load
from tests.parity.test_draft_models import ReferenceHead
from tests.parity.test_draft_proposers import Proposed, eagle_case, independent_drafts, loaded, recording
from worker.llm_engine import LLMEngine

DEMO = Path(draft_head.__file__).parent
CHECKPOINT, HEAD = DEMO / "checkpoint", DEMO / "eagle3"


def test_trained_head_loads_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short steps change all of its matrices; drafts in training equal an independent head's."""
    monkeypatch.setattr(batches, "TOKENS_PER_BATCH", 512)
    model = load(CHECKPOINT)
    new = draft_head.DraftHead(model)
    draft_head.train(CHECKPOINT, tmp_path, 2)
    reference = ReferenceHead(tmp_path, model.model.embed_tokens.weight.detach())
    reference.weights = {name: tensor.float() for name, tensor in reference.weights.items()}
    assert reference.weights.keys() == new.tensors.keys()
    matrices = {name: tensor.bfloat16().float() for name, tensor in new.tensors.items() if tensor.dim() > 1}
    assert not any(torch.equal(reference.weights[name], tensor) for name, tensor in matrices.items())

    head = draft_head.DraftHead(model)
    head.tensors |= reference.weights
    ids = torch.randint(5, 1000, (1, 30), generator=torch.Generator().manual_seed(2))
    aux, _ = draft_head.target(model, ids)
    states, known = head.combine(aux[:, :26]), list[Any]()
    for depth in range(draft_head.DEPTH):
        states = head.states(ids[:, depth + 1 : depth + 27], states, depth, known)
        # Whole sequences that end at a row: before it are the model's states, after it the head's own.
        for row in (0, 7, 25):
            every = reference.linear("fc", aux[0, : row + 1])
            for end in range(row + 1, row + depth + 2):
                made = reference(ids[0, 1 : end + 1], every)
                every = torch.cat((every, made[-1:]))
            torch.testing.assert_close(states[0, row], made[-1], rtol=1e-3, atol=1e-3)


def prompts() -> list[list[int]]:
    tokenizer, asked = Tokenizer.from_folder(CHECKPOINT), questions()[::10]
    chats = [f"<|im_start|>user\n{one.user}<|im_end|>\n<|im_start|>assistant\n" for one in asked]
    return [tokenizer.encode(chat, allow_special=True) for chat in chats]


def test_most_demo_drafts_are_accepted() -> None:
    given: dict[str, Any] = {"model": str(CHECKPOINT), "max_model_len": 256, "num_kvcache_blocks": 160}
    params = {"temperature": 0.0, "max_tokens": 40}
    # All drafts there are, whether they pay on this machine or not.
    speculative_config = SpeculativeConfig(3, EAGLE3, str(HEAD), adaptive=False)
    drafting = LLMEngine(Config(**given, speculative_config=speculative_config))
    plain = LLMEngine(Config(**given))
    found, expected = (engine.generate(prompts(), params) for engine in (drafting, plain))
    assert [one["token_ids"] for one in found] == [one["token_ids"] for one in expected]
    stats = drafting.core.scheduler.spec_stats
    assert stats.total_accepted_tokens > 0.6 * stats.total_draft_tokens > 0
    drafting.close()
    plain.close()


@pytest.mark.slow
def test_demo_head_drafts_and_acceptance_equal_reference() -> None:
    """Along the answers of the engine, greedy and sampled, in float32: `transformers` computes the model, and plain
    PyTorch the head. A draft may differ where two logits are nearly equal."""
    case = eagle_case(CHECKPOINT, HEAD)
    config = replace(case.config, dtype="float32", max_model_len=256, num_kvcache_blocks=160)
    found: list[Proposed] = []
    engine = LLMEngine(config, runner=recording(loaded(config), found))
    params = [{"temperature": float(i % 2), "top_p": 1.0, "max_tokens": 24, "seed": i} for i in range(len(prompts()))]
    engine.generate(prompts(), params)
    engine.close()
    # Without drafts after the last tokens, which no step verifies.
    found = [each for each in found if each.count < each.seq.num_tokens]
    own = [(number_right(each, each.drafts), len(each.drafts)) for each in found]
    reference = [(number_right(each, drafts), len(drafts)) for each, drafts in independent_drafts(case, found)]
    rates = [sum(right for right, _ in counts) / sum(of for _, of in counts) for counts in (own, reference)]
    assert abs(rates[0] - rates[1]) < 0.01
    assert rates[1] > 0.5


def number_right(proposed: Proposed, drafts: list[int]) -> int:
    """Drafts up to the first that is not what came."""
    came = proposed.seq.token_ids[proposed.count :]
    pairs = zip(drafts, came, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
