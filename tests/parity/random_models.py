"""Random configurations of each architecture: log probabilities and greedy tokens of `transformers`, bits never vary.

    python -m tests.parity.random_models [--numbers 6] [architecture ...]

prints the largest difference of a log probability for each architecture. A new architecture needs an entry in DRAWS.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from common.config import MIXED, PREFILL_FIRST, Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from kernels.select import CPU, select_backend
from tests.checkpoints import make_checkpoint
from tests.parity.drafts import RandomProposer, Streams, streams_of
from tests.parity.test_equality import Watched, poisoned
from tests.parity.test_models import Models, Reference, load_reference
from tests.parity.test_ranks import Ranks, one
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine
from worker.model import model_runner
from worker.model.model_runner import ModelRunner

NUMBERS: Final = 6
MODEL_LEN, BLOCK_SIZE, BLOCKS = 96, 16, 64
# Blocks of the longest sequence alone.
FEW_BLOCKS = 6
MAX_TOKENS = 12
# A log probability may differ by this, and a greedy token may differ where the best two are closer than NEAR.
TOLERANCE, NEAR = 2e-4, 1e-3
# A smaller one than usual: it amplifies rounding errors less.
GAIN = 1.5
BITS = ("token_ids", "logprobs", "finish_reason")

Entries = dict[str, Any]
Draw = Callable[[random.Random], Entries]


ROPES = ("default", "linear", "llama3", "yarn")


def rope(rnd: random.Random, kinds: tuple[str, ...] = ROPES, **entries: Any) -> Entries:
    """Rope parameters of a random kind, and `entries`."""
    lengths = {"factor": rnd.choice([2.0, 8.0]), "original_max_position_embeddings": 64}
    kind = rnd.choice(kinds)
    own = {
        "default": {},
        "linear": {"factor": 3.0},
        "llama3": {**lengths, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {**lengths, "truncate": rnd.random() < 0.5},
    }[kind]
    return {"rope_type": kind, "rope_theta": rnd.choice([500.0, 10000.0, 1e6]), **own, **entries}


def ropes(rnd: random.Random) -> Entries:
    """Rope parameters by type of layer."""
    local = {"rope_type": "default", "rope_theta": rnd.choice([500.0, 10000.0])}
    return {"rope_parameters": {"full_attention": rope(rnd, truncate=True), "sliding_attention": local}}


def one_of(rnd: random.Random, **choices: list[Any]) -> Entries:
    """One of the choices of each entry."""
    return {name: rnd.choice(values) for name, values in choices.items()}


def whole_rope(rnd: random.Random, **choices: list[Any]) -> Entries:
    """`one_of` and a random rope of all layers."""
    return {"rope_parameters": rope(rnd), **one_of(rnd, **choices)}


def phi3(rnd: random.Random) -> Entries:
    """Longrope by its short factors, or another rope of a part of each head."""
    window = one_of(rnd, sliding_window=[None, 21, 47])
    partial = rnd.choice([0.5, 1.0])
    if rnd.random() < 0.5:
        return {**window, "head_dim": 24, "rope_parameters": rope(rnd, ROPES[:1], partial_rotary_factor=partial)}
    factors = {f"{kind}_factor": [1.0 + rnd.random() for _ in range(8)] for kind in ("short", "long")}
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    heads = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": rnd.choice([1, 2, 4])}
    return {**window, **heads, "original_max_position_embeddings": 1024, "rope_parameters": scaling}


def granite(rnd: random.Random, **choices: list[Any]) -> Entries:
    """Factors of embeddings, scores, residuals and logits."""
    return whole_rope(
        rnd,
        attention_bias=[False, True],
        embedding_multiplier=[1.0, 12.0],
        attention_multiplier=[0.1, 0.3],
        residual_multiplier=[0.5, 1.0],
        logits_scaling=[1.0, 8.0],
        **choices,
    )


def smollm3(rnd: random.Random) -> Entries:
    """Layers without rotation, listed or by interval."""
    return {
        **whole_rope(rnd, attention_bias=[False, True], mlp_bias=[False, True], use_sliding_window=[False, True]),
        "sliding_window": 19,
        **rnd.choice([{"no_rope_layer_interval": 2}, {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1]}]),
    }


def windows(rnd: random.Random) -> Entries:
    """Windows of Qwen's last layers."""
    return one_of(rnd, use_sliding_window=[False, True], sliding_window=[18, 40], max_window_layers=[0, 1])


