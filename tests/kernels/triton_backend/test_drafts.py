"""Steps that verify drafts, on interpreted Triton kernels: each row has the bits of a single decode, and a model gives
the tokens of plain decoding, captured or not."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from common.config import CompilationConfig, Config, SpeculativeConfig
from common.params.config_parts import EAGLE3, NGRAM
from common.params.sampling_params import SamplingParams
from kernels.interface import AttentionMetaData, KVSpec
from kernels.triton_backend.attention import Scores, attention
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from tests.checkpoints import make_checkpoint, make_eagle3_head
from tests.covering import SAMPLED
from tests.kernels.row_alone import multiply_rows_alone
from tests.kernels.triton_backend.test_attention import BF16, FP8, FP16, FP32, PLAIN, pool
from tests.kernels.triton_backend.test_latent import INDEX, Sequences, short_splits
from tests.parity.drafts import RandomProposer, streams_of
from tests.parity.test_launched_drafts import Watched
from worker.config.model_config import ModelConfig, ModelError
from worker.llm_engine import LLMEngine
from worker.model.decode_graphs import DecodeGraphs
from worker.model.model_runner import ModelRunner
from worker.model.speculation import verify_check
from worker.model.speculation.verify_check import verifies_exactly

# The newest token and one to eight drafts after it.
ROWS: Final = range(2, 10)
SETTINGS: Final = Settings(TARGETS[INTERPRETER])
# Dtypes of model and cache, and the change of scores.
PATHS: Final[dict[str, tuple[torch.dtype, torch.dtype, Scores]]] = {
    "bfloat16": (BF16, BF16, PLAIN),
    "fp8 KV": (BF16, FP8, PLAIN),
    "window": (FP16, FP16, Scores(0.25, window=20)),
    "sinks": (BF16, BF16, Scores(0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    "all": (FP32, FP32, Scores(0.25, 70, torch.tensor([0.5, -1.0, 2.0, 0.0]), 3.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_rows_of_paged_attention(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts across the border of key tiles and of blocks, among a decode and a chunk of others."""
    multiply_rows_alone(monkeypatch)
    dtype, cache_dtype, scores = PATHS[path]
    end = 2 * 64 + 5
    found = pool([end, 40], (4, 2), 32, 16, dtype, cache_dtype)

    def rows(parts: list[tuple[int, int, int]]) -> torch.Tensor:
        own = (scores.window, scores.sinks, scores.softcap)
        return attention(found.rows(parts), found.cache, 1, found.plan(parts), scores.scale, SETTINGS, *own)

    alone = torch.cat([rows([(0, place, place + 1)]) for place in range(end - max(ROWS), end)])
    for count in ROWS:
        together = rows([(1, 30, 31), (0, end - count, end), (1, 5, 8)])
        assert torch.equal(together[1 : 1 + count], alone[-count:]), count


@pytest.mark.slow
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (BF16, FP8)])
def test_rows_of_latent_attention(
    dtypes: tuple[torch.dtype, torch.dtype], selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_rows_alone(monkeypatch)
    short_splits(monkeypatch)
    spec = KVSpec(1, 28, 20, INDEX) if selected else KVSpec(1, 48, 32)
    sequences, end = Sequences(spec, 6, 16, *dtypes), 70
    alone = torch.cat([sequences.run([(2, place, place + 1)])[0] for place in range(end - max(ROWS), end)])
    for count in ROWS:
        together = sequences.run([(1, 39, 40), (2, end - count, end)])[1]
        assert torch.equal(together, alone[-count:]), count


ARCHITECTURES: Final = ("deepseek_v3", "qwen3", "gpt_oss", "deepseek_v32", "glm4_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=SAMPLED if name != "deepseek_v3" else ()) for name in ARCHITECTURES]
)
def test_models_verify_with_the_bits_of_decodes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_rows_alone(monkeypatch)
    monkeypatch.setattr(verify_check, "_CONTEXTS", (30,))
    folder = make_checkpoint(tmp_path, architecture, num_hidden_layers=2)
    config = Config(model=str(folder), dtype="float32", kernels="triton", max_model_len=64)
    assert verifies_exactly(ModelRunner(config, ModelConfig.from_folder(folder)), 4)


@pytest.mark.slow
def test_tuned_kernels_refuse_drafts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, num_hidden_layers=1)
    config = Config(
        model=str(folder), kernels="triton", batch_invariant=False, speculative_config=SpeculativeConfig(4, NGRAM)
    )
    with pytest.raises(ModelError, match="leave out either it or --no-batch-invariant") as refused:
        ModelRunner(config, ModelConfig.from_folder(folder))
    assert "\n" not in str(refused.value)


