"""Logprobs equal `transformers`, and a token's logprob has the same bits whether it was generated or given.

test_equality.py tests that they do not depend on the batch, the cache, the chunks or preemption.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.select import CPU_BACKENDS
from tests.checkpoints import make_checkpoint
from tests.native import backend_or_skip
from tests.parity.test_ranks import BLOCK_SIZE, Ranks
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine

GIVEN = (7, 3, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rnd = random.Random(3)
    return [[rnd.randrange(5, 250) for _ in range(count)] for count in (70, 3, 41)]


@pytest.fixture(scope="module", params=list(CPU_BACKENDS))
def engine(folder: Path, request: pytest.FixtureRequest) -> LLMEngine:
    """An engine with prompts in chunks, and more targets than rows of logits computed at a time."""
    kernels = backend_or_skip(request.param).name
    config = Config(
        model=str(folder),
        dtype="float32",
        kernels=kernels,
        max_model_len=128,
        num_kvcache_blocks=64,
        enable_prefix_caching=True,
        max_num_batched_tokens=48,
    )
    return LLMEngine(config)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    """float64 [T, V], of each position's next token."""
    with torch.inference_mode():
        found: torch.Tensor = reference(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return found


def check(entry: dict[str, Any], expected: torch.Tensor, token: int, num_ids: int) -> None:
    """An entry against the logprobs [V] at its position; ids from `num_ids` on are never sampled, and have none."""
    known = (expected[:num_ids] - expected[:num_ids].logsumexp(0)).float()
    assert entry["token_id"] == token
    assert entry["logprob"] == pytest.approx(known[token].item(), abs=1e-4)
    assert abs(int((known > known[token]).sum()) + 1 - entry["rank"]) <= (known - known[token]).abs().lt(1e-4).sum()
    top = known.sort(descending=True).values[: len(entry["top"])]
    assert [logprob for _, logprob in entry["top"]] == pytest.approx(top.tolist(), abs=1e-4)
    assert all(known[i].item() == pytest.approx(logprob, abs=1e-4) for i, logprob in entry["top"])
    assert list(entry["given"]) == pytest.approx([known[i].item() for i in GIVEN if i < num_ids], abs=1e-4)


def test_logprobs_equal_transformers(engine: LLMEngine, reference: Any, prompts: list[list[int]]) -> None:
    num_ids = min(engine.io.tokenizer.vocab_size, engine.io.model_config.vocab_size) if engine.io.tokenizer else 0
    params = SamplingParams(
        temperature=0.8, max_tokens=9, ignore_eos=True, logprobs=4, prompt_logprobs=2, logprob_token_ids=GIVEN
    )
    for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
        tokens = prompt + answer["token_ids"]
        entries = answer["prompt_logprobs"] + answer["logprobs"]
        assert len(entries) == len(tokens) - 1
        every = logprobs_of(reference, tokens)
        for entry, token, expected in zip(entries, tokens[1:], every[:-1], strict=True):
            check(entry, expected, token, num_ids)
        assert answer["logprob"] == sum(entry["logprob"] for entry in answer["logprobs"])


def test_prompt_logprobs_equal_logprobs_at_generation(engine: LLMEngine, prompts: list[list[int]]) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=3)
    for prompt, answer in zip(prompts, engine.generate(prompts, drawn), strict=True):
        scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=len(prompt))
        (again,) = engine.generate([prompt + answer["token_ids"]], scored)
        assert again["prompt_logprobs"] == answer["logprobs"]


def test_processed_logprobs_follow_filters_and_penalties(
    engine: LLMEngine, reference: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, presence_penalty=2.0, max_tokens=6, ignore_eos=True, logprobs=6,
        logprobs_kind="processed",
    )  # fmt: skip
    (answer,) = engine.generate(prompts[:1], params)
    every = logprobs_of(reference, prompts[0] + answer["token_ids"])[len(prompts[0]) - 1 :]
    seen: set[int] = set()
    for entry, expected in zip(answer["logprobs"], every, strict=False):
        penalized = expected.clone()
        penalized[sorted(seen)] -= 2.0
        scaled = (penalized / 0.7).log_softmax(-1)
        values, ids = scaled.sort(descending=True)
        kept = values[:5].exp().sum()
        assert entry["kept_mass"] == pytest.approx(kept.item(), abs=1e-4)
        assert [i for i, _ in entry["top"][:5]] == ids[:5].tolist()
        assert entry["top"][5][1] == -torch.inf
        assert entry["logprob"] == pytest.approx((scaled[entry["token_id"]] - kept.log()).item(), abs=1e-4)
        assert entry["raw"] == pytest.approx(expected[entry["token_id"]].item(), abs=1e-4)
        seen.add(entry["token_id"])


def test_greedy_logprobs_use_temperature_1(engine: LLMEngine, prompts: list[list[int]]) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 2}
    (raw,) = engine.generate(prompts[:1], SamplingParams(**greedy))
    (processed,) = engine.generate(prompts[:1], SamplingParams(top_k=1, logprobs_kind="processed", **greedy))
    for one, other in zip(raw["logprobs"], processed["logprobs"], strict=True):
        assert other["logprob"] == pytest.approx(one["logprob"], abs=1e-6)
        assert (one["rank"], one["kept_mass"]) == (1, None)
        assert (other["rank"], other["kept_mass"]) == (1, 1.0)


def test_cache_serves_tokens_before_first_prompt_logprob(engine: LLMEngine, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    engine.generate([prompt], SamplingParams(max_tokens=1))
    hits = []
    for start in (1, 17, 33, 69, 70):
        engine.add_request(
            prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        )
        (answer,) = engine.step() or engine.step() or engine.step()
        assert len(answer["prompt_logprobs"]) == len(prompt) - start
        hits.append(engine.core.scheduler.lifecycle.totals.cached_tokens)
    assert [later - earlier for earlier, later in zip([hits[0], *hits], hits, strict=False)] == [0, 16, 32, 64, 64]


@pytest.mark.parametrize("architecture", ["qwen3", "deepseek_v3"])
def test_ranks_give_equal_bits_in_any_batch(tmp_path: Path, architecture: str) -> None:
    ranks = Ranks(make_checkpoint(tmp_path, architecture, num_hidden_layers=2), 2)
    rnd = random.Random(5)
    prompts = [[rnd.randrange(5, 250) for _ in range(count)] for count in (50, 5, 33)]
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, logprob_token_ids=(9,))

    def rows(members: list[int]) -> list[tuple[bytes, bytes]]:
        seqs = [Sequence(prompts[i], BLOCK_SIZE, params) for i in members]
        for place, seq in enumerate(seqs):
            seq.block_table = list(range(10 * place, 10 * place + 10))
        counts = [seq.num_tokens for seq in seqs]
        batch = ScheduledBatch({seq.id: seq for seq in seqs}, counts, sum(counts))
        output = ranks.all(lambda rank: ranks.runners[rank].forward(batch))[0]
        assert output.logprobs is not None
        assert output.target_logprobs is not None
        return [(output.logprobs[seq.id], output.target_logprobs[seq.id]) for seq in seqs]

    together = rows([0, 1, 2])
    assert [rows([i])[0] for i in range(3)] == together
    assert [len(given) // params.prompt_logprob_layout.width for _, given in together] == [49, 4, 32]
    ranks.close()
