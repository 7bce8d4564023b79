"""Requests of `/v1/responses`: what becomes of each field, and which fields are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fissile.client.calls import chat_request
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError
from facade.openai.responses import parse

LOOK = {
    "type": "function",
    "name": "look",
    "description": "looks",
    "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": 1.0}}},
    "strict": False,
}
# As Codex sends it: instructions, a developer's message, two of the user, and the loop of an earlier turn.
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {
            "type": "reasoning",
            "id": "rs_a_0",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "so"}],
            "encrypted_content": None,
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "name": "look", "arguments": '{"a": 1}', "call_id": "c1"},
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b.py"}]},
    ],
    "tools": [LOOK],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session-1",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def request_of(**fields: Any) -> pb.ChatRequest:
    """The request that a body becomes."""
    plan = parse(json.dumps(fields).encode(), 1)
    arguments = {name: value for name, value in plan.arguments.items() if name != "receipt"}
    return chat_request(plan.prompts[0], arguments)


def refusal(**fields: Any) -> str:
    """Path of the refused field."""
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"input": "hi", **fields}).encode(), 1)
    return caught.value.violations[0].path


def test_session_of_a_coding_agent_becomes_a_conversation() -> None:
    request = request_of(**CODEX)
    assert [message.role for message in request.messages] == [
        *("system", "user", "user", "assistant", "tool", "tool"),
    ]
    assert request.messages[0].content == "You are a coding agent.\n\nSandbox: none."
    turn = request.messages[3]
    assert (turn.reasoning, turn.content) == ("so", "I look.")
    assert [(call.id, call.name, call.arguments_json) for call in turn.tool_calls] == [
        ("c1", "look", '{"a": 1}'),
        ("c2", "look", "{}"),
    ]
    results = [(message.tool_call_id, message.name, message.content) for message in request.messages[4:]]
    assert results == [("c1", "look", "a.py"), ("c2", "look", "b.py")]
    assert request.session_id == "session-1"
    assert json.loads(request.template_arguments_json) == {"reasoning_effort": "medium"}
    assert request.tools[0].parameters_json == json.dumps(LOOK["parameters"])
    assert not request.tools[0].strict
    assert request.tool_choice.mode == pb.TOOL_MODE_AUTO
    assert not request.HasField("parallel_tool_calls")


def test_plain_text_is_a_message_of_the_user() -> None:
    request = request_of(input="hi", max_output_tokens=5, temperature=0, top_p=0.5, seed=-1, request_id="r")
    assert [(message.role, message.content) for message in request.messages] == [("user", "hi")]
    params = request.sampling_params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (5, 0.0, 0.5, (1 << 64) - 1)
    assert request.request_id == "r"
    assert not request.HasField("tool_choice")


def test_message_without_type_is_a_message() -> None:
    request = request_of(input=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "la"}])
    assert [message.role for message in request.messages] == ["user", "assistant"]


def test_neighbouring_messages_of_the_assistant_stay_apart() -> None:
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [message.content for message in request_of(input=items).messages] == ["a", "b"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)),
        ("none", pb.ToolChoice(mode=pb.TOOL_MODE_NONE)),
        ({"type": "function", "name": "look"}, pb.ToolChoice(name="look")),
    ],
)
def test_tool_choice_is_passed_on(choice: Any, expected: pb.ToolChoice) -> None:
    request = request_of(input="hi", tools=[LOOK], tool_choice=choice, parallel_tool_calls=False)
    assert request.tool_choice == expected
    assert request.HasField("parallel_tool_calls")


def test_tool_choice_without_tools_has_no_effect_unless_it_requires_one() -> None:
    assert not request_of(input="hi", tools=[], tool_choice="auto", parallel_tool_calls=False).HasField("tool_choice")
    assert request_of(input="hi", tool_choice="required").tool_choice.mode == pb.TOOL_MODE_REQUIRED


def test_tools_of_a_namespace_have_its_name() -> None:
    tools = [{"type": "namespace", "name": "mcp", "description": "d", "tools": [LOOK]}]
    call = {"type": "function_call", "namespace": "mcp", "name": "look", "arguments": "{}", "call_id": "c"}
    request = request_of(input=[{"role": "user", "content": "hi"}, call], tools=tools)
    assert [tool.name for tool in request.tools] == ["mcp.look"]
    assert [call.name for call in request.messages[1].tool_calls] == ["mcp.look"]


def test_text_format_confines_the_answer() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    request = request_of(input="hi", text={"format": form})
    assert request.sampling_params.constraint.json_schema == json.dumps(schema)
    assert request_of(input="hi", text={"format": {"type": "json_object"}}).sampling_params.constraint.json_object
    assert not request_of(input="hi", text={"format": {"type": "text"}}).sampling_params.HasField("constraint")


def test_effort_none_turns_thinking_off() -> None:
    request = request_of(input="hi", reasoning={"effort": "none"})
    assert json.loads(request.template_arguments_json) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [LOOK, {"type": "custom"}]}]},
            "tools[0].tools[1].type",
        ),
        ({"tools": [LOOK, {**LOOK, "defer_loading": True}]}, "tools[1].defer_loading"),
        ({"tools": [{**LOOK, "parameters": [1]}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [7]}, "input[0].body"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_field_that_is_not_served_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    assert refusal(**fields) == path


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": None, "conversation": None, "prompt": None, "background": False, "store": False},
        {"truncation": "disabled", "service_tier": "auto", "metadata": {"a": "b"}, "user": "u", "max_tool_calls": 3},
        {"safety_identifier": "s", "prompt_cache_retention": "24h", "stream_options": {"include_obfuscation": False}},
    ],
)
def test_harmless_field_is_accepted(fields: dict[str, Any]) -> None:
    assert request_of(input="hi", **fields).messages[0].content == "hi"
