"""Events of `/v1/responses`: valid for the `openai` package, and the same answer however it is cut into events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fissile.client import Delta, Event
from fissile.v1 import inference_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from facade.http.errors import HttpError
from facade.openai import responses
from tests.unit.facade.answers import ANSWERS, Part, call_id, deltas, finished, frames, progress_of, result_of

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY = b'{"model": "m", "input": "hi", "tools": [{"type": "function", "name": "look"}]}'


def encoder() -> Any:
    return responses.parse(BODY, 1_700_000_000).encoder


def stream(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """The whole ladder of an answer, each event checked."""
    one = encoder()
    data = one.begin(0, progress_of([])) + b"".join(one.event(0, event) for event in events) + one.end()
    found = frames(data)
    for number, (_, event) in enumerate(found):
        EVENTS.validate_python(event, strict=True)
        assert event["sequence_number"] == number
    return found


def channels(output: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Reasoning, text and calls of a response's output."""
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in output:
        if item["type"] == "function_call":
            calls.append((item["call_id"], item["name"], item["arguments"]))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    return texts["reasoning"], texts["message"], calls


def expected(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str, str]]]:
    calls = [part for part in parts if part.channel == "call"]
    return (
        "".join(part.text for part in parts if part.channel == "reasoning"),
        "".join(part.text for part in parts if part.channel == "text"),
        [(call_id(i), part.name, part.text) for i, part in enumerate(calls)],
    )


def rebuilt(found: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client builds it of the deltas, checked against each `done` event."""
    items: list[dict[str, Any]] = []
    for name, event in found:
        if name == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif name == "response.content_part.added":
            assert event["item_id"] == items[-1]["id"]
            items[-1]["content"].append(event["part"])
        elif name.endswith("_text.delta"):
            items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif name == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif name == "response.output_item.done":
            assert {**items[event["output_index"]], "status": event["item"]["status"]} == event["item"]
            items[event["output_index"]] = event["item"]
    return items


@given(ANSWERS, st.data())
@settings(max_examples=100, deadline=None)
def test_answer_cut_into_any_events_is_the_same(parts: list[Part], data: st.DataObject) -> None:
    events: list[Event] = [*deltas(parts, lambda length: data.draw(st.integers(0, length))), finished()]
    found = stream(events)
    response = found[-1][1]["response"]
    assert rebuilt(found) == response["output"]
    assert channels(response["output"]) == expected(parts)
    whole = msgspec.json.decode(msgspec.json.encode(encoder().whole([result_of(events)])))
    Response.model_validate(whole, strict=True)
    assert channels(whole["output"]) == expected(parts)
    assert {**whole, "output": []} == {**response, "output": []}


def test_ladder_of_reasoning_text_and_call_is_whole() -> None:
    parts = [Part("reasoning", "so"), Part("text", "la"), Part("call", '{"a": 1}', "look")]
    found = stream([*deltas(parts, lambda length: length), finished(pb.FINISH_REASON_TOOL_CALLS)])
    text_item = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done"]
    assert [name.removeprefix("response.") for name, _ in found] == [
        *("created", "in_progress"),
        *(step.format("reasoning_text") for step in text_item),
        "output_item.done",
        *(step.format("output_text") for step in text_item),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = found[-1][1]["response"]
    assert [item["id"] for item in response["output"]] == ["rs_r7_0", "msg_r7_1", "fc_r7_2"]
    assert (response["id"], response["status"], response["error"]) == ("resp_r7", "completed", None)
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    assert response["tools"] == [{"type": "function", "name": "look"}]


def test_call_of_a_tool_in_a_namespace_names_both() -> None:
    tool = {"type": "namespace", "name": "mcp", "description": "", "tools": [{"type": "function", "name": "look"}]}
    one = responses.parse(json.dumps({"model": "m", "input": "hi", "tools": [tool]}).encode(), 1).encoder
    call = pb.ToolCallDelta(index=0, id="c", name="mcp.look", arguments_json="{}")
    data = one.begin(0, progress_of([])) + one.event(0, Delta(0, "", tool_calls=(call,)))
    found = frames(data + one.event(0, finished(pb.FINISH_REASON_TOOL_CALLS)) + one.end())
    for _, event in found:
        EVENTS.validate_python(event, strict=True)
    [item] = found[-1][1]["response"]["output"]
    assert (item["namespace"], item["name"]) == ("mcp", "look")


def test_silent_stream_starts_the_response_then_has_keepalives() -> None:
    one = encoder()
    found = frames(one.idle(progress_of([])) + one.idle(progress_of([])) + one.begin(0, progress_of([])) + one.end())
    assert [name for name, _ in found[:4]] == [
        *("response.created", "response.in_progress", "keepalive", "response.output_item.added")
    ]
    assert [event["sequence_number"] for _, event in found] == [*range(len(found))]


def test_answer_without_text_has_an_empty_message() -> None:
    response = stream([finished()])[-1][1]["response"]
    assert channels(response["output"]) == ("", "", [])
    assert [item["type"] for item in response["output"]] == ["message"]


def test_cut_answer_is_incomplete() -> None:
    found = stream([Delta(0, "la"), finished(pb.FINISH_REASON_LENGTH)])
    name, event = found[-1]
    assert name == "response.incomplete"
    assert event["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in event["response"]["output"]] == ["incomplete"]


@pytest.mark.parametrize(
    ("status", "code"), [(429, "rate_limit_exceeded"), (503, "server_error"), (400, "invalid_prompt")]
)
def test_failure_after_text_ends_the_stream(status: int, code: str) -> None:
    one = encoder()
    data = one.begin(0, progress_of([])) + one.event(0, Delta(0, "la"))
    found = frames(data + one.failure(HttpError(status, "no worker", "NO_WORKER", has_begun=True)))
    name, event = found[-1]
    EVENTS.validate_python(event, strict=True)
    assert (name, event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": code, "message": "no worker"}
    assert event["sequence_number"] == len(found) - 1
