"""Conversations with tools: the tools, questions that need one, their results, and how they are written.

The model calls the tools that the conversation lists, and copies names from there. Every seventh question is about a
made-up tool, so that it does not only learn the tools below.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.demo import chat, words
from deploy.demo.families import held_out

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
Turn = tuple[str, str]
"""Role and content, as the chat template writes them."""

CITIES = (
    *("Paris", "London", "Berlin", "Rome", "Madrid", "Lisbon", "Vienna", "Oslo", "Athens", "Dublin", "Prague"),
    *("Warsaw", "Helsinki", "Zurich", "Munich", "Milan", "Kyiv", "Cairo", "Nairobi", "Lagos", "Tokyo", "Seoul"),
    *("Delhi", "Mumbai", "Beijing", "Sydney", "Lima", "Boston", "Chicago", "Toronto", "Denver", "Havana", "Porto"),
)
SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "cold", "warm", "hot", "stormy")
_LARGEST_FACTOR = 99


@dataclass(frozen=True, slots=True)
class DemoTool:
    """A tool as a conversation lists it.

    Attributes:
        name: of the tool.
        arguments: their names, each with its JSON type.
    """

    name: str
    arguments: Mapping[str, str]

    def definition(self) -> dict[str, Any]:
        """The tool as transformers takes it."""
        properties = {name: {"type": kind} for name, kind in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


WEATHER = DemoTool("get_weather", {"city": "string"})
TIME = DemoTool("get_time", {"city": "string"})
MULTIPLY = DemoTool("multiply", {"a": "integer", "b": "integer"})
TOOLS = (WEATHER, TIME, MULTIPLY)


@dataclass(frozen=True, slots=True)
class Round:
    """A question that a tool answers. `key` names its content, as in an `Exchange`; `calls` are in order."""

    tool: DemoTool
    key: str
    user: str
    calls: Sequence[Mapping[str, Any]]
    results: Sequence[str]
    assistant: str


def render(turns: Sequence[Turn], tools: Sequence[DemoTool] = (), system: str = "") -> str:
    """A conversation in the form that the checkpoint's chat template writes."""
    first = [system] if system else []
    if tools:
        listed = [json.dumps({"name": tool.name, "arguments": dict(tool.arguments)}) for tool in tools]
        first.append("\n".join(("<tools>", *listed, "</tools>")))
    every = [("system", "\n".join(first)), *turns] if first else turns
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in every)


def written_calls(tool: DemoTool, calls: Sequence[Mapping[str, Any]]) -> str:
    """The content of an answer that calls."""
    made = [json.dumps({"name": tool.name, "arguments": dict(arguments)}) for arguments in calls]
    return "\n".join(f"{CALL_START}\n{call}\n{CALL_END}" for call in made)


def _place(rng: random.Random) -> tuple[str, str]:
    """A city, and the city as a user writes it: in quotes if it is made up."""
    if rng.random() < 0.5:
        name = rng.choice(CITIES)
        return name, name
    name = words.any_word(rng).capitalize()
    return name, f'"{name}"'


def _key(*written: str) -> str:
    """Names the content of a question about these cities: the made-up city in it, preferably one that is held out.

    Known cities are never held out, because the question does not show how they are spelled.
    """
    keys = [f"place:{name[1:-1]}" for name in written if name.startswith('"')]
    return next(filter(held_out, keys), keys[0] if keys else "")


def _sky(rng: random.Random) -> tuple[str, str]:
    """A result about the weather, and the word of it that the answer says."""
    sky = rng.choice(SKIES)
    return sky if rng.random() < 0.5 else json.dumps({"weather": sky}), sky


def _weather(rng: random.Random) -> Round:
    city, written = _place(rng)
    result, said = _sky(rng)
    user = rng.choice(
        (
            f"What is the weather in {written}?",
            f"How is the weather in {written}?",
            f"What is the weather like in {written}?",
            f"Tell me the weather in {written}.",
            f"Weather in {written}?",
        )
    )
    return Round(WEATHER, _key(written), user, [{"city": city}], [result], f"It is {said} in {written}.")