def experts(rnd: random.Random, **choices: list[Any]) -> Entries:
    """Experts of odd sizes."""
    sizes = {"num_experts": [5, 8], "num_experts_per_tok": [1, 3], "moe_intermediate_size": [20, 48]}
    return one_of(rnd, norm_topk_prob=[False, True], **sizes, **choices)


def grouped(rnd: random.Random) -> Entries:
    """Experts in groups, shared experts, dense layers first."""
    groups = rnd.choice([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}])
    return {
        **groups,
        **one_of(rnd, n_routed_experts=[8, 12], num_experts_per_tok=[2, 3], moe_intermediate_size=[20, 48]),
        **one_of(rnd, n_shared_experts=[1, 2], first_k_dense_replace=[0, 1], routed_scaling_factor=[1.0, 2.5]),
    }


def latent(rnd: random.Random) -> Entries:
    """Latent attention of odd widths; all heads have keys of their own."""
    heads = rnd.choice([2, 3, 4])
    return {
        **grouped(rnd),
        **one_of(rnd, q_lora_rank=[None, 20, 40], kv_lora_rank=[22, 32], qk_nope_head_dim=[9, 16]),
        **one_of(rnd, qk_rope_head_dim=[6, 8], v_head_dim=[7, 20]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_parameters": rope(rnd),
    }


def deepseek_v2(rnd: random.Random) -> Entries:
    """Experts from all, or from the groups with the best."""
    # `transformers` rotates complex numbers, which lie at even places.
    entries = latent(rnd) | one_of(rnd, qk_nope_head_dim=[10, 16])
    return {**entries, "topk_method": "greedy" if entries["n_group"] == 1 else "group_limited_greedy"}


DRAWS: Final[dict[str, Draw]] = {
    "llama": lambda rnd: whole_rope(rnd, attention_bias=[False, True], mlp_bias=[False, True]),
    "qwen2": lambda rnd: whole_rope(rnd) | windows(rnd),
    "qwen3": lambda rnd: whole_rope(rnd, attention_bias=[False, True]) | windows(rnd),
    "mistral": lambda rnd: whole_rope(rnd, sliding_window=[None, 17, 40]),
    "phi3": phi3,
    "granite": lambda rnd: granite(rnd, mlp_bias=[False, True]),
    "granitemoe": lambda rnd: granite(rnd, num_local_experts=[3, 8], num_experts_per_tok=[1, 2]),
    "smollm3": smollm3,
    "gemma2": lambda rnd: whole_rope(
        rnd,
        attention_bias=[False, True],
        query_pre_attn_scalar=[8, 24],
        attn_logit_softcapping=[None, 10.0, 50.0],
        final_logit_softcapping=[None, 10.0, 30.0],
        sliding_window=[17, 40],
    ),
    "gemma3_text": lambda rnd: (
        ropes(rnd)
        | one_of(
            rnd,
            attention_bias=[False, True],
            query_pre_attn_scalar=[8, 24],
            final_logit_softcapping=[None, 10.0],
            sliding_window=[17, 40],
            sliding_window_pattern=[2, 3],
        )
    ),
    "olmo2": lambda rnd: whole_rope(rnd, attention_bias=[False, True]),
    "olmo3": lambda rnd: (
        ropes(rnd) | one_of(rnd, attention_bias=[False, True], sliding_window=[17, 40], num_hidden_layers=[3, 4])
    ),
    "qwen2_moe": lambda rnd: (
        whole_rope(rnd, qkv_bias=[False, True], decoder_sparse_step=[1, 2])
        | experts(rnd, shared_expert_intermediate_size=[24, 40])
    ),
    "qwen3_moe": lambda rnd: whole_rope(rnd, attention_bias=[False, True], mlp_only_layers=[[], [1]]) | experts(rnd),
    "mixtral": lambda rnd: whole_rope(
        rnd, sliding_window=[None, 17], num_local_experts=[3, 8], num_experts_per_tok=[1, 2]
    ),
    "glm4_moe": lambda rnd: (
        grouped(rnd)
        | one_of(rnd, attention_bias=[False, True], use_qk_norm=[False, True], norm_topk_prob=[False, True])
        | {"rope_parameters": rope(rnd, partial_rotary_factor=rnd.choice([0.5, 1.0]))}
    ),
    "gpt_oss": lambda rnd: whole_rope(
        rnd, num_local_experts=[3, 6], num_experts_per_tok=[1, 2], sliding_window=[17, 40], swiglu_limit=[2.0, 7.0]
    ),
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": latent,
    "deepseek_v32": lambda rnd: latent(rnd) | {"q_lora_rank": 24},
}


def drawn(architecture: str, number: int) -> Entries:
    """Entries of config.json: widths and heads of all architectures, then an architecture's own."""
    rnd = random.Random(f"{architecture} {number}")
    heads, kv_heads = rnd.choice([(4, 2), (4, 1), (6, 2), (3, 3), (2, 1), (5, 5), (8, 2), (3, 1)])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * rnd.choice([12, 16, 20]),
        "head_dim": rnd.choice([8, 16, 20, 24, 32]),
        "intermediate_size": rnd.choice([96, 136, 148]),
        "num_hidden_layers": rnd.choice([2, 3]),
        "vocab_size": rnd.choice([300, 333, 384]),
        "tie_word_embeddings": rnd.random() < 0.5,
        "rms_norm_eps": rnd.choice([1e-6, 1e-5]),
        **DRAWS[architecture](rnd),
    }


