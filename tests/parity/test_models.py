"""Our models against transformers, in float32: logits of prefill, chunks and decode; greedy streams."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.cpu.instruction_sets import AUTO
from kernels.select import CPU_BACKENDS
from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.native import backend_or_skip
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

pytestmark = pytest.mark.each_value

BLOCK_SIZE = 16
POOL = 128
NEW_TOKENS = 64
# Steering is the same for all models.
PENALIZED = ("qwen3-gqa-tied", "llama-biases", "qwen3-moe")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def longrope(pairs: int, **entries: float) -> dict[str, Any]:
    """Rope parameters for `pairs` pairs of rotated dimensions, whose two lists of factors differ."""
    factors = {"short_factor": [1.0 + 0.02 * i for i in range(pairs)], "long_factor": [1.5 + i for i in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **entries}


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3-gqa-tied": {"architecture": "qwen3"},
    "qwen3-sharded-untied": {
        "architecture": "qwen3",
        "tie_word_embeddings": False,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "max_shard_size": "100KB",
    },
    "qwen3-one-kv-head-bf16": {
        "architecture": "qwen3",
        "dtype": "bfloat16",
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "llama-mha-untied": {"architecture": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama-biases": {
        "architecture": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 20,
        "rms_norm_eps": 1e-4,
    },
    "llama-rope-llama3": {"architecture": "llama", "rope_parameters": LLAMA3},
    "llama-rope-linear": {
        "architecture": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    },
    "llama-rope-yarn": {"architecture": "llama", "head_dim": 64, "rope_parameters": YARN},
    "llama-rope-yarn-mscale": {
        "architecture": "llama",
        "num_key_value_heads": 1,
        "head_dim": 96,
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    },
}

CHECKPOINTS |= {
    "qwen2": {"architecture": "qwen2"},
    "qwen2-window-untied": {
        "architecture": "qwen2",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen2-one-kv-head-yarn-bf16": {
        "architecture": "qwen2",
        "dtype": "bfloat16",
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": YARN,
    },
    "mistral": {"architecture": "mistral", "tie_word_embeddings": False},
    "mistral-window": {"architecture": "mistral", "sliding_window": 48, "num_key_value_heads": 1, "head_dim": 32},
    "mistral-wide-heads-bf16": {
        "architecture": "mistral",
        "dtype": "bfloat16",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 96,
    },
    "phi3-window": {"architecture": "phi3", "tie_word_embeddings": False, "sliding_window": 47},
    "phi3-longrope-short-bf16": {
        "architecture": "phi3",
        "dtype": "bfloat16",
        "head_dim": 16,
        "original_max_position_embeddings": 1024,
        "rope_parameters": longrope(8),
    },
    # `transformers` takes the long factors from the second token on, and the angles of the first are 0.
    "phi3-longrope-long-partial": {
        "architecture": "phi3",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "original_max_position_embeddings": 1,
        "rope_parameters": longrope(12, partial_rotary_factor=0.75, attention_factor=1.2),
    },
    "granite": {"architecture": "granite"},
    "granite-biases-untied": {
        "architecture": "granite",
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "attention_bias": True,
        "mlp_bias": True,
        "logits_scaling": 8.0,
    },
    "granite-yarn-bf16": {"architecture": "granite", "dtype": "bfloat16", "head_dim": 64, "rope_parameters": YARN},
    "smollm3": {"architecture": "smollm3"},
    "smollm3-window-biases": {
        "architecture": "smollm3",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "no_rope_layers": [1, 0, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 33,
    },
    "smollm3-untied-yarn": {
        "architecture": "smollm3",
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": YARN,
    },
}

# Bounded scores and logits, two rotary embeddings, norms of all heads together.
CHECKPOINTS |= {
    "gemma2": {"architecture": "gemma2"},
    "gemma2-one-kv-head-biases-bf16": {
        "architecture": "gemma2",
        "dtype": "bfloat16",
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 33,
        "attn_logit_softcapping": None,
    },
    "gemma2-wide-heads-untied": {
        "architecture": "gemma2",
        "tie_word_embeddings": False,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 96,
        "attn_logit_softcapping": 12.0,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "gemma3": {"architecture": "gemma3_text"},
    "gemma3-linear-rope-bf16": {
        "architecture": "gemma3_text",
        "dtype": "bfloat16",
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
        },
    },
    "gemma3-capped-logits-untied": {
        "architecture": "gemma3_text",
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "attention_bias": True,
        "final_logit_softcapping": 6.0,
        "sliding_window": 17,
    },
    "olmo2": {"architecture": "olmo2"},
    "olmo2-one-kv-head-biases-tied": {
        "architecture": "olmo2",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
    "olmo2-mha-bf16": {
        "architecture": "olmo2",
        "dtype": "bfloat16",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 96,
    },
    "olmo3": {"architecture": "olmo3"},
    "olmo3-yarn": {
        "architecture": "olmo3",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": YARN,
        },
    },
    "olmo3-layer-types-bf16": {
        "architecture": "olmo3",
        "dtype": "bfloat16",
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 33,
    },
}

# Mixtures: experts that two ranks cannot share out evenly, one KV head, heads of 64 and 96, tied and untied heads.
CHECKPOINTS |= {
    "qwen2-moe": {"architecture": "qwen2_moe"},
    "qwen2-moe-window-untied": {
        "architecture": "qwen2_moe",
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 3,
    },
    "qwen2-moe-no-biases-bf16": {
        "architecture": "qwen2_moe",
        "dtype": "bfloat16",
        "num_key_value_heads": 4,
        "head_dim": 32,
        "mlp_only_layers": [0],
        "qkv_bias": False,
    },
    "qwen3-moe": {"architecture": "qwen3_moe"},
    "qwen3-moe-some-layers-dense": {
        "architecture": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 96,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "qwen3-moe-window-bf16": {
        "architecture": "qwen3_moe",
        "dtype": "bfloat16",
        "head_dim": 64,
        "num_experts": 6,
        "use_sliding_window": True,
        "sliding_window": 33,
    },
    "qwen3-window": {
        "architecture": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "mixtral-window": {"architecture": "mixtral", "sliding_window": 50},
    "mixtral-mha-untied": {
        "architecture": "mixtral",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_local_experts": 3,
    },
    "mixtral-one-kv-head-top-3": {
        "architecture": "mixtral",
        "num_key_value_heads": 1,
        "head_dim": 96,
        "num_experts_per_tok": 3,
        "sliding_window": 130,
    },
    "glm4-moe": {"architecture": "glm4_moe"},
    "glm4-moe-biases-untied": {
        "architecture": "glm4_moe",
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attention_bias": True,
        "use_qk_norm": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
    },
    "glm4-moe-one-group": {
        "architecture": "glm4_moe",
        "num_hidden_layers": 4,
        "head_dim": 96,
        "first_k_dense_replace": 2,
        "n_routed_experts": 5,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "gpt-oss": {"architecture": "gpt_oss", "head_dim": 64},
    "gpt-oss-one-kv-head-untied": {
        "architecture": "gpt_oss",
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "head_dim": 96,
        "num_local_experts": 3,
        "sliding_window": 64,
        "swiglu_limit": 2.0,
    },
    "gpt-oss-layer-types-bf16": {
        "architecture": "gpt_oss",
        "dtype": "bfloat16",
        "num_attention_heads": 6,
        "head_dim": 32,
        "sliding_window": 17,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
}


# One with each way of attention, of positions and of experts.
KEPT = {
    "qwen2-window-untied",
    "qwen3-gqa-tied",
    "mistral-window",
    "phi3-longrope-long-partial",
    "granite-biases-untied",
    "gemma2",
    "gemma3-linear-rope-bf16",
    "olmo3-yarn",
    "smollm3-window-biases",
    "llama-biases",
    "llama-rope-llama3",
    "llama-rope-yarn-mscale",
    "qwen2-moe-window-untied",
    "qwen3-moe",
    "qwen3-window",
    "mixtral-window",
    "glm4-moe-biases-untied",
    "gpt-oss-layer-types-bf16",
}


@dataclass
class Reference:
    """A checkpoint in transformers."""

    folder: Path
    model: Any
    _streams: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]"""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    def log_probs(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [V] after the last token: computed in float32 and in float64. Their difference is float32's own."""
        floats = self.logits(tokens)[-1].double().log_softmax(-1)
        # Other implementations of experts have no float64.
        self.model.set_experts_implementation("eager")
        try:
            self.model.double()
            return floats, self.logits(tokens)[-1].double().log_softmax(-1)
        finally:
            self.model.float()

    def greedy(self, prompt: list[int], **given: Any) -> list[int]:
        """A stream of NEW_TOKENS, computed once for all back ends."""
        key = (*prompt, *given.items())
        if key not in self._streams:
            with torch.inference_mode():
                out = self.model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, **given)
            self._streams[key] = out[0, len(prompt) :].tolist()
        return self._streams[key]