def _two_weathers(rng: random.Random) -> Round:
    """A question with two calls."""
    (one, first), (other, second) = _place(rng), _place(rng)
    (result, said), (later, then) = _sky(rng), _sky(rng)
    user = rng.choice(
        (f"What is the weather in {first} and in {second}?", f"How is the weather in {first} and in {second}?")
    )
    answer = f"It is {said} in {first} and {then} in {second}."
    return Round(WEATHER, _key(first, second), user, [{"city": one}, {"city": other}], [result, later], answer)


def _time(rng: random.Random) -> Round:
    city, written = _place(rng)
    now = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    user = rng.choice((f"What time is it in {written}?", f"Tell me the time in {written}.", f"Time in {written}?"))
    result = now if rng.random() < 0.5 else json.dumps({"time": now})
    return Round(TIME, _key(written), user, [{"city": city}], [result], f"It is {now} in {written}.")


def _multiply(rng: random.Random) -> Round:
    a, b = (rng.randint(2, _LARGEST_FACTOR) for _ in range(2))
    user = rng.choice((f"What is {a} times {b}?", f"Multiply {a} and {b}.", f"How much is {a} times {b}?"))
    result = str(a * b) if rng.random() < 0.5 else json.dumps({"result": a * b})
    return Round(MULTIPLY, f"call:multiply:{a},{b}", user, [{"a": a, "b": b}], [result], f"{a} times {b} is {a * b}.")


_ROUNDS: Mapping[str, Sequence[Callable[[random.Random], Round]]] = {
    WEATHER.name: (_weather, _weather, _weather, _two_weathers),
    TIME.name: (_time,),
    MULTIPLY.name: (_multiply,),
}


def made_up_tool(rng: random.Random, *, reserved: bool) -> DemoTool:
    """A made-up tool, from one side of the held-out rule."""
    name = ""
    while not name or held_out(f"call:{name}") != reserved:
        name = words.any_word(rng).lower()
    return DemoTool(name, {rng.choice(("name", "place", "colour", "word")): "string"})


def _made_up(rng: random.Random, tool: DemoTool) -> Round:
    """A call of a made-up tool, by its name."""
    (argument,), value = tool.arguments, words.any_word(rng)
    user = rng.choice(
        (f'Use "{tool.name}" with {argument} "{value}".', f'Call "{tool.name}" with the {argument} "{value}".')
    )
    result = words.any_word(rng)
    given = result if rng.random() < 0.5 else json.dumps({"result": result})
    said = result if given == result else f'"{result}"'
    return Round(tool, f"call:{tool.name}", user, [{argument: value}], [given], f"The result is {said}.")


def some_tools(rng: random.Random) -> tuple[DemoTool, ...]:
    """Up to three tools of a conversation, in any order, never all that are known."""
    made_up = [made_up_tool(rng, reserved=False)] if rng.random() < 0.2 else []
    chosen = [*made_up, *rng.sample(TOOLS, rng.choice((0, 1, 1, 2, 2)))]
    rng.shuffle(chosen)
    return tuple(chosen)


def draw_round(rng: random.Random, tool: DemoTool, *, reserved: bool) -> Round:
    """A question for a tool, from the reserved side of the held-out rule or the other; a made-up tool is on one."""
    while True:
        makers = _ROUNDS.get(tool.name)
        made = rng.choice(makers)(rng) if makers else _made_up(rng, tool)
        if held_out(made.key) == reserved:
            return made


def turns_of(made: Round) -> list[Turn]:
    """Question, call, results and answer."""
    results = [("tool", result) for result in made.results]
    called = ("assistant", written_calls(made.tool, made.calls))
    return [("user", made.user), called, *results, ("assistant", made.assistant)]


def tool_round(rng: random.Random, given: Sequence[DemoTool], missing: float) -> tuple[str, list[Turn]]:
    """Turns about one of the tools that are given, or, in the share `missing`, one that is not there."""
    if given and rng.random() < 1 - missing:
        made = draw_round(rng, rng.choice(given), reserved=False)
        return made.key, turns_of(made)
    made = draw_round(rng, rng.choice([tool for tool in TOOLS if tool not in given]), reserved=False)
    return made.key, [("user", made.user), ("assistant", chat.UNKNOWN)]
