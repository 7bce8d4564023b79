"""Whole models on AITER's back end over Triton's, in the interpreter, with a stand-in in AITER's place.

That loader, layers and both back ends go together; not what AITER's kernels compute (docs/rocm.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from kernels.aiter_backend import SINCE, AiterBackend
from kernels.aiter_library import AiterLibrary
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.target import TARGETS, Settings
from tests.checkpoints import make_checkpoint
from tests.kernels.dense_layers import relative
from tests.kernels.fake_aiter import lay
from tests.kernels.test_aiter_backend import TAGS, forget
from tests.kernels.test_quantized_checkpoints import logits
from tests.quantizers import SCHEMES, quantize_checkpoint
from worker import model_runner
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner

# Every projection has whole blocks.
SHAPE = {
    "hidden_size": 256,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
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
}


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


# Checkpoints are quantized number by number, in Python.
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.long if MODELS[name][0] else ()) for name in MODELS]
)
def test_logits_are_those_of_pytorch(
    architecture: str, library: AiterLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_blocks, functions = MODELS[architecture]
    # The first layer of DeepSeek's is dense.
    shape: dict[str, Any] = {**SHAPE, "num_hidden_layers": 2 if architecture == "deepseek_v3" else 1}
    if functions >= EXPERTS:
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
    # Both round to bfloat16 behind each operation; AITER rounds inputs to FP8 too. Other numbers would be 1.4 apart.
    assert relative(found, expected) < (0.2 if by_blocks else 0.05)
    assert functions <= library.called
