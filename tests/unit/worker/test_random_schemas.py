"""A thousand random schemas: finished answers validate, and are equal under preemption, with drafts, on ranks and after
moves."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.config import Config, SpeculativeConfig
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from common.params.config_parts import NGRAM
from common.text.tokenizer import Tokenizer
from tests.schemas import random_schema
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "checkpoint"
TOKENIZER = Tokenizer.from_folder(DEMO)
PROMPT = TOKENIZER.encode("Tell me a story.")
CONFIG = Config(model=str(DEMO), kernels="cpu", num_kvcache_blocks=512, max_model_len=256, max_num_batched_tokens=256)
SCHEMAS = 1000
SOME = 200
MOST_TOKENS = 100
COMPLETE = {"constraint", "eos"}
Answer = tuple[list[int], str | None]


def served_schemas() -> Iterator[dict[str, Any]]:
    rnd, checker = random.Random(2026), GrammarChecker(TOKENIZER.added_tokens, {0})
    while True:
        schema = random_schema(rnd)
        # Fewer endless rows of blanks, which this model cannot avoid.
        schema["x-guidance"] = {"whitespace_flexible": rnd.random() < 0.2}
        try:
            checker.check(Constraint.of({"json_schema": schema}), optional_space=False)
        except InvalidFieldError:
            continue
        yield schema


@cache
def requests() -> list[dict[str, Any]]:
    """Parameters of requests, each with its schema."""
    return [
        {
            "constraint": {"json_schema": schema},
            "temperature": (0.0, 0.7, 1.3)[i % 3],
            "max_tokens": MOST_TOKENS,
            "seed": i,
            "num_drafts": i % 6,
        }
        for i, schema in enumerate(islice(served_schemas(), SCHEMAS))
    ]


def answers(config: Config, params: list[dict[str, Any]]) -> tuple[list[Answer], LLMEngine]:
    if config.speculative_config is None:
        params = [{name: value for name, value in one.items() if name != "num_drafts"} for one in params]
    engine = LLMEngine(config)
    found = engine.generate([PROMPT] * len(params), params)
    return [(answer["token_ids"], answer["finish_reason"]) for answer in found], engine


@cache
def expected() -> list[Answer]:
    return answers(CONFIG, requests())[0]


def validated(params: list[dict[str, Any]], found: list[Answer]) -> int:
    """Validates finished answers by jsonschema and the requested schemas; returns their number."""
    finished = 0
    for one, (tokens, reason) in zip(params, found, strict=True):
        if reason in COMPLETE:
            schema = one["constraint"]["json_schema"]
            jsonschema.Draft202012Validator(schema).validate(json.loads(TOKENIZER.decode(tokens)))
            finished += 1
    return finished


@pytest.mark.long
def test_every_finished_answer_validates() -> None:
    assert validated(requests(), expected()) > SCHEMAS / 2


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3, 5])
def test_drafts_change_no_token(size: int) -> None:
    spec = SpeculativeConfig(num_speculative_tokens=size, method=NGRAM, adaptive=False)
    found, engine = answers(replace(CONFIG, speculative_config=spec), requests())
    assert found == expected()
    assert engine.core.scheduler.postprocessor.spec_stats.total_accepted_tokens > SCHEMAS / 2


@pytest.mark.long
def test_preemption_keeps_answers() -> None:
    found, engine = answers(replace(CONFIG, num_kvcache_blocks=24), requests())
    assert found == expected()
    assert engine.core.scheduler.lifecycle.num_preemptions > SCHEMAS / 10


@pytest.mark.long
def test_two_ranks_keep_grammars_too() -> None:
    """Sums over two ranks round differently from one rank's: a numerics class with equal answers."""
    config, params = replace(CONFIG, tensor_parallel_size=2, deferred_output=True), requests()[:SOME]
    found, engine = answers(config, params)
    engine.close()
    assert validated(params, found) > SOME / 2
    again, engine = answers(replace(config, num_kvcache_blocks=24), params)
    engine.close()
    assert again == found
    assert engine.core.scheduler.lifecycle.num_preemptions > SOME / 10


@pytest.mark.long
def test_answers_resume_from_any_position() -> None:
    """As after the death of a worker: each answer resumes from some of its positions, at a fresh engine."""
    rnd, engine = random.Random(7), LLMEngine(CONFIG)
    core, going_on = engine.core, list[tuple[Sequence, list[int]]]()
    for given, (tokens, _) in zip(requests()[:SOME], expected(), strict=False):
        params = engine.io.sampling_params({**given, "num_drafts": None})
        for have in rnd.sample(range(len(tokens)), min(4, len(tokens))):
            seq = Sequence(
                [*PROMPT, *tokens[:have]],
                CONFIG.kv_cache_block_size,
                params,
                num_prompt_tokens=len(PROMPT),
                seed=given["seed"],
            )
            going_on.append((seq, tokens))
    core.add_group([seq for seq, _ in going_on])
    while core.has_unfinished():
        core.step()
    assert len(going_on) > SOME
    for seq, tokens in going_on:
        assert seq.completion_token_ids == tokens