def prompts(vocab: int) -> list[list[int]]:
    """Two that outgrow FEW_BLOCKS together, one token, a common beginning, and one that repeats itself."""
    rnd = random.Random(vocab)

    def tokens(count: int) -> list[int]:
        return [rnd.randrange(5, vocab) for _ in range(count)]

    shared = tokens(40)
    return [tokens(15), shared + tokens(20), tokens(1), shared + tokens(43), tokens(12) * 5]


def check(architecture: str, number: int, folder: Path, with_ranks: bool = True) -> float:
    """Compares one configuration with `transformers` and with itself: the largest difference of a log probability."""
    shape = drawn(architecture, number)
    make_checkpoint(folder, architecture, seed=number, gain=GAIN, **shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "select_backend", lambda *choice: poisoned(select_backend(*choice)))
        config = config_of(folder)
        model_config = ModelConfig.from_folder(folder)
        runner = ModelRunner(with_special_tokens(config, model_config), model_config)
    asked = prompts(shape["vocab_size"])
    streams = bits_of_every_setting(folder, runner, asked)
    runner.allocate_kv_cache(128)
    models = Models(load_reference(folder), runner)
    difference = compare(models, asked, streams)
    if with_ranks and shape["num_attention_heads"] % 2 == 0:
        difference = max(difference, check_ranks(folder, asked, models.reference))
    return difference


def config_of(folder: Path, **options: Any) -> Config:
    """Settings of an engine that changes no bits."""
    given = {"num_kvcache_blocks": BLOCKS, "max_num_batched_tokens": 512, "max_num_seqs": 8, **options}
    shared = {"max_model_len": MODEL_LEN, "kv_cache_block_size": BLOCK_SIZE, "enable_prefix_caching": False}
    return Config(model=str(folder), dtype="float32", kernels=CPU, **{**shared, **given})


# Options of an engine, and what its batches must have had.
SETTINGS: Final[dict[str, tuple[Entries, str]]] = {
    "batched": ({"scheduling_policy": MIXED}, "several"),
    "chunked": ({"scheduling_policy": MIXED, "max_num_batched_tokens": 20}, "chunks"),
    "cached": ({"enable_prefix_caching": True, "max_num_seqs": 1}, "hits"),
    "preempted": ({"scheduling_policy": PREFILL_FIRST, "num_kvcache_blocks": FEW_BLOCKS}, "preemptions"),
    "drafts": ({"speculative_config": SpeculativeConfig(3, NGRAM, adaptive=False)}, "drafts"),
}


def bits_of_every_setting(folder: Path, runner: ModelRunner, asked: list[list[int]]) -> list[list[int]]:
    """Asserts that tokens and log probabilities have equal bits in every setting: the greedy streams."""
    greedy = SamplingParams(temperature=0.0, logprobs=3, ignore_eos=True, max_tokens=MAX_TOKENS)
    params = [replace(greedy, temperature=float(i >= len(asked)), seed=i) for i in range(2 * len(asked))]
    expected, _ = answers(folder, runner, asked * 2, params, {"max_num_seqs": 1})
    for name, (options, wanted) in SETTINGS.items():
        found, seen = answers(folder, runner, asked * 2, params, options, streams_of(expected))
        for answer, other in zip(found, expected, strict=True):
            assert {key: answer[key] for key in BITS} == {key: other[key] for key in BITS}, name
        assert seen[wanted], f"{name}: no {wanted}"
    return [answer["token_ids"] for answer in expected[: len(asked)]]


