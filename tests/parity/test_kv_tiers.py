"""KV blocks that leave the pool and come back from tiers: answers and logprobs are those of an engine without tiers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from kernels.select import CPU_BACKENDS
from tests.checkpoints import make_checkpoint, make_mtp_checkpoint
from tests.covering import slow_but
from tests.native import backend_or_skip
from worker.engine import tier_lookups
from worker.engine.batch import ScheduledBatch
from worker.engine.core import EngineDeadError
from worker.engine.executor import TimedOutput
from worker.kv_tiers.tiers import DIFFERENT, EQUAL, HIT, STORED
from worker.llm_engine import LLMEngine
from worker.ranks.rank_client import RankGroup

SIZE, MODEL_LEN = 16, 128
CASES = ("qwen3", "bfloat16", "fp8 cache", "deepseek_v3", "deepseek_v32", "gpt_oss", "mtp")


def model(case: str, folder: Path) -> dict[str, Any]:
    """Fields of the Config of an engine for a case."""
    match case:
        case "bfloat16":
            return {"model": str(make_checkpoint(folder)), "dtype": "bfloat16"}
        case "fp8 cache":
            return {"model": str(make_checkpoint(folder)), "kv_cache_dtype": "fp8"}
        case "mtp":
            drafts = SpeculativeConfig(2, "mtp", adaptive=False)
            return {"model": str(make_mtp_checkpoint(folder, "deepseek_v3")), "speculative_config": drafts}
    return {"model": str(make_checkpoint(folder, case))}


def engine(fields: dict[str, Any], **more: Any) -> LLMEngine:
    settings = {
        "max_model_len": MODEL_LEN,
        "kv_cache_block_size": SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 70,
        "num_kvcache_blocks": 64,
    }
    return LLMEngine(Config(**settings | fields | more))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, each beginning in several of them, and their parameters."""
    rnd = random.Random(3)
    beginnings = [[rnd.randrange(5, 250) for _ in range(n)] for n in (32, 48, 64, 80)]
    prompts = [[*own, *(rnd.randrange(5, 250) for _ in range(rnd.randint(1, 20)))] for own in beginnings * 3]
    params = [
        SamplingParams(seed=i, temperature=rnd.choice([0.0, 1.0]), max_tokens=8, ignore_eos=True, logprobs=2)
        for i in range(len(prompts))
    ]
    return prompts, params


def answers(made: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[Any, Any]]:
    return [(each["token_ids"], each["logprobs"]) for each in made.generate(prompts, params)]


def until(is_true: Callable[[], bool]) -> None:
    """Waits for what happens on the threads of tiers."""
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("kernels", CPU_BACKENDS)
@pytest.mark.parametrize("case", slow_but({"qwen3", "mtp"}, CASES))
def test_answers_equal_those_without_tiers(case: str, kernels: str, tmp_path: Path) -> None:
    backend_or_skip(kernels)
    fields = {**model(case, tmp_path / "model"), "kernels": kernels}
    prompts, params = requests()
    wanted = answers(engine(fields), prompts, params)
    # A pool that holds two of the prompts.
    small = {**fields, "num_kvcache_blocks": 2 * MODEL_LEN // SIZE, "max_num_seqs": 2, "enable_prefix_caching": True}
    files = f"files:{tmp_path / 'kv'}:1GiB"
    first = engine(small, kv_tiers=f"memory:64MiB,{files}")
    assert first.core.tiers is not None
    tiers = first.core.tiers.store
    for _ in range(2):
        assert answers(first, prompts, params) == wanted
    assert tiers.counts()["memory", HIT] > 0
    until(lambda: tiers.counts().get(("files", STORED), 0) == tiers.counts()["memory", STORED])
    first.close()
    # Another engine of the same model finds the blocks of the first one in its first prompts.
    second = engine(small, kv_tiers=files)
    assert answers(second, prompts, params) == wanted
    assert second.core.tiers is not None
    assert second.core.tiers.store.counts()["files", HIT] > 0
    second.close()


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_audit_leaves_out_bytes_of_draft_model(num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on which steps made drafts: here the first engine makes fewer of them."""
    monkeypatch.setattr(tier_lookups, "_AUDIT_EVERY", 1)
    fields = {**model("mtp", tmp_path / "model"), "tensor_parallel_size": num_ranks}
    fields |= {"enable_prefix_caching": True, "max_num_batched_tokens": 200}
    prompts, params = requests()
    prompts, params = prompts[:4], params[:4]
    files = f"files:{tmp_path / 'kv'}:1GiB"
    first = engine(fields, kv_tiers=files)
    submit = first.core.executor.submit

    def submit_without_drafts(batch: ScheduledBatch) -> Future[TimedOutput]:
        batch.feeds_draft_model = False
        return submit(batch)

    monkeypatch.setattr(first.core.executor, "submit", submit_without_drafts)
    wanted = answers(first, prompts, params)
    assert first.core.tiers is not None
    stored, num_full = first.core.tiers.store.counts, sum((len(each) - 1) // SIZE for each in prompts)
    until(lambda: stored()["files", STORED] >= num_full)
    first.close()
    second = engine(fields, kv_tiers=files)
    assert second.core.tiers is not None
    counts, num_compared = second.core.tiers.store.counts, 0
    for prompt, given, answer in zip(prompts, params, wanted, strict=True):
        assert answers(second, [prompt], [given]) == [answer]
        num_compared += (len(prompt) - 1) // SIZE
        until(lambda: counts()["files", EQUAL] + counts()["files", DIFFERENT] == num_compared)  # noqa: B023
    second.close()
    assert counts()["files", DIFFERENT] == 0


@pytest.mark.slow
def test_ranks_find_their_slices_also_after_a_rank_was_killed(tmp_path: Path) -> None:
    fields = {**model("qwen3", tmp_path / "model"), "kernels": "cpu", "tensor_parallel_size": 2}
    prompts, params = requests()
    plain = engine(fields)
    wanted = answers(plain, prompts, params)
    plain.close()
    small = {**fields, "num_kvcache_blocks": 2 * MODEL_LEN // SIZE, "max_num_seqs": 2, "enable_prefix_caching": True}
    files = f"files:{tmp_path / 'kv'}:1GiB"
    first = engine(small, kv_tiers=f"memory:64MiB,{files}")
    assert first.core.tiers is not None
    tiers = first.core.tiers.store
    for _ in range(2):
        assert answers(first, prompts, params) == wanted
    assert tiers.counts()["memory", HIT] > 0
    until(lambda: tiers.counts()["files", STORED] == tiers.counts()["memory", STORED])
    assert isinstance(first.core.executor, RankGroup)
    os.kill(first.core.executor.pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        answers(first, prompts, params)
    first.close()
    second = engine(small, kv_tiers=files)
    assert answers(second, prompts, params) == wanted
    assert second.core.tiers is not None
    assert second.core.tiers.store.counts()["files", HIT] > 0
    second.close()
    # An engine of one rank has other slices, so it finds none of these blocks.
    alone = engine({**small, "tensor_parallel_size": 1}, kv_tiers=files)
    answers(alone, prompts[:1], params[:1])
    assert alone.core.tiers is not None
    assert alone.core.tiers.store.counts()["files", HIT] == 0
    alone.close()
