"""GGUF files against the checkpoints that they are worth, in transformers and float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import Config, SpeculativeConfig
from common.params.config_parts import MTP
from common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint, make_mtp_checkpoint
from tests.covering import slow_but
from tests.gguf_files import QUANTIZED, convert
from tests.parity.test_models import Models, close, load_reference, longrope, make_runner
from tests.parity.test_ranks import Ranks, one
from worker.llm_engine import LLMEngine

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LOCAL = {"rope_type": "default", "rope_theta": 500.0}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
# A file -> architecture and shape of the checkpoint, type of the file's matrices.
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{f"llama-{kind}": ("llama", {}, kind) for kind in (*QUANTIZED, "Q4_K_M")},
    "llama-rope-freqs-untied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}, "Q4_K"),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, "Q8_0"),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}, "Q5_K"),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False, "head_dim": 48}, "Q6_K"),
    "qwen2-moe": ("qwen2_moe", {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}, "Q4_K"),
    "qwen3-moe": ("qwen3_moe", {"moe_intermediate_size": 256}, "Q4_K"),
    "granite": ("granite", {}, "Q4_0"),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "num_hidden_layers": 3}, "Q4_K"),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 4}, "Q5_K"),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}, "Q4_1"),
    "mixtral": ("mixtral", {"intermediate_size": 256}, "Q4_K"),
    "granite-moe": ("granitemoe", {"intermediate_size": 256}, "Q4_K"),
    "olmo2": ("olmo2", {}, "Q5_0"),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 5, "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}},
        "Q3_K",
    ),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 256}, "MXFP4"),
    "gpt-oss-floats": ("gpt_oss", {"tie_word_embeddings": False}, "F16"),
    "glm4-moe": ("glm4_moe", {"moe_intermediate_size": 256, "use_qk_norm": True}, "Q4_K"),
    "deepseek-v2": ("deepseek_v2", LATENT | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}, "Q4_K"),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
        "Q5_K",
    ),
    "phi3-longrope-partial": ("phi3", {"rope_parameters": longrope(12, partial_rotary_factor=0.75)}, "Q4_K"),
}
KEPT = {
    *("llama-Q4_K_M", "llama-Q6_K", "llama-Q5_0", "llama-Q3_K", "llama-rope-freqs-untied", "qwen2-yarn", "qwen3-moe"),
    *("gemma3", "gpt-oss", "deepseek-v3-yarn"),
}


@pytest.fixture(scope="module", params=slow_but(KEPT, list(FILES)))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    architecture, shape, kind = FILES[request.param]
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), architecture, **{**WIDE, **shape})
    file: Path = folder / "m.gguf"
    file.write_bytes(convert(folder, kind).to_bytes())
    return Models(load_reference(folder), make_runner(file))


@pytest.mark.parametrize("length", [1, 65, 300])
def test_log_probabilities(models: Models, length: int) -> None:
    """To 1e-5, or to three times the error of the same weights in transformers and float32."""
    prompt = models.random_prompts([length], seed=length)[0]
    floats, exact = models.reference.log_probs(prompt)
    error = (models.logits(prompt, 0).double().log_softmax(-1) - exact).abs().max()
    assert error < max(1e-5, 3 * float((floats - exact).abs().max()))


def test_greedy_streams(models: Models) -> None:
    prompts = models.random_prompts([1, 15, 64, 130], seed=2)
    for prompt, stream in zip(prompts, models.greedy(prompts), strict=True):
        expected = models.reference.greedy(prompt)
        assert stream[: len(expected)] == expected


@pytest.mark.parametrize("name", slow_but({"gpt-oss"}, ["gpt-oss", "granite-moe", "deepseek-v3-yarn", "mixtral"]))
def test_two_ranks_equal_one_rank(tmp_path: Path, name: str) -> None:
    """Each rank reads its rows and columns of tensors that the file splits, stacks or transposes."""
    architecture, shape, kind = FILES[name]
    file = make_checkpoint(tmp_path, architecture, **{**WIDE, **shape}) / "m.gguf"
    file.write_bytes(convert(tmp_path, kind).to_bytes())
    prompt = [7 + 3 * i for i in range(65)]
    expected, ranks = make_runner(file), Ranks(file, 2)
    try:
        close(ranks.logits(one(prompt, 0))[0], Models(load_reference(tmp_path), expected).logits(prompt, 0))
    finally:
        ranks.close()


def test_layer_that_drafts_changes_no_token(tmp_path: Path) -> None:
    file = make_mtp_checkpoint(tmp_path, "glm4_moe", **WIDE) / "m.gguf"
    file.write_bytes(convert(tmp_path, "Q8_0").to_bytes())
    options: dict[str, Any] = {"model": str(file), "dtype": "float32", "max_model_len": 96, "num_kvcache_blocks": 32}
    drafting = LLMEngine(Config(speculative_config=SpeculativeConfig(2, MTP, adaptive=False), **options))
    plain = LLMEngine(Config(**options))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [[7 + 3 * i for i in range(20)], [90, 91]]
    found = [answer["token_ids"] for answer in drafting.generate(prompts, params)]
    assert found == [answer["token_ids"] for answer in plain.generate(prompts, params)]
    assert drafting.core.scheduler.spec_stats.total_draft_tokens > 0
    drafting.close()
    plain.close()
