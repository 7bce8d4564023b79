"""Calls every endpoint of OpenAI's API with the `openai` package of this environment: `python FILE URL MODEL`.

Prints JSON: each answer without ids and times, and the fields that the package does not know. Every object and event is
checked strictly against the types of the package. It runs with any version of it, so it imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

TOOL: Any = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SCHEMA: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
STORY: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
SAMPLED: Any = {"temperature": 0.9, "seed": 5}
# Trial -> endpoint of the client, arguments, and whether it streams.
TRIALS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "chat": ("chat.completions.create", {"messages": STORY, "max_tokens": 30, **SAMPLED}, True),
    "chat logprobs": (
        "chat.completions.create",
        {"messages": STORY, "max_tokens": 8, "logprobs": True, "top_logprobs": 2, "n": 2, **SAMPLED},
        True,
    ),
    "chat tools": (
        "chat.completions.create",
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "max_tokens": 200,
            **SAMPLED,
        },
        True,
    ),
    "chat schema": (
        "chat.completions.create",
        {
            "messages": STORY,
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            **SAMPLED,
        },
        True,
    ),
    "completions": ("completions.create", {"prompt": ["Once", "12 + 7 ="], "max_tokens": 20, **SAMPLED}, True),
    "completions echo": (
        "completions.create",
        {"prompt": "Once upon a time", "max_tokens": 1, "logprobs": 1, "echo": True, **SAMPLED},
        True,
    ),
    "responses": (
        "responses.create",
        {"input": "Tell me a story.", "max_output_tokens": 30, "temperature": 0.9, "extra_body": {"seed": 5}},
        True,
    ),
    "responses tools": (
        "responses.create",
        {
            "input": "What is the weather in Paris?",
            "tools": [{"type": "function", "strict": False, **TOOL}],
            "tool_choice": "required",
            "max_output_tokens": 200,
            "extra_body": {"seed": 5},
        },
        True,
    ),
    "embeddings": ("embeddings.create", {"input": ["a fox", "the cat"]}, False),
    "embeddings float": ("embeddings.create", {"input": "a fox", "encoding_format": "float"}, False),
    "models": ("models.list", {}, False),
    "bad value": ("chat.completions.create", {"messages": STORY, "top_p": 7}, True),
    "unknown field": ("responses.create", {"input": "x", "extra_body": {"horse": 1}}, False),
}
# Differ from one call to the next.
_VOLATILE = {"id", "created", "created_at", "item_id", "call_id", "cached_tokens"}


class Trials:
    """Objects that a client receives, checked and without what differs between two calls."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()

    def checked(self, received: Any) -> Any:
        """The plain form of an object of the package."""
        given = received.to_dict()
        if isinstance(received, openai.types.Completion):
            _fill_known_nulls(given)
        is_event = str(given.get("type", "")).startswith("response.")
        kind: Any = ResponseStreamEvent if is_event else type(received)
        TypeAdapter(kind).validate_python(given, strict=True)
        self.unknown |= {*_unknown(received)}
        return _stable(received.to_dict())

    def refused(self, error: openai.APIStatusError) -> Any:
        """What an error says."""
        return [type(error).__name__, error.code, error.param]


def _fill_known_nulls(completion: dict[str, Any]) -> None:
    """Fills nulls that OpenAI sends although its types have none: of chunks before the last, of a first token."""
    for choice in completion["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name in ("token_logprobs", "top_logprobs"):
            column = (choice.get("logprobs") or {}).get(name) or [0]
            del column[: column[0] is None]


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _unknown(each)
    elif isinstance(value, BaseModel):
        yield from (f"{type(value).__name__}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))


def _stable(value: Any) -> Any:
    if isinstance(value, list):
        return [_stable(each) for each in value]
    if isinstance(value, dict):
        return {name: _stable(each) for name, each in value.items() if name not in _VOLATILE}
    return value


def _joined(chunks: list[Any]) -> Any:
    """A stream without its cuts, which depend on times: texts of each answer, and how each ends."""
    texts: dict[str, str] = {}
    ends: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            calls = "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ())
            place = str(choice["index"])
            texts[place] = texts.get(place, "") + (choice.get("text") or delta.get("content") or calls or "")
            if choice["finish_reason"]:
                ends[place] = choice
        if str(chunk.get("type")).endswith(".delta"):
            texts[chunk["type"]] = texts.get(chunk["type"], "") + chunk["delta"]
    return [texts, ends or chunks[-1]["response"]]


def _endpoint(client: Any, path: str) -> Callable[..., Any]:
    for name in path.split("."):
        client = getattr(client, name)
    return client  # type: ignore[no-any-return]


def synchronous(url: str, model: str, trials: Trials) -> dict[str, Any]:
    """All trials by the synchronous client."""
    found: dict[str, Any] = {}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        for name, (path, arguments, is_stream) in TRIALS.items():
            call, given = _endpoint(client, path), {**arguments, **({} if path == "models.list" else {"model": model})}
            try:
                found[name] = trials.checked(call(**given))
                if is_stream:
                    found[f"{name}, streamed"] = _joined([trials.checked(each) for each in call(**given, stream=True)])
            except openai.APIStatusError as error:
                found[name] = trials.refused(error)
        with client.responses.stream(model=model, input="Tell me a story.", max_output_tokens=9) as stream:
            found["responses helper"] = [each.type for each in stream][-1]
        found["model"] = trials.checked(client.models.retrieve(model))
    return found


async def asynchronous(url: str, model: str, trials: Trials) -> dict[str, Any]:
    """All trials by the asynchronous client."""
    found: dict[str, Any] = {}
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        for name, (path, arguments, is_stream) in TRIALS.items():
            call, given = _endpoint(client, path), {**arguments, **({} if path == "models.list" else {"model": model})}
            try:
                answer: Awaitable[Any] = call(**given)
                found[name] = trials.checked(await answer)
                if is_stream:
                    chunks = [trials.checked(each) async for each in await call(**given, stream=True)]
                    found[f"{name}, streamed"] = _joined(chunks)
            except openai.APIStatusError as error:
                found[name] = trials.refused(error)
        async with client.responses.stream(model=model, input="Tell me a story.", max_output_tokens=9) as stream:
            found["responses helper"] = [each.type async for each in stream][-1]
        found["model"] = trials.checked(await client.models.retrieve(model))
    return found


def main(url: str, model: str) -> None:
    """Runs all trials twice, and prints them."""
    trials = Trials()
    found = {"sync": synchronous(url, model, trials), "async": asyncio.run(asynchronous(url, model, trials))}
    print(json.dumps({"version": openai.__version__, "unknown": sorted(trials.unknown), **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
