"""Drafts of every method on ranks, over other dtypes, and in sequences preempted or moved in the middle of drafts:
every stream and every logprob equals plain decoding.

The ranks are threads here (tests/parity/test_ranks.py).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.config_parts import DRAFT_MODEL, EAGLE3, MTP, NGRAM
from common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint, make_eagle3_head, make_mtp_checkpoint
from tests.covering import slow_but
from tests.parity.draws import changes_of_logits
from tests.parity.test_ranks import BLOCK_SIZE, POOL, Ranks
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import Sequence

K: Final = 4
MODEL_LEN: Final = 96
# A pool of one longest sequence, so that others are preempted.
TIGHT: Final = MODEL_LEN // BLOCK_SIZE
NUM_WORKLOADS, NUM_LONG = 3, 200
FORMS: Final[dict[str, dict[str, Any]]] = {
    "float32": {},
    "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
}
Made: TypeAlias = tuple[Path, SpeculativeConfig]
# A prompt, its parameters, and a seed that no other one of its workload has.
Asked: TypeAlias = tuple[list[int], SamplingParams, int]


def of_lookup(path: Path, architecture: str = "qwen3", most: int = K) -> Made:
    return make_checkpoint(path / "target", architecture), SpeculativeConfig(
        most, NGRAM, prompt_lookup_min=1, adaptive=False
    )


def of_a_head(path: Path, architecture: str = "qwen3", most: int = K) -> Made:
    target = make_checkpoint(path / "target", architecture)
    head = make_eagle3_head(path / "head", target, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return target, SpeculativeConfig(most, EAGLE3, str(head), adaptive=False)


def of_a_layer(path: Path, architecture: str = "glm4_moe", most: int = K) -> Made:
    target = make_mtp_checkpoint(path / "model", architecture, num_hidden_layers=2)
    return target, SpeculativeConfig(most, MTP, adaptive=False)


def of_a_model(path: Path, architecture: str = "qwen3", most: int = K) -> Made:
    small = make_checkpoint(path / "small", seed=3, num_hidden_layers=1)
    return make_checkpoint(path / "target", architecture), SpeculativeConfig(
        most, DRAFT_MODEL, str(small), adaptive=False
    )


METHODS: Final[dict[str, Callable[..., Made]]] = {
    NGRAM: of_lookup,
    EAGLE3: of_a_head,
    MTP: of_a_layer,
    DRAFT_MODEL: of_a_model,
}


class OnRanks:
    """A runner of an engine: all ranks, which must say the same."""

    def __init__(self, ranks: Ranks, seen: Counter[str]) -> None:
        self.ranks = ranks
        self.seen = seen

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.seen["behind drafts in flight"] += len(batch.drafts_in_flight)
        first, *others = self.ranks.outputs(batch)
        for other in others:
            assert (other.token_ids, other.draft_token_ids) == (first.token_ids, first.draft_token_ids)
        return first


class Answers:
    """Streams and logprobs of sequences, by seed."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, bytes] = {}

    def take(self, seqs: list[Sequence], outputs: list[RequestOutput]) -> None:
        seeds = {seq.id: seq.seed for seq in seqs}
        for out in outputs:
            seed = seeds[out.request_id]
            self.tokens[seed] = self.tokens.get(seed, []) + list(out.output_tokens)
            self.logprobs[seed] = self.logprobs.get(seed, b"") + out.logprobs


def workload(rnd: random.Random) -> list[Asked]:
    """Prompts that repeat themselves, their parameters, and the number of the sequence, which is its seed too.

    The first two change no logits, so they are launched after drafts in flight.
    """
    made = []
    for seed in range(5):
        piece = [rnd.randrange(5, 300) for _ in range(rnd.randint(1, 12))]
        prompt = (piece * 50)[: rnd.randint(20, 50)]
        params = SamplingParams(
            temperature=rnd.choice([0.0, 0.8, 1.2]),
            max_tokens=rnd.randint(10, 40),
            ignore_eos=rnd.random() < 0.7,
            num_drafts=rnd.choice([None, None, None, 0, 2]),
            logprobs=rnd.choice([None, None, 2]),
            **(changes_of_logits(rnd, 0.3, 300) if seed > 1 else {}),
        )
        if seed > 1 and rnd.random() < 0.8:
            params = replace(params, allowed_token_ids=tuple(piece[:2]))
        made.append((prompt, params, seed))
    return made


