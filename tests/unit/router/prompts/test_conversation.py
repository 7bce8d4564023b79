"""Conversations with tools, calls and reasoning, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError
from router.answers.tools import template_tools
from router.prompts.conversation import template_messages
from router.validation import check_chat
from tests.unit.common.text.test_chat_template import KITCHEN_SINK, template, transformers_chat
from tests.unit.router.support import TOOLS_TEMPLATE

SCHEMA = '{"type": "object", "properties": {"z": {"type": "number"}, "a": {"enum": [1, 2.0, null]}}, "required": ["z"]}'
ARGUMENTS = '{"z": 1.0, "a": {"x": [true, "é\\n"], "b": 12345678901234567890}}'


def conversation(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[
            pb.ChatMessage(role="user", content="how warm is it?"),
            pb.ChatMessage(
                role="assistant",
                reasoning="I have to look",
                tool_calls=[
                    pb.ToolCall(id="aaaaaaaaa", name="get_it", arguments_json=ARGUMENTS),
                    pb.ToolCall(id="aaaaaaaab", name="nothing"),
                ],
            ),
            pb.ChatMessage(role="tool", content="21", tool_call_id="aaaaaaaaa", name="get_it"),
            pb.ChatMessage(role="user", content="thanks"),
        ],
        tools=[pb.Tool(name="get_it", description="gets\nit", parameters_json=SCHEMA), pb.Tool(name="nothing")],
        **fields,
    )


@pytest.mark.parametrize("source", [KITCHEN_SINK, TOOLS_TEMPLATE])
def test_conversation_with_tools_renders_like_transformers(source: str) -> None:
    """Schemas and arguments keep their order, and numbers their form."""
    asked = conversation()
    function = {"name": "get_it", "description": "gets\nit", "parameters": json.loads(SCHEMA)}
    no_parameters: dict[str, Any] = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "nothing", "parameters": no_parameters}},
    ]
    calls = [
        {"type": "function", "id": "aaaaaaaaa", "function": {"name": "get_it", "arguments": json.loads(ARGUMENTS)}},
        {"type": "function", "id": "aaaaaaaab", "function": {"name": "nothing", "arguments": {}}},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "how warm is it?"},
        {"role": "assistant", "content": "", "reasoning_content": "I have to look", "tool_calls": calls},
        {"role": "tool", "content": "21", "tool_call_id": "aaaaaaaaa", "name": "get_it"},
        {"role": "user", "content": "thanks"},
    ]
    rendered = template(source).render(template_messages(asked), template_tools(asked))
    assert rendered == transformers_chat(source, messages, tools=tools, tokenize=False)
    assert '"required"' in rendered
    assert rendered.index('"z"') < rendered.index('"a"')
    asked.tool_choice.mode = pb.TOOL_MODE_NONE
    assert template_tools(asked) is None


def without_tools(field: str) -> Callable[[pb.ChatRequest], None]:
    def change(asked: pb.ChatRequest) -> None:
        del asked.tools[:]
        if field == "tool_choice":
            asked.tool_choice.SetInParent()
        else:
            asked.parallel_tool_calls = True

    return change


def with_least_tokens(asked: pb.ChatRequest) -> None:
    asked.parallel_tool_calls, asked.sampling_params.min_tokens = False, 2


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tools[0].name", lambda r: setattr(r.tools[0], "name", "")),
        ("tools[0].name", lambda r: setattr(r.tools[0], "name", "a b")),
        ("tools[1].name", lambda r: setattr(r.tools[1], "name", "get_it")),
        ("tools", lambda r: r.tools.extend(pb.Tool(name=f"t{i}") for i in range(255))),
        ("tool_choice", without_tools("tool_choice")),
        ("parallel_tool_calls", without_tools("parallel_tool_calls")),
        ("sampling_params.min_tokens", with_least_tokens),
        ("tool_choice.name", lambda r: setattr(r.tool_choice, "name", "other")),
        ("messages[0].tool_calls", lambda r: r.messages[0].tool_calls.add(name="f")),
        ("messages[0].tool_call_id", lambda r: setattr(r.messages[0], "tool_call_id", "aaaaaaaaa")),
        ("messages[1].tool_calls[0].name", lambda r: setattr(r.messages[1].tool_calls[0], "name", "")),
    ],
)  # fmt: skip
def test_impossible_chat_is_refused_by_field(field: str, change: Any) -> None:
    asked = conversation()
    check_chat(asked)
    change(asked)
    with pytest.raises(ApiError) as caught:
        check_chat(asked)
    assert (caught.value.code.name, caught.value.violations[0].path) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a":' * 100_000])
def test_invalid_tool_json_is_refused_by_field(text: str) -> None:
    asked = conversation()
    asked.tools[1].parameters_json = text
    with pytest.raises(ApiError) as caught:
        template_tools(asked)
    assert (caught.value.code.name, caught.value.violations[0].path) == ("INVALID_ARGUMENT", "tools[1].parameters_json")
    asked = conversation()
    asked.messages[1].tool_calls[1].arguments_json = text
    with pytest.raises(ApiError) as caught:
        template_messages(asked)
    assert caught.value.violations[0].path == "messages[1].tool_calls[1].arguments_json"