def answers(
    folder: Path,
    runner: ModelRunner,
    asked: list[list[int]],
    params: list[SamplingParams],
    options: Entries,
    streams: Streams | None = None,
) -> tuple[list[Entries], Counter[str]]:
    """Answers to the prompts, and properties of the batches. `streams` are drafted from, some rightly."""
    config = config_of(folder, **options)
    runner.allocate_kv_cache(config.num_kvcache_blocks)
    watched = Watched(runner)
    engine = LLMEngine(config, runner=watched)
    scheduler = engine.core.scheduler
    if config.speculative_config is not None:
        scheduler.drafter.proposer = RandomProposer(streams or {}, runner.model_config.vocab_size, random.Random(1))
    found = engine.generate(asked, params)
    watched.seen["preemptions"] += scheduler.lifecycle.num_preemptions
    watched.seen["drafts"] += scheduler.spec_stats.total_draft_tokens
    watched.seen["several"] += watched.seen["plain steps"]
    return found, watched.seen


def compare(models: Models, asked: list[list[int]], streams: list[list[int]]) -> float:
    """Compares log probabilities at several positions, and asserts that greedy tokens are those of `transformers`."""
    largest = 0.0
    for prompt, stream in zip(asked, streams, strict=True):
        tokens = prompt + stream
        expected = models.reference.logits(tokens).log_softmax(-1)
        best = expected[len(prompt) - 1 : -1].topk(2)
        for i, (token, ids) in enumerate(zip(stream, best.indices.tolist(), strict=True)):
            margin = float(best.values[i, 0] - best.values[i, 1])
            assert token == ids[0] or margin < NEAR, f"token {i} after {len(prompt)}: {token}, not {ids[0]}"
        borders = sorted({0, len(prompt) // 2, len(prompt), len(prompt) + 1, len(tokens)})
        for start, end in pairwise(borders):
            found = models.logits(tokens[:end], start).log_softmax(-1)
            largest = max(largest, float((found - expected[end - 1]).abs().max()))
    assert largest < TOLERANCE, f"log probabilities differ by {largest:.1e}"
    return largest


def check_ranks(folder: Path, asked: list[list[int]], reference: Reference) -> float:
    """Compares log probabilities of two ranks, and asserts that a row's bits do not depend on its batch and chunks."""
    largest, ranks = 0.0, Ranks(folder, 2)
    try:
        seqs = [Sequence(prompt, BLOCK_SIZE) for prompt in asked]
        for i, seq in enumerate(seqs):
            seq.block_table = list(range(10 * i + 10, 10 * i + 20))
        counts = [seq.num_tokens for seq in seqs]
        together = ranks.logits(ScheduledBatch({seq.id: seq for seq in seqs}, counts, sum(counts)))
        for prompt, row in zip(asked, together, strict=True):
            assert torch.equal(ranks.logits(one(prompt, 0))[0], row)
            half = len(prompt) // 2
            assert not half or torch.equal(ranks.logits(one(prompt, half))[0], row)
            expected = reference.logits(prompt)[-1].log_softmax(-1)
            largest = max(largest, float((row.log_softmax(-1) - expected).abs().max()))
    finally:
        ranks.close()
    assert largest < TOLERANCE, f"log probabilities of two ranks differ by {largest:.1e}"
    return largest


def main() -> None:
    """Prints the largest difference of each architecture."""
    parser = argparse.ArgumentParser(description="Compares random configurations with transformers.")
    parser.add_argument("architectures", nargs="*", default=list(DRAWS), metavar="architecture")
    parser.add_argument("--numbers", type=int, default=NUMBERS, help="configurations of each")
    options = parser.parse_args()
    for architecture in options.architectures:
        found = []
        for number in range(options.numbers):
            with tempfile.TemporaryDirectory() as folder:
                found.append(check(architecture, number, Path(folder)))
        print(f"{architecture}: {len(found)} configurations, largest difference {max(found):.1e}", flush=True)


if __name__ == "__main__":
    main()
