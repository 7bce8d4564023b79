"""Whole models on AITER's back end over Triton's, in the interpreter, with a stand-in in AITER's place.

That loader, layers and both back ends go together; not what AITER's kernels compute (docs/reference/rocm.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from kernels.aiter.backend import AiterBackend
from kernels.aiter.dispatch import SINCE
from kernels.aiter.library import AiterLibrary
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.target import TARGETS, Settings
from tests.checkpoints import make_checkpoint
from tests.kernels.aiter.fake_aiter import lay
from tests.kernels.aiter.watched import TAGS, forget
from tests.kernels.dense_layers import relative
from tests.kernels.row_alone import multiply_rows_alone
from tests.quantizers import SCHEMES, quantize_checkpoint
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model import model_runner
from worker.model.model_runner import ModelRunner
from worker.model.speculation import verify_check
from worker.model.speculation.verify_check import verifies_exactly

# Every projection has whole blocks; and as little as shuffled experts can have.
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
}
SMALL = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}
ROTATION = {"aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache"}
BLOCKS = {"aiter.ops.quant:per_group_quant_hip", "aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale"}
EXPERTS = {"aiter.fused_moe:fused_moe", "aiter.ops.shuffle:shuffle_weight"}
# Architecture -> whether its weights are stored in FP8 by blocks, and functions of AITER that it needs.
MODELS = {
    "llama": (True, BLOCKS | ROTATION),
    "qwen3_moe": (True, BLOCKS | EXPERTS),
    "deepseek_v3": (True, BLOCKS | EXPERTS),
    "gpt_oss": (False, ROTATION | {"aiter.tuned_gemm:gemm_a16w16"}),
    # Heads are normed and rotated in part, so that is our Triton kernel; a dense layer comes before the experts.
    "glm4_moe": (False, EXPERTS | {"aiter.tuned_gemm:gemm_a16w16", "aiter.ops.topk:biased_grouped_topk"}),
}


OTHERS = {"glm4_moe": pytest.mark.slow}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AiterLibrary]:
    folder = tmp_path_factory.mktemp("aiter")
    lay(folder, TAGS[-1])
    sys.path.insert(0, str(folder))
    forget()
    yield AiterLibrary.load(SINCE)
    sys.path.remove(str(folder))
    forget()


def runner_of(folder: Path, kernels: str) -> ModelRunner:
    used = Config(
        model=str(folder), kernels=kernels, dtype="bfloat16", max_model_len=64, batch_invariant=kernels != "aiter"
    )
    runner = ModelRunner(used, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(4)
    return runner


def logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of two prompts in one step, and of a decode of both."""
    seqs = [Sequence([7, 77, 177, 277, 377], 16), Sequence([99, 98], 16)]
    for block, seq in enumerate(seqs):
        seq.block_table = [block]
    found = [step(runner, seqs, [5, 2])]
    for seq in seqs:
        seq.num_computed_tokens = seq.num_tokens
        seq.append_token(55)
    return torch.cat((*found, step(runner, seqs, [1, 1])))


def step(runner: ModelRunner, seqs: list[Sequence], counts: list[int]) -> torch.Tensor:
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, counts, sum(counts))
    return runner.run_model(runner.prepare_model(batch))


# Checkpoints are quantized number by number, in Python.
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.long if MODELS[name][0] else OTHERS.get(name, ())) for name in MODELS],
)
def test_logits_equal_pytorch(
    architecture: str, library: AiterLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_blocks, functions = MODELS[architecture]
    # The first layer of DeepSeek's is dense.
    layers = 1 if architecture in ("llama", "qwen3_moe") else 2
    shape: dict[str, Any] = {**(WHOLE_BLOCKS if by_blocks else SMALL), "num_hidden_layers": layers}
    if by_blocks and functions >= EXPERTS:
        shape["moe_intermediate_size"] = 256
    make_checkpoint(tmp_path, architecture, **shape)
    if by_blocks:
        quantize_checkpoint(tmp_path, SCHEMES["deepseek"])
    expected = logits(runner_of(tmp_path, "torch"))
    settings = Settings(TARGETS["gfx942"], batch_invariant=False)

    def select(*given: Any) -> AiterBackend:
        *_, expert_parallel = given
        assert not expert_parallel
        return AiterBackend(TritonBackend(batch_invariant=False), library, settings, expert_parallel)

    monkeypatch.setattr(model_runner, "select_backend", select)
    library._uncalled.update(library.functions)
    found = logits(runner_of(tmp_path, "aiter"))
    # Both round to bfloat16 after each operation; AITER rounds inputs to FP8 too. Wrong numbers would be 1.4 apart.
    assert relative(found, expected) < (0.2 if by_blocks else 0.1)
    assert functions <= library.called


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3"])
def test_drafts_are_verified_with_the_bits_of_decodes_or_refused(
    architecture: str, library: AiterLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AITER's attention computes decodes by another kernel than a few rows, in another order of sums."""
    shape: dict[str, Any] = {**SMALL, "num_hidden_layers": 2}
    folder = make_checkpoint(tmp_path, architecture, **shape)
    target = TARGETS["gfx942"]

    def select(name: str, isa: str, batch_invariant: bool, expert_parallel: bool) -> AiterBackend:
        return AiterBackend(TritonBackend(batch_invariant), library, Settings(target, batch_invariant), expert_parallel)

    monkeypatch.setattr(model_runner, "select_backend", select)
    multiply_rows_alone(monkeypatch)
    monkeypatch.setattr(verify_check, "_CONTEXTS", (30,))
    config = Config(
        model=str(folder),
        kernels="aiter",
        dtype="bfloat16",
        max_model_len=64,
        speculative_config=SpeculativeConfig(4, NGRAM),
    )
    assert verifies_exactly(ModelRunner(config, ModelConfig.from_folder(folder)), 4)
    with pytest.raises(ModelError, match="leave out either it or --no-batch-invariant"):
        ModelRunner(replace(config, batch_invariant=False), ModelConfig.from_folder(folder))
