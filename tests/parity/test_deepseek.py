"""DeepSeek-V3 and V3.2 against transformers, in float32: logits of prefill, chunks and decode; greedy streams."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.parity.test_models import Models, close, load_models

NEW_TOKENS = 64
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
CHECKPOINTS: dict[str, dict[str, Any]] = {
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
        prompt = models.random_prompts([length], seed=length)[0]
        close(models.logits(prompt, 0), models.reference_logits(prompt)[-1])


def test_chunked_prefill_and_decode_logits(models: Models) -> None:
    prompt = models.random_prompts([150], seed=1)[0]
    expected = models.reference_logits(prompt)
    borders = [0, 1, 37, 64, 100, *range(140, 151)]
    for start, end in pairwise(borders):
        close(models.logits(prompt[:end], start), expected[end - 1])


def test_greedy_streams(models: Models) -> None:
    """The reference's best token at every place of our stream is our next one: so its greedy stream is the same."""
    prompts = models.random_prompts([1, 2, 17, 64, 130, 300], seed=2)
    streams = models.greedy(prompts, NEW_TOKENS)
    for prompt, stream in zip(prompts, streams, strict=True):
        best = models.reference_logits(prompt + stream[:-1])[len(prompt) - 1 :].argmax(-1)
        assert stream == best.tolist(), f"prompt of {len(prompt)} tokens"
    assert len({tuple(stream) for stream in streams}) == len(streams), "streams do not tell prompts apart"
    assert all(len(set(stream)) > NEW_TOKENS // 4 for stream in streams), "streams loop"
