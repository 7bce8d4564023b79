"""Forced text equals the library's, and a look does no more work than a step uses."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest

from common.constraints.library import Matcher
from common.limits import MAX_FORCED_TEXT_BYTES
from tests.unit.common.constraints.test_check import HOSTILE
from tests.unit.worker.model.test_grammar_masks import (
    SIZE,
    TEXTS,
    choose,
    grammar_of,
    grammars,
    history,
    new_masks,
    params_of,
    schemas,
)
from worker.model.grammar_masks import GrammarMasks
from worker.model.text_ahead import MOST_MASKS, TextAhead

ROOM = np.empty(-(-SIZE // 32), np.uint32)
LONGEST = max(map(len, TEXTS))
FORCED = ["forced letters", "forced chain", "forced text"]


def compiled(grammar: str) -> Matcher:
    return grammars().begin(grammar).result().deep_copy()


def looked(matcher: Matcher) -> TextAhead:
    ahead = TextAhead(matcher)
    ahead.look(grammars(), ROOM)
    return ahead


def test_forced_text_equals_library() -> None:
    """On random walks the text is a beginning of the library's text, and nearly always all of it."""
    forced = [params.grammar for _, params in islice(schemas(3), 25)]
    forced += [
        grammar_of(one) for one in ({"choices": ["yes", "yes please", "no"]}, {"regex": "ab{2}(-[0-9]{2}){1,3}c"})
    ]
    number = found = 0
    for place, grammar in enumerate(forced):
        rnd, matcher = random.Random(place), compiled(grammar)
        for _ in range(60):
            if matcher.is_stopped():
                break
            text, expected = looked(matcher).text, matcher.deep_copy().compute_ff_bytes()
            assert expected.startswith(text)
            number, found = number + bool(expected), found + (text == expected)
            matcher.unsafe_compute_mask_ptr(ROOM.ctypes.data, ROOM.nbytes)
            ids = np.flatnonzero(np.unpackbits(ROOM.view(np.uint8), bitorder="little")).tolist()
            matcher.consume_token(choose(rnd, ids))
    assert number > 40
    assert found > 0.9 * number


class Counting:
    """A matcher that counts the masks that it and its copies compute."""

    def __init__(self, matcher: Matcher, counts: list[int]) -> None:
        self._matcher, self.counts = matcher, counts

    def __getattr__(self, name: str) -> Any:
        assert name != "compute_ff_bytes"
        return getattr(self._matcher, name)

    def deep_copy(self) -> Counting:
        return Counting(self._matcher.deep_copy(), self.counts)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.counts[-1] += 1
        self._matcher.unsafe_compute_mask_ptr(address, size)


@pytest.mark.parametrize("name", FORCED)
def test_forced_text_search_cost_is_bounded_per_step(name: str) -> None:
    """The first look takes at most MOST_MASKS masks; later looks only extend the known text."""
    counts = [0]
    matcher: Any = Counting(compiled(grammar_of(HOSTILE[name])), counts)
    ahead = TextAhead(matcher)
    ahead.look(grammars(), ROOM)
    assert 0 < counts[-1] <= MOST_MASKS
    assert 0 < len(ahead.text) < MAX_FORCED_TEXT_BYTES + LONGEST
    for _ in range(40):
        token = grammars().usual_tokens(ahead.text)[0]
        assert matcher.consume_token(token)
        before = ahead
        ahead = ahead.moved([TEXTS[token]], matcher)
        assert ahead is before
        counts.append(0)
        ahead.look(grammars(), ROOM)
        assert counts[-1] <= MOST_MASKS
        assert len(ahead.text) < MAX_FORCED_TEXT_BYTES + LONGEST
    assert sum(counts) < MOST_MASKS + 40 * LONGEST


@pytest.mark.parametrize("name", FORCED)
def test_steps_tokenize_only_used_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, output, masks = params_of(HOSTILE[name]), list[int](), new_masks()
    texts, usual = list[bytes](), grammars().usual_tokens

    def watched(text: bytes) -> list[int]:
        texts.append(text)
        return usual(text)

    monkeypatch.setattr(grammars(), "usual_tokens", watched)
    for _ in range(30):
        before = history(output, params)
        masks.confined({0: before})
        run = masks.forced(before, []) or [1]
        drawn = usual(texts[-1])[: 1 + len(output) % 3] if texts[-1] else run[:1]
        output += drawn
        masks.completes(before, drawn)
    assert len(output) > 40
    assert max(map(len, texts)) < MAX_FORCED_TEXT_BYTES + LONGEST


def test_unverified_forced_text_is_searched_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches become rarer while no drafts are verified; once they are, each step searches again."""
    params, output, masks, looks = params_of(HOSTILE["forced letters"]), list[int](), new_masks(), list[int]()
    look = TextAhead.look

    def counted(self: TextAhead, *arguments: Any) -> None:
        looks.append(len(output))
        look(self, *arguments)

    monkeypatch.setattr(TextAhead, "look", counted)
    (a,) = grammars().usual_tokens(b"a")
    masks.confined({0: history(output, params)})

    def step(masks: GrammarMasks, drawn: list[int]) -> None:
        before = history(output, params)
        output.extend(drawn)
        assert not masks.completes(before, drawn)
        masks.forced(before, drawn)

    for _ in range(200):
        step(masks, [a])
    assert 4 < len(looks) < 40
    looks.clear()
    for _ in range(10):
        step(masks, [a, a, a])
    assert len(looks) == 10