def answer(config: Config, ranks: Ranks, asked: list[Asked], rnd: random.Random | None, seen: Counter[str]) -> Answers:
    """The answers of one engine; with `rnd` of several in turn: unfinished answers resume at the next one."""
    answers = Answers()
    seqs = [Sequence(prompt, BLOCK_SIZE, params, seed=seed) for prompt, params, seed in asked]
    while seqs:
        ranks.all(lambda rank: ranks.runners[rank].allocate_kv_cache(config.num_kvcache_blocks))
        core = EngineCore(config, OnRanks(ranks, seen))
        core.add_group(seqs)
        steps = 10**6 if rnd is None else rnd.randint(2, 25)
        while core.has_unfinished() and steps:
            answers.take(seqs, core.step().outputs)
            core.scheduler.check_integrity()
            steps -= 1
        core.close()
        stats = core.scheduler.spec_stats
        seen += Counter(drafts=stats.total_draft_tokens, right=stats.total_accepted_tokens)
        seen["preemptions"] += core.scheduler.lifecycle.num_preemptions
        left = [seq for seq in seqs if not seq.is_finished]
        seen["moved"] += len(left)
        seen["moved with drafts"] += sum(bool(seq.spec_token_ids) for seq in left)
        seqs = [
            Sequence(
                seq.token_ids, BLOCK_SIZE, seq.sampling_params, num_prompt_tokens=seq.num_prompt_tokens, seed=seq.seed
            )
            for seq in left
        ]
    return answers


def compare(made: Made, given: dict[str, Any], size: int, numbers: Iterable[int]) -> Counter[str]:
    """Compares workloads on `size` ranks with plain decoding; returns counts of the cases they met."""
    folder, spec = made
    seen: Counter[str] = Counter()
    plain, drafting = (Ranks(folder, size, speculative_config=each, **given) for each in (None, spec))
    for number in numbers:
        rnd = random.Random(f"{spec.method} {given} {size} {number}")
        asked = workload(rnd)
        settings: dict[str, Any] = {
            "max_model_len": MODEL_LEN,
            "num_kvcache_blocks": TIGHT if number % 3 else POOL,
            "max_num_batched_tokens": rnd.choice([12, 64, 512]),
            "scheduling_policy": rnd.choice(SCHEDULING_POLICIES),
            "enable_prefix_caching": rnd.random() < 0.5,
            "deferred_output": number % 2 == 0,
        }
        config = Config(model=str(folder), kv_cache_block_size=BLOCK_SIZE, **settings)
        expected = answer(replace(config, deferred_output=False), plain, asked, None, Counter())
        for moves in (None, rnd):
            # What is in flight would write into the pool of the next engine.
            own = replace(config, speculative_config=spec, deferred_output=config.deferred_output and moves is None)
            for runner in drafting.runners:
                # As on GPUs, where no launch waits for tokens: the ranks draft after tokens still on the device.
                runner.sampler.waits_for_tokens = own.deferred_output and number % 4 == 0
            found = answer(own, drafting, asked, moves, seen)
            assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs), (number, settings, moves)
        seen["workloads"] += 1
    for ranks in (plain, drafting):
        ranks.close()
    return seen


def check(made: Made, form: str, size: int, numbers: range) -> None:
    seen = compare(made, FORMS[form], size, numbers)
    assert 0 < seen["right"] < seen["drafts"]
    assert seen["moved"] > 0
    assert seen["preemptions"] > 0
    # The host proposes n-gram drafts only after known tokens.
    assert (seen["behind drafts in flight"] > 0) is (made[1].method != NGRAM)


@pytest.mark.parametrize("form", slow_but({"fp8 KV"}, list(FORMS)))
@pytest.mark.parametrize("method", slow_but({EAGLE3}, list(METHODS)))
def test_streams_equal_plain_decoding(method: str, form: str, tmp_path: Path) -> None:
    check(METHODS[method](tmp_path), form, 1, range(NUM_WORKLOADS))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "form"), list(zip(METHODS, itertools.cycle(FORMS), strict=False)))
def test_streams_of_two_ranks(method: str, form: str, tmp_path: Path) -> None:
    check(METHODS[method](tmp_path), form, 2, range(NUM_WORKLOADS))


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("method", list(METHODS))
def test_many_workloads(method: str, form: str, size: int, tmp_path: Path) -> None:
    check(METHODS[method](tmp_path), form, size, range(NUM_WORKLOADS, NUM_LONG // (4 if size > 1 else 1)))