@dataclass
class Models:
    """The same checkpoint in transformers and here."""

    reference: Reference
    runner: ModelRunner

    def random_prompts(self, lengths: list[int], seed: int) -> list[list[int]]:
        rnd = random.Random(seed)
        return [[rnd.randrange(5, self.runner.model_config.vocab_size) for _ in range(n)] for n in lengths]

    def logits(self, tokens: list[int], start: int) -> torch.Tensor:
        """float32 [V] after the last token, with the first `start` tokens' keys and values stored already."""
        seq = Sequence(tokens, BLOCK_SIZE)
        seq.block_table = list(range(POOL))[::-1]
        seq.num_computed_tokens = start
        batch = ScheduledBatch({seq.id: seq}, [len(tokens) - start], len(tokens) - start)
        return self.runner.run_model(self.runner.prepare_model(batch))[0]

    def greedy(self, prompts: list[list[int]], **given: Any) -> list[list[int]]:
        """Streams of NEW_TOKENS, all prompts in one batch, the first half of each prompt in a chunk of its own."""
        params = SamplingParams(temperature=0.0, **given)
        seqs = [Sequence(prompt, BLOCK_SIZE, params) for prompt in prompts]
        free = list(range(POOL))
        for seq in seqs:
            seq.block_table = [free.pop() for _ in range(-(-(seq.num_tokens + NEW_TOKENS) // BLOCK_SIZE))]
        self._step({seq: max(1, seq.num_tokens // 2) for seq in seqs})
        for _ in range(NEW_TOKENS):
            self._step({s: s.num_tokens - s.num_computed_tokens for s in seqs if s.num_completion_tokens < NEW_TOKENS})
        return [seq.completion_token_ids for seq in seqs]

    def _step(self, scheduled: dict[Sequence, int]) -> None:
        counts = list(scheduled.values())
        output = self.runner.forward(ScheduledBatch({seq.id: seq for seq in scheduled}, counts, sum(counts)))
        for seq, count in scheduled.items():
            seq.num_computed_tokens += count
            for token in output.token_ids.get(seq.id, ()):
                seq.append_token(token)


@pytest.fixture(scope="module", params=slow_but(KEPT, list(CHECKPOINTS)))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_reference(make_checkpoint(tmp_path_factory.mktemp(request.param), **CHECKPOINTS[request.param]))


@pytest.fixture(scope="module", params=list(CPU_BACKENDS))
def models(request: pytest.FixtureRequest, reference: Reference) -> Models:
    backend_or_skip(request.param)
    return Models(reference, make_runner(reference.folder, request.param))


def load_reference(folder: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Reference(folder, model.eval())


def load_models(folder: Path) -> Models:
    return Models(load_reference(folder), make_runner(folder))


def make_runner(folder: Path, kernels: str = AUTO) -> ModelRunner:
    config = Config(
        model=str(folder), dtype="float32", kernels=kernels, kv_cache_block_size=BLOCK_SIZE, max_model_len=1024
    )
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(POOL)
    return runner


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.1e}"


@pytest.mark.parametrize("length", [1, 16, 65, 300])
def test_prefill_logits(models: Models, length: int) -> None:
    check_prefill(models, length)


def test_chunked_prefill_and_decode_logits(models: Models) -> None:
    check_chunked_prefill_and_decode(models)


def check_prefill(models: Models, length: int) -> None:
    """The last row's logits of one prefill."""
    prompt = models.random_prompts([length], seed=length)[0]
    close(models.logits(prompt, 0), models.reference.logits(prompt)[-1])


def check_chunked_prefill_and_decode(models: Models) -> None:
    """Logits at the end of each of several chunks, and of the decodes after them."""
    prompt = models.random_prompts([150], seed=1)[0]
    expected = models.reference.logits(prompt)
    borders = [0, 1, 37, 64, 100, *range(140, 151)]
    for start, end in pairwise(borders):
        close(models.logits(prompt[:end], start), expected[end - 1])


def test_greedy_streams(models: Models) -> None:
    prompts = models.random_prompts([1, 2, 15, 16, 17, 64, 130, 300], seed=2)
    streams = models.greedy(prompts)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream == models.reference.greedy(prompt), f"prompt of {len(prompt)} tokens"
    assert len({tuple(stream) for stream in streams}) == len(streams), "streams do not tell prompts apart"
    assert all(len(set(stream)) > NEW_TOKENS // 4 for stream in streams), "streams loop"


@pytest.mark.parametrize("penalty", [1.3, 0.8])
@pytest.mark.parametrize("reference", PENALIZED, indirect=True)
def test_greedy_streams_with_a_repetition_penalty(models: Models, penalty: float) -> None:
    prompts = models.random_prompts([1, 17, 64, 300], seed=3)
    for prompt, stream in zip(prompts, models.greedy(prompts, repetition_penalty=penalty), strict=True):
        assert stream == models.reference.greedy(prompt, repetition_penalty=penalty), f"prompt of {len(prompt)} tokens"