MODEL_LEN, NUM_TOKENS, K = 64, 8, 3
PROMPTS: Final = [[7, 8, 9], list(range(20, 45)), [99] * 5]


def engine(folder: Path, kernels: str, spec: SpeculativeConfig | None, *, deferred: bool = False) -> LLMEngine:
    config = Config(
        model=str(folder),
        dtype="float32",
        kernels=kernels,
        max_model_len=MODEL_LEN,
        num_kvcache_blocks=12,
        max_num_batched_tokens=24,
        speculative_config=spec,
        deferred_output=deferred,
        compilation_config=CompilationConfig(cudagraph_capture_sizes=(1, 3) if kernels == "triton" else ()),
    )
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(config.num_kvcache_blocks)
    runner.capture_graphs()
    return LLMEngine(config, runner=runner)


def answers(running: LLMEngine, **changes: Any) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2, **changes},
        {"temperature": 0.0},
        {"temperature": 0.0},
    ]
    params = [
        SamplingParams(max_tokens=NUM_TOKENS + i, ignore_eos=True, seed=i, **kind) for i, kind in enumerate(kinds)
    ]
    return running.generate(PROMPTS, params, request_ids=["a", "b", "c"])


@pytest.mark.slow
@pytest.mark.parametrize("method", [NGRAM, EAGLE3])
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("deepseek_v3", marks=SAMPLED)])
def test_tokens_of_captured_steps_with_drafts_equal_pytorch(
    architecture: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right, wrong and both, of some sequences more than of others; and a head's own."""
    folder = make_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2)
    expected = [one["token_ids"] for one in answers(engine(folder, "torch", None))]
    captured: list[list[int]] = []
    run = DecodeGraphs.run

    def watched(
        self: DecodeGraphs, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData
    ) -> torch.Tensor:
        captured.append(np.diff(metadata.cu_seqlens_q).tolist())
        return run(self, token_ids, positions, metadata)

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    head = ""
    if method == EAGLE3:
        layers: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
        head = str(make_eagle3_head(tmp_path / "head", folder, num_attention_heads=2, head_dim=16, **layers))
    drafting = engine(folder, "triton", SpeculativeConfig(K, method, head, adaptive=False))
    if method == NGRAM:
        streams = {(seed, 0): tokens for seed, tokens in enumerate(expected)}
        drafting.core.scheduler.drafter.proposer = RandomProposer(streams, 300, random.Random(1))
    assert [one["token_ids"] for one in answers(drafting)] == expected
    # All steps except prompts.
    assert any(max(rows) > 1 for rows in captured)
    assert method == EAGLE3 or any(len(set(rows)) > 1 for rows in captured)
    assert len(captured) >= drafting.core.num_steps - 4


@pytest.mark.slow
def test_drafts_after_drafts_in_flight_equal_pytorch(tmp_path: Path) -> None:
    """A head continues from rows and positions that only the device knows."""
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=2)
    layers: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    head = str(make_eagle3_head(tmp_path / "head", folder, num_attention_heads=2, head_dim=16, **layers))
    spec = SpeculativeConfig(K, EAGLE3, head, adaptive=False)
    expected = answers(engine(folder, "torch", None), repetition_penalty=1.0)
    made: list[dict[tuple[int, int], list[int]]] = []
    for kernels in ("torch", "triton"):
        drafting, seen = engine(folder, kernels, spec, deferred=True), Counter[str]()
        runner: Any = drafting.core.runner
        runner.sampler.waits_for_tokens = True
        watched = Watched(runner, streams_of(expected), random.Random(1), seen)
        found = answers(drafting, repetition_penalty=1.0)
        assert [one["token_ids"] for one in found] == [one["token_ids"] for one in expected]
        assert min(seen["drafts in flight"], seen["late drafts"]) > 0 == seen["waits"]
        made.append({(each.seq.seed, each.count): each.drafts for each in watched.found})
    both = made[0].keys() & made[1].keys()
    assert len(both) > 5
    for key in both:
        count = min(len(own[key]) for own in made)
        assert made[0][key][:count] == made[1][key][:count]
