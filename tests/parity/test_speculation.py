"""Speculation never changes a token: with any drafts every stream equals that of plain decoding.

The test draws the drafts, right, wrong and both, any number in any step, so the proof covers every proposer. The
workloads, settings and references are test_equality.py's.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from common.config import MIXED, SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from kernels.select import CPU_BACKENDS
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.covering import covering
from tests.parity.drafts import RandomProposer, Streams, streams_of
from tests.parity.draws import changes_of_logits
from tests.parity.test_equality import (
    ALONE,
    NUM_WORKLOADS,
    Setting,
    alone,
    check,
    fails,
    kernels,
    loaded,
    settings,
    texts,
)
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.engine.core import EngineCore, EngineDeadError
from worker.engine.sequence import Sequence
from worker.engine.speculation.drafter import Drafter
from worker.llm_engine import LLMEngine
from worker.model.sampled_rows import SampledRows
from worker.model.speculation.rejection_sampler import RejectionSampler

__all__ = ["kernels"]

MOST_DRAFTS: Final = (1, 3, 8)
BUDGETS: Final = (20, 512)


@pytest.mark.parametrize(
    ("kernels", "policy", "budget", "drafts"),
    covering(list(CPU_BACKENDS), SCHEDULING_POLICIES, BUDGETS, MOST_DRAFTS),
    indirect=["kernels"],
)
def test_streams_equal_plain_decoding(policy: str, budget: int, drafts: int, kernels: str) -> None:
    numbers, seen = itertools.cycle(range(NUM_WORKLOADS)), Counter[str]()
    for setting in settings(policy, budget, kernels):
        seen += check(next(numbers), replace(setting, drafts=drafts))
    assert 0 < seen["right drafts"] < seen["drafts"]
    assert seen["plain steps"] > 0
    assert seen["preemptions"] > 0
    assert seen["hits"] > 0
    assert seen["rows before their token"] > 0
    assert seen["logprobs"] > 0
    assert (seen["drafts beside prompts"] > 0) == (policy == MIXED)


# Dtypes of model, KV cache and packed weights.
FORMS: Final[dict[str, dict[str, Any]]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}


@pytest.mark.parametrize(("architecture", "form"), covering(list(ARCHITECTURES), list(FORMS)))
def test_every_architecture(architecture: str, form: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    given: dict[str, Any] = {"model": str(folder), "max_model_len": 96, "num_kvcache_blocks": 40, **FORMS[form]}
    drafting = LLMEngine(Config(**given, speculative_config=SpeculativeConfig(8, NGRAM, adaptive=False)))
    plain = LLMEngine(Config(**given))
    rnd = random.Random(f"{architecture} {form}")
    for _ in range(2):
        prompts = [[rnd.randrange(5, 300) for _ in range(rnd.randint(1, 40))] for _ in range(5)]
        params = [_params(rnd) for _ in prompts]
        expected = plain.generate(prompts, params)
        drafting.core.scheduler.drafter.proposer = RandomProposer(streams_of(expected), 300, rnd)
        found = drafting.generate(prompts, params)
        names = "token_ids", "finish_reason", "logprobs"
        assert [[one.get(name) for name in names] for one in found] == [
            [one.get(name) for name in names] for one in expected
        ]
    stats = drafting.core.scheduler.spec_stats
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens
    drafting.close()
    plain.close()


def _params(rnd: random.Random) -> dict[str, Any]:
    return {
        "temperature": rnd.choice([0.0, 0.8, 1.2]),
        "seed": rnd.randrange(2**64),
        "max_tokens": rnd.randint(1, 40),
        "ignore_eos": rnd.random() < 0.5,
        "logprobs": rnd.choice([None, None, 2]),
        **changes_of_logits(rnd, 0.4, 300),
    }


@pytest.mark.parametrize("every", [1, 3])
def test_logit_digests_equal_plain_decoding(every: int) -> None:
    setting = Setting(drafts=4)
    runner = loaded(setting.block_size, setting.kernels)
    runner.allocate_kv_cache(64)
    rnd = random.Random(every)
    prompts = [rnd.choice(texts())[: rnd.randint(1, 30)] for _ in range(6)]

    def digests(streams: Streams | None) -> tuple[list[list[int]], dict[int, dict[int, int]]]:
        config = setting.config if streams else replace(setting, drafts=0).config
        core = EngineCore(config, runner)
        if streams:
            core.scheduler.drafter.proposer = RandomProposer(streams, 300, random.Random(every))
        params = [SamplingParams(max_tokens=30, temperature=t, frequency_penalty=t / 2) for t in (0, 0.5, 1) * 2]
        stops = replace(params[0], stop_token_ids=tuple(range(5, 1000, 16)))
        seqs = [
            Sequence(prompt, 16, own, seed=i, logits_every=every)
            for i, (prompt, own) in enumerate(zip(prompts, [stops, *params[1:]], strict=True))
        ]
        core.add_group(seqs)
        found: dict[int, dict[int, int]] = {i: {} for i in range(len(seqs))}
        while core.has_unfinished():
            for out in core.step().outputs:
                found[next(i for i, seq in enumerate(seqs) if seq.id == out.request_id)] |= out.logit_digests or {}
        assert not streams or core.scheduler.spec_stats.total_accepted_tokens > 0
        return [seq.output_tokens for seq in seqs], found

    plain = digests(None)
    assert all(plain[1].values())
    assert digests({(i, 0): tokens for i, tokens in enumerate(plain[0])}) == plain


MUTANTS = [
    Mutant("a token behind a wrong draft", RejectionSampler, "accepted", "first : first + count + 1]",
           "first : first + count + 2]"),
    Mutant("no draft is compared", RejectionSampler, "accept", "!= metadata.draft_token_ids", "< 0"),
    Mutant("noise of the last row", SampledRows, "of", "np.int64)[sequences] - behind", "np.int64)[sequences]"),
    Mutant("penalties without drafts", SampledRows, "histories", "if count else history", "if False else history"),
    Mutant("drafts behind a token in flight", Drafter, "_proposed", "if seq.num_placeholder:", "if False:"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    for number in range(NUM_WORKLOADS):
        alone(number, ALONE.kernels)
    each = itertools.chain.from_iterable(itertools.starmap(settings, itertools.product(SCHEDULING_POLICIES, BUDGETS)))
    with mutant.applied():
        assert fails(
            (replace(setting, drafts=4) for setting in each),
            objections=(*OBJECTIONS, EngineDeadError, IndexError, ValueError),
        )
