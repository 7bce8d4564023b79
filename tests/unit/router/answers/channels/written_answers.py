"""Reads back the answers that chat templates render, and compares them with the rendered messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from common.text.chat_template import ChatTemplate
from common.text.template_sandbox import TemplateInputError
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.parser import Channel, ResponseParser
from router.answers.channels.template import ResponseTemplate

PROPERTIES: Final[Mapping[str, Any]] = {
    "city": {"type": "string", "description": "A city."},
    "days": {"type": "integer", "description": "Days."},
    "exact": {"type": "boolean", "description": "Exact."},
    "where": {"type": "object", "description": "A place."},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags."},
}
NAMES: Final = ("get_weather", "find")
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in NAMES
]
CALLS: Final[Sequence[tuple[str, Mapping[str, Any]]]] = (
    (NAMES[0], {"city": "São Paulo", "days": 3, "exact": True, "where": {"lat": 1.5, "ids": [1, 2]}, "tags": ["a b"]}),
    (NAMES[1], {"city": 'the "old"\ntown'}),
    (NAMES[1], {}),
)
THOUGHT: Final = "First I look.\nThen I say {it}."
CONTENT: Final = "Let me see: [1] and {2}."
HISTORIES: Final[Sequence[Sequence[Mapping[str, Any]]]] = (
    [{"role": "user", "content": "Questa."}],
    [{"role": "system", "content": "Ordine."}, {"role": "user", "content": "Questa."}],
    [
        {"role": "user", "content": "Prima."},
        {"role": "assistant", "content": "Detto."},
        {"role": "user", "content": "Questa."},
    ],
)


@dataclass(frozen=True)
class Given:
    """The parts of an assistant's answer, before rendering."""

    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    content: str = ""
    reasoning: str = ""

    def message(self, *, as_text: bool, ids: Sequence[str]) -> dict[str, Any]:
        """The answer as a chat message, with arguments as text if `as_text`, else as objects."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = [
                {
                    "type": "function",
                    "id": id,
                    "function": {"name": name, "arguments": json.dumps(arguments) if as_text else dict(arguments)},
                }
                for id, (name, arguments) in zip(ids, self.calls, strict=False)
            ]
        return made


@dataclass(frozen=True)
class Read:
    """The parts of an answer, as the parser returned them."""

    calls: Sequence[tuple[str, Any]]
    content: str
    reasoning: str


ANSWERS: Final = (
    Given(content=CONTENT),
    Given(content=CONTENT, reasoning=THOUGHT),
    Given(CALLS[:1]),
    Given(CALLS[1:2], reasoning=THOUGHT),
    Given(CALLS[2:], content=CONTENT),
    Given(CALLS, content=CONTENT, reasoning=THOUGHT),
)
IDS: Final = (
    ("abcdefgh1", "abcdefgh2", "abcdefgh3"),
    tuple(f"functions.{name}:{i}" for i, (name, _) in enumerate(CALLS)),
)


def read(template: ResponseTemplate, opening: str, text: str, step: int) -> Read:
    """Parses `text` in pieces of `step` characters."""
    tools = ToolSchemas(dict.fromkeys(NAMES, PROPERTIES))
    parser = ResponseParser(template, tools=tools, separates_reasoning=True, opening=opening)
    parts = [part for at in range(0, len(text), step) for part in parser.push(text[at : at + step])] + parser.finish()
    calls: list[list[str]] = []
    for part in parts:
        if part.channel is Channel.CALL and part.name:
            calls.append([part.name, part.text])
        elif part.channel is Channel.CALL:
            calls[part.call][1] += part.text
    said = {channel: "".join(part.text for part in parts if part.channel is channel) for channel in Channel}
    return Read([(name, _loaded(text)) for name, text in calls], said[Channel.CONTENT], said[Channel.REASONING])


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Misread:
    """A rendered answer that the parser read wrongly."""

    written: str
    expected: Read
    found: Read


def misread(chat: ChatTemplate, template: ResponseTemplate) -> Iterator[Misread]:
    """Yields the rendered answers that `template` reads wrongly; skips calls and reasoning that it lacks."""
    for history in HISTORIES:
        for given in ANSWERS:
            if given.calls and not template.has_calls:
                continue
            if given.reasoning and not template.has_reasoning:
                continue
            if (found := _misread(chat, template, history, given)) is not None:
                yield found


def _misread(
    chat: ChatTemplate, template: ResponseTemplate, history: Sequence[Mapping[str, Any]], given: Given
) -> Misread | None:
    """None if one form of the message is read correctly, or if the chat template renders none of them."""
    found = None
    for is_last, as_text, ids in product((True, False), (False, True), IDS):
        written = _written(chat, template, history, given.message(as_text=as_text, ids=ids), is_last=is_last)
        if written is None:
            continue
        opening, text = written
        expected = _expected(given, text)
        if given.calls and not expected.calls:
            continue
        reads = [read(template, opening, text, step) for step in (1, 3, 7, len(text))]
        if all(each == expected for each in reads):
            return None
        found = Misread(text, expected, next(each for each in reads if each != expected))
    return found


def _expected(given: Given, text: str) -> Read:
    """The parts of `given` that the rendered `text` contains."""
    calls = [(name, dict(arguments)) for name, arguments in given.calls if name in text]
    content = given.content if given.content and given.content in text else ""
    reasoning = given.reasoning if given.reasoning and given.reasoning in text else ""
    return Read(calls, content, reasoning)


def _written(
    chat: ChatTemplate,
    template: ResponseTemplate,
    history: Sequence[Mapping[str, Any]],
    message: dict[str, Any],
    *,
    is_last: bool,
) -> tuple[str, str] | None:
    """(opening in the prompt, rest of the rendered answer); None if the template does not render it as one message."""
    before = [dict(each) for each in history]
    results = [
        {"role": "tool", "content": "Esito.", "tool_call_id": call["id"], "name": call["function"]["name"]}
        for call in message.get("tool_calls", ())
    ]
    after = [] if is_last else results or [{"role": "user", "content": "Esito."}]
    plain = {"role": "assistant", "content": "Ende."}
    for tools in (TOOLS, None):
        try:
            prompt = chat.render(before, tools=tools)
            whole = chat.render([*before, message, *after], tools=tools, add_generation_prompt=False)
            last = chat.render([*before, plain], tools=tools, add_generation_prompt=False)
        except TemplateInputError:
            continue
        tail = last.rpartition("Ende.")[2]
        if after:
            # Cuts at the end of the answer: at the first line of the text that follows every answer.
            whole = whole.partition("Esito.")[0]
            end = whole.rfind(tail.strip().split("\n")[0]) if tail.strip() else -1
            whole = whole[:end] if end >= 0 else whole
        whole = whole.removesuffix(tail)
        # gpt-oss's chat template writes content before calls as reasoning; other templates allow none there.
        is_other = "<|channel|>analysis" in whole or _is_split(whole, message["content"], tail)
        if message.get("tool_calls") and message["content"] and is_other:
            return None
        if whole.startswith(prompt):
            return template.opening(prompt), whole[len(prompt) :]
        return "", template.opening(whole)
    return None


def _is_split(whole: str, content: str, tail: str) -> bool:
    """True if the template rendered content and calls as two messages."""
    behind = whole.rpartition(content)[2].lstrip() if content and content in whole else ""
    return bool(behind and tail.strip()) and behind.startswith(tail.strip().split("\n")[0])
