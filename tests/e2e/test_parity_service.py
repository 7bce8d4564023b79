"""Greedy tokens through router and worker equal `transformers`' generate in float32."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb

from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.e2e.service import Answer, Service, generate, running_service

NEW_TOKENS = 24
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-gqa-tied": {"architecture": "qwen3"},
    "llama-mha-untied": {
        "architecture": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "llama-gqa-tied": {
        "architecture": "llama",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "qwen3-one-kv-head-untied": {
        "architecture": "qwen3",
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
}
SERVICES = {
    "prefix-caching": ["--prefix-caching"],
    "no-prefix-caching": ["--no-prefix-caching"],
    "small-pool": ["--prefix-caching", "--max-num-batched-tokens", "128", "--kv-cache-memory"],
}
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
# One sequence of full length and little more, so that twenty at once preempt each other.
SMALL_POOL_BLOCKS = 40


def small_pool_bytes(checkpoint: Path) -> int:
    """Bytes of keys and values in float32 that SMALL_POOL_BLOCKS blocks take."""
    config = json.loads((checkpoint / "config.json").read_text())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    return int(per_token * BLOCK_SIZE * SMALL_POOL_BLOCKS)


def prompts(vocab_size: int) -> list[list[int]]:
    """Twenty prompts of 1 to 300 tokens, some sharing a prefix that crosses block borders."""
    rnd = random.Random(7)
    shared = [rnd.randrange(3, vocab_size) for _ in range(100)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 300, *(rnd.randrange(1, 300) for _ in range(10))]
    fresh = [[rnd.randrange(3, vocab_size) for _ in range(n)] for n in lengths]
    return [shared[: len(p) // 2] + p[len(p) // 2 :] if i % 3 == 0 else p for i, p in enumerate(fresh)]


# Of the shapes, parity/test_models.py has many more in one process: what processes add shows in any one of them.
@pytest.fixture(
    scope="module",
    params=["qwen3-gqa-tied", *(pytest.param(name, marks=pytest.mark.long) for name in list(SHAPES)[1:])],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, **SHAPES[request.param])
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    """Pairs of prompt and greedy continuation by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    pairs = []
    for prompt in prompts(model.config.vocab_size):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            )
        pairs.append((prompt, out[0, len(prompt) :].tolist()))
    return pairs


@pytest.mark.parametrize("options", slow_but({"small-pool"}, list(SERVICES)))
def test_greedy_equals_transformers(
    checkpoint: Path, reference: list[tuple[list[int], list[int]]], tmp_path: Path, options: str
) -> None:
    flags = ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), *SERVICES[options]]
    if options == "small-pool":
        flags.append(str(small_pool_bytes(checkpoint)))
    with running_service(tmp_path, checkpoint, worker_options=flags) as service:
        answers = ask_all(service, [prompt for prompt, _ in reference])
        for (prompt, expected), answer in zip(reference, answers, strict=True):
            assert answer.token_ids == expected, f"prompt of {len(prompt)} tokens"
        load = service.wait_idle()
        assert load.free_blocks == load.total_blocks
        assert options != "small-pool" or load.total_blocks == SMALL_POOL_BLOCKS
    assert len({tuple(tokens) for _, tokens in reference}) == len(reference), "streams must differ between prompts"
    assert all(len(set(tokens)) > NEW_TOKENS // 3 for _, tokens in reference), "streams must not loop"


def ask_all(service: Service, all_prompts: list[list[int]]) -> list[Answer]:
    """All prompts at once, so that they share batches."""

    def ask(prompt: list[int]) -> Answer:
        params = pb.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling_params=params,
            output_options=pb.OutputOptions(return_token_ids=True),
        )
        return generate(service.stub, request)

    with ThreadPoolExecutor(len(all_prompts)) as pool:
        return list(pool.map(ask, all_prompts))
