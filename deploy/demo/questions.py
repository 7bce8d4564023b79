"""The held-out questions: forty of each family, and forty for tools, all from the side that training never sees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.demo import chat, tools
from deploy.demo.families import FAMILIES, Exchange, draw
from deploy.demo.tools import DemoTool, Round

PER_FAMILY = 40
_SEED = 4712
_QUOTING = ("spelling", "reversing")
"""Families whose word is asked for in quotes, where the tokenizer shows the model its single letters."""


def questions() -> list[Exchange]:
    """The same 240 questions every time, family by family, no content asked twice."""
    rng = random.Random(_SEED)
    chosen: dict[str, Exchange] = {}
    for count, family in enumerate(FAMILIES, start=1):
        while len(chosen) < count * PER_FAMILY:
            exchange = draw(rng, family, reserved=True)
            if family in _QUOTING and '"' not in exchange.user:
                continue
            chosen.setdefault(f"{family} {exchange.key}", exchange)
    return list(chosen.values())


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation, and the answer that the model should give.

    Attributes:
        family: its category in the scores.
        messages: in transformers' form.
        tools: given to the model.
        expected: text of the answer, with its calls.
    """

    family: str
    messages: list[dict[str, Any]]
    tools: Sequence[DemoTool]
    expected: str


def tool_rounds() -> list[tuple[Round, tuple[DemoTool, ...]]]:
    """The same 40 questions for tools every time, each with the tools that it is given. New names are in quotes."""
    rng = random.Random(_SEED + 1)
    chosen: dict[str, tuple[Round, tuple[DemoTool, ...]]] = {}
    while len(chosen) < PER_FAMILY:
        kinds = [tools.made_up_tool(rng, reserved=True), *rng.sample(tools.TOOLS, 2)]
        asked = kinds[0] if rng.random() < 0.15 else rng.choice(kinds[1:])
        made = tools.draw_round(rng, asked, reserved=True)
        given = [asked, rng.choice([kind for kind in kinds if kind is not asked])]
        rng.shuffle(given)
        chosen.setdefault(made.key, (made, tuple(given)))
    return list(chosen.values())


def tool_questions() -> list[Asked]:
    """Each of `tool_rounds` as it is asked, with its results, and without the tool."""
    made: list[Asked] = []
    for one, given in tool_rounds():
        user = {"role": "user", "content": one.user}
        calls = [{"type": "function", "function": {"name": one.tool.name, "arguments": dict(c)}} for c in one.calls]
        results = [{"role": "tool", "content": result} for result in one.results]
        called: list[dict[str, Any]] = [user, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        made.append(Asked("calls", [user], given, tools.written_calls(one.tool, one.calls)))
        made.append(Asked("results", called, given, one.assistant))
        if one.tool in tools.TOOLS:
            others = tuple(tool for tool in given if tool is not one.tool and tool in tools.TOOLS)
            made.append(Asked("no tool", [user], others, chat.UNKNOWN))
    return made


def every_question() -> list[Asked]:
    """All questions, those without tools first."""
    plain = [Asked(one.family, [{"role": "user", "content": one.user}], (), one.assistant) for one in questions()]
    return [*plain, *tool_questions()]
