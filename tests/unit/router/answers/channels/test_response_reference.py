"""Answers differ from transformers' parser only in the ways that docs/reference/contract.md lists."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser as Reference

from router.answers.channels.parser import Channel
from tests.unit.router.answers.channels.responses import FAMILIES, NAMES, TOOLS, Family, broken
from tests.unit.router.answers.channels.test_response import TAGS, by_family, calls_of, read, text_of

KEYS: Final = {"name", "arguments", "id", "type"}


class ReferenceAnswer:
    """The result of transformers' parser for an answer.

    Raises:
        ValueError: the parser refuses the text.
    """

    def __init__(self, family: Family, text: str) -> None:
        tools = TOOLS if family.name in TAGS else None
        reference = Reference(dict(family.spec), prefix=family.opening, tools=tools)  # type: ignore[arg-type]
        try:
            events = [*reference.initial_events, *reference.feed(text)]
            self.message, last = reference.finalize()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None
        self.closed = [each for each in [*events, *last] if each["type"] == "region_close"]

    @property
    def calls(self) -> list[Any]:
        values = [each["value"] for each in self.closed if each["field"] == "tool_calls"]
        every = [call for value in values for call in (value if isinstance(value, list) else [value])]
        return [call["function"] if isinstance(call["function"], dict) else {} for call in every]

    def last(self, field: str) -> str:
        return next((each["value"] for each in reversed(self.closed) if each["field"] == field), "")

    def named_difference(self, *, has_implicit_content: bool, is_delimited: bool) -> str:
        """The allowed difference for this answer; "" if both must be equal."""
        if any(set(call) - KEYS or not isinstance(call.get("arguments"), dict) for call in self.calls):
            return "arguments that are no object, or other keys"
        if not is_delimited and any(call.get("name") not in NAMES for call in self.calls):
            return "a name that the request has no tool of, without a delimiter"
        if any(number > 1 for number in Counter(each["field"] for each in self.closed).values()):
            return "several regions"
        return "" if has_implicit_content else "text in no region"


@pytest.mark.slow
@by_family
@settings(max_examples=150)
@given(data=st.data())
def test_answers_differ_from_transformers_only_in_named_ways(family: Family, data: st.DataObject) -> None:
    text = data.draw(broken(family))
    try:
        reference = ReferenceAnswer(family, text)
    except ValueError:
        return
    opening = family.spec["fields"]["tool_calls"]
    if reference.named_difference(
        has_implicit_content=not {"open", "open_pattern"} & {*family.spec["fields"]["content"]},
        is_delimited="open" in opening or family.name not in ("llama", "xlam"),
    ):
        return

    parts = read(family, [text])

    calls = calls_of(parts)
    assert text_of(parts, Channel.REASONING) == reference.last("thinking")
    content = text_of(parts, Channel.CONTENT)
    if content == reference.last("content") and [name for name, _ in calls] == [c["name"] for c in reference.calls]:
        assert [json.loads(arguments) for _, arguments in calls] == [c["arguments"] for c in reference.calls]
        return
    # The remaining text of a call's region is content here; transformers drops it, even if the region has no call.
    assert any(each["field"] == "tool_calls" for each in reference.closed)
    assert content.startswith(reference.last("content"))
    assert len(content) > len(reference.last("content"))


def family(name: str) -> Family:
    return next(each for each in FAMILIES if each.name == name)


@pytest.mark.parametrize(
    ("name", "text", "calls", "content", "theirs"),
    [
        ("qwen", 'a<tool_call>{"name": "f", "arguments": {}}</tool_call>b', [("f", "{}")], "ab", "b"),
        ("qwen", 'a<tool_call>{"name": "f", "arg', [], 'a<tool_call>{"name": "f", "arg', None),
        ("harmony", "a<|channel|>final<|message|>b", [], "a\nb", "b"),
        ("llama", '{"name": "unknown", "parameters": {}}', [], '{"name": "unknown", "parameters": {}}', ""),
        ("qwen", '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>', [("f", "{}")], None, ""),
        ("qwen", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")], "", ""),
        ("qwen", r'<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("f", "{}")], "", ""),
        (
            "glm",
            "<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>{'k': True}</arg_value></tool_call>",
            [("f", '{"o": {"k": true}}')],
            "",
            "",
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>x</tool_call>",
            [("f", '{"n": 1}')],
            "x",
            "",
        ),
    ],
)
def test_each_named_difference_from_transformers_occurs(
    name: str, text: str, calls: list[tuple[str, str]], content: str | None, theirs: str | None
) -> None:
    parts = read(family(name), [text])

    assert calls_of(parts) == calls
    found = text_of(parts, Channel.CONTENT)
    assert (found if content is not None else '"x": 1' in found) == (content if content is not None else True)
    if theirs is None:
        with pytest.raises(ValueError, match=r"JSON|delimiter"):
            ReferenceAnswer(family(name), text)
    else:
        assert ReferenceAnswer(family(name), text).message.get("content", "") == theirs
