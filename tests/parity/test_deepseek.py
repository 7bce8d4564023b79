"""DeepSeek-V3 and V3.2 against transformers, in float32: logits of prefill, chunks and decode; greedy streams."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import ARCHITECTURES, DEFAULT_SHAPE, make_checkpoint
from tests.parity.test_models import (
    NEW_TOKENS,
    POOL,
    Models,
    Reference,
    check_chunked_prefill_and_decode,
    check_prefill,
    load_models,
    make_runner,
)
from tests.quantizers import SCHEMES as QUANTIZERS
from tests.quantizers import quantize_checkpoint, write_safetensors
from worker.config.model_config import ModelConfig, ModelError
from worker.model.models.deepseek_v3 import DeepseekV3ForCausalLM
from worker.model.models.deepseek_v32 import DeepseekV32ForCausalLM
from worker.weights.checkpoint import load_weights

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
# What an MTP layer has beside a decoder layer's tensors, in the published checkpoints.
MTP = {
    "eh_proj.weight": (64, 128),
    "enorm.weight": (64,),
    "hnorm.weight": (64,),
    "embed_tokens.weight": (384, 64),
    "shared_head.norm.weight": (64,),
    "shared_head.head.weight": (384, 64),
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "v2": {"architecture": "deepseek_v2"},
    "v2-yarn-odd-untied": {
        "architecture": "deepseek_v2",
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 60,
        "kv_lora_rank": 22,
        "q_lora_rank": 20,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
    "v3-tied": {"architecture": "deepseek_v3"},
    "v3-yarn-odd-untied": {
        "architecture": "deepseek_v3",
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 60,
        "kv_lora_rank": 23,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 6,
        "v_head_dim": 7,
        "n_routed_experts": 15,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 28,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "rms_norm_eps": 1e-4,
    },
    "v3-no-query-latent": {
        "architecture": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "kv_lora_rank": 64,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.7,
        "first_k_dense_replace": 0,
    },
    "v32-tied": {"architecture": "deepseek_v32"},
    "v32-yarn-odd-untied": {
        "architecture": "deepseek_v32",
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "hidden_size": 60,
        "kv_lora_rank": 30,
        "qk_rope_head_dim": 10,
        "v_head_dim": 11,
        "index_n_heads": 21,
        "index_head_dim": 26,
        "index_topk": 65,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "attention_bias": True,
    },
    "v32-many-heads": {
        "architecture": "deepseek_v32",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "index_n_heads": 32,
        "index_head_dim": 8,
        "index_topk": 128,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
    },
}


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(make_checkpoint(tmp_path_factory.mktemp(request.param), **CHECKPOINTS[request.param]))


def test_prefill_logits(models: Models) -> None:
    for length in (1, 16, 65, 300):
        check_prefill(models, length)


def test_chunked_prefill_and_decode_logits(models: Models) -> None:
    check_chunked_prefill_and_decode(models)


def test_greedy_streams(models: Models) -> None:
    """The reference's best token at every place of our stream is our next one: so its greedy stream is the same."""
    prompts = models.random_prompts([1, 2, 17, 64, 130, 300], seed=2)
    streams = models.greedy(prompts)
    for prompt, stream in zip(prompts, streams, strict=True):
        best = models.reference.logits(prompt + stream[:-1])[len(prompt) - 1 :].argmax(-1)
        assert stream == best.tolist(), f"prompt of {len(prompt)} tokens"
    assert len({tuple(stream) for stream in streams}) == len(streams), "streams do not tell prompts apart"
    assert all(len(set(stream)) > NEW_TOKENS // 4 for stream in streams), "streams loop"


def test_block_bytes_equal_block_size(models: Models) -> None:
    runner = models.runner
    pools = [runner._kv_cache, runner._kv_cache.index]
    nbytes = sum(pool.data[:, :, :POOL].nbytes for pool in pools if pool is not None)
    assert nbytes == POOL * runner.kv_block_bytes


def test_fp8_block_checkpoint_equals_dequantized(tmp_path: Path) -> None:
    """The layout that DeepSeek publishes: equal bits with a float checkpoint of the dequantized weights."""
    shape: dict[str, Any] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "qk_nope_head_dim": 40,
        "kv_lora_rank": 150,
    }
    folder = make_checkpoint(tmp_path / "a", "deepseek_v32", **shape)
    other = make_checkpoint(tmp_path / "b", "deepseek_v32", **shape)
    worths = quantize_checkpoint(folder, QUANTIZERS["deepseek"])
    write_safetensors(other / "model.safetensors", {name: ("F32", worth) for name, worth in worths.items()})
    tokens = list(range(5, 60))
    actual, expected = (Models(Reference(each, None), make_runner(each)).logits(tokens, 0) for each in (folder, other))
    assert torch.equal(actual, expected)


def test_mtp_layers_are_kept_for_speculation(tmp_path: Path) -> None:
    """MTP layers change no logits, and a draft model finds them in the same folder; without the config entry they are
    surplus."""
    folder = make_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    prompt = list(range(5, 40))
    models = load_models(folder)
    before = models.logits(prompt, 0)
    layer = DeepseekV3ForCausalLM.layer_shapes(ModelConfig.from_folder(folder), 2)
    drafts = {f"model.layers.3.{name}": shape for name, shape in {**layer, **MTP}.items()}
    save_file({name: torch.randn(shape) for name, shape in drafts.items()}, folder / "mtp.safetensors")
    (folder / "model.safetensors").rename(folder / "main.safetensors")
    assert torch.equal(replace(models, runner=make_runner(folder)).logits(prompt, 0), before)
    kept = load_weights(folder, drafts, kept=("model.", "lm_head."))
    assert kept.take("model.layers.3.eh_proj.weight").shape == (64, 128)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"surplus model\.layers\.3\.eh_proj\.weight"):
        make_runner(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be an integer of at least 0"),
        ({"mlp_layer_types": ["dense", "moe", "dense"]}, "mlp_layer_types must say dense or sparse for each layer"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types .* is not supported for DeepseekV32ForCausalLM"),
        ({"mlp_bias": True}, "mlp_bias is not supported for DeepseekV32ForCausalLM"),
    ],
)
def test_settings_with_other_numerics_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {
        **DEFAULT_SHAPE,
        **ARCHITECTURES["deepseek_v32"][1],
        "architectures": ["DeepseekV32ForCausalLM"],
        **entries,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        DeepseekV32ForCausalLM.tensor_shapes(ModelConfig.from_folder(tmp_path))
