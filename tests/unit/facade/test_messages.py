"""Requests of `/v1/messages`: what becomes of each field, and which fields are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fissile.client.calls import chat_request
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError
from facade.anthropic.messages import NAMES, parse, parse_count
from facade.http.bodies import param_of

CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": 1.0}}}
LOOK = {"name": "look", "description": "looks", "input_schema": SCHEMA}
HI = [{"role": "user", "content": "hi"}]
# As Claude Code sends it: a system prompt in blocks, marks of the prompt cache, and the loop of an earlier turn.
CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Be brief.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>a</system-reminder>"},
                {"type": "text", "text": "list files", **CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"z": "x", "a": 1.0}},
                {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a.py"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                    **CACHED,
                },
                {"type": "text", "text": "go on"},
            ],
        },
    ],
    "tools": [{**LOOK, **CACHED}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}


def request_of(**fields: Any) -> pb.ChatRequest:
    """The request that a body becomes."""
    plan = parse(json.dumps({"model": "m", "max_tokens": 9, "messages": HI, **fields}).encode(), 1)
    return chat_request(plan.prompts[0], {name: value for name, value in plan.arguments.items() if name != "receipt"})


def refusal(**fields: Any) -> str:
    """Path of the refused field."""
    with pytest.raises(ApiError) as caught:
        request_of(**fields)
    return caught.value.violations[0].path


def test_session_of_a_coding_agent_becomes_a_conversation() -> None:
    request = request_of(**CLAUDE_CODE)
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "You are a coding agent.\n\nBe brief."),
        ("user", "<system-reminder>a</system-reminder>\n\nlist files"),
        ("assistant", "I look."),
        ("tool", "a.py"),
        ("tool", "Error: no"),
        ("user", "go on"),
    ]
    turn = request.messages[2]
    assert turn.reasoning == "so"
    assert [(call.id, call.name, json.loads(call.arguments_json)) for call in turn.tool_calls] == [
        ("t1", "look", {"z": "x", "a": 1.0}),
        ("t2", "look", {}),
    ]
    assert [message.tool_call_id for message in request.messages[3:5]] == ["t1", "t2"]
    assert request.tools[0].parameters_json == json.dumps(SCHEMA)
    assert request.sampling_params.max_tokens == 32000
    assert request.reasoning.max_tokens == 1024
    assert not request.HasField("tool_choice")


def test_sampling_fields_are_passed_on() -> None:
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "stop_sequences": ["a", "b"], "seed": 5, "request_id": "r"}
    request = request_of(**fields)
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.0, 0.5, 3, 5)
    assert [*params.stop_strings] == ["a", "b"]
    assert (request.request_id, params.max_tokens) == ("r", 9)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, pb.ToolChoice(mode=pb.TOOL_MODE_AUTO)),
        ({"type": "any"}, pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)),
        ({"type": "none"}, pb.ToolChoice(mode=pb.TOOL_MODE_NONE)),
        ({"type": "tool", "name": "look"}, pb.ToolChoice(name="look")),
    ],
)
def test_tool_choice_is_passed_on(choice: dict[str, Any], expected: pb.ToolChoice) -> None:
    request = request_of(tools=[LOOK], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert request.tool_choice == expected
    assert request.HasField("parallel_tool_calls")
    assert not request.parallel_tool_calls


def test_output_format_confines_the_answer() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert request_of(**fields).sampling_params.constraint.json_schema == json.dumps(SCHEMA)


def test_thinking_and_effort_are_variables_of_the_template() -> None:
    request = request_of(thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert json.loads(request.template_arguments_json) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert not request_of(thinking={"type": "adaptive"}).template_arguments_json


def test_neighbouring_turns_of_the_user_are_one() -> None:
    request = request_of(messages=[*HI, {"role": "user", "content": "there"}])
    assert [message.content for message in request.messages] == ["hi\n\nthere"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"container": "c"}, "container"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"fallbacks": []}, "fallbacks"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "all"}}, "thinking.display"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{**LOOK, "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tools": [LOOK, {**LOOK, "defer_loading": True}]}, "tools[1].defer_loading"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"messages": [*HI, {"role": "assistant", "content": "So"}]}, "messages[1].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *HI]},
            "messages[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"n": 2}, "n"),
    ],
)
def test_field_that_is_not_served_is_refused_by_name(fields: dict[str, Any], path: str) -> None:
    assert refusal(**fields) == path


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("tools[2].parameters_json", "tools[2].input_schema"),
        ("tools[2].parameters_json.properties", "tools[2].input_schema"),
        ("tools[2].name", "tools[2].name"),
        ("sampling_params.stop_strings[1]", "stop_sequences[1]"),
        ("sampling_params.max_tokens", "max_tokens"),
        ("messages[3].content", "messages"),
        ("session_id", "session_id"),
    ],
)
def test_field_of_the_router_has_its_name_here(path: str, param: str) -> None:
    assert param_of(path, NAMES) == param


def test_harmless_fields_are_accepted() -> None:
    harmless = {"service_tier": "auto", "speed": "standard", "mcp_servers": [], "cache_control": {"type": "ephemeral"}}
    request = request_of(**harmless, metadata={"user_id": "u"}, diagnostics={"previous_message_id": None})
    assert request.messages[0].content == "hi"


def test_count_has_the_prompt_of_the_request() -> None:
    """Tools, thinking and the system prompt are part of the prompt; fields of the answer are refused."""
    prompt = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools", "thinking")}
    plan = parse_count(json.dumps(prompt).encode())
    assert plan.shown(7) == {"input_tokens": 7}
    counted, asked = plan.asked.request.chat, request_of(**CLAUDE_CODE)  # type: ignore[attr-defined]
    assert [*counted.messages] == [*asked.messages]
    assert [*counted.tools] == [*asked.tools]
    with pytest.raises(ApiError, match="max_tokens"):
        parse_count(json.dumps({**prompt, "max_tokens": 5}).encode())
