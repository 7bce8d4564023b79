"""Events of `/v1/messages`: valid for the `anthropic` package, and the same answer however it is cut into events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from fissile.client import Delta, Event
from fissile.v1 import inference_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from facade.anthropic import messages
from facade.anthropic.message_events import PING, error_form
from facade.http.errors import HttpError
from tests.unit.facade.answers import ANSWERS, Part, call_id, deltas, finished, frames, progress_of, result_of

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BODY = b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}'


def encoder() -> Any:
    return messages.parse(BODY, 1).encoder


def stream(events: Sequence[Event]) -> list[Any]:
    """The events of an answer, each checked."""
    one = encoder()
    data = one.begin(0, progress_of([])) + b"".join(one.event(0, event) for event in events) + one.end()
    found = [event for _, event in frames(data)]
    for event in found:
        EVENTS.validate_python(event, strict=True)
    return found


def rebuilt(found: Sequence[Any]) -> dict[str, Any]:
    """The message as the `anthropic` package builds it of the events."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in found:
        snapshot = accumulate_event(event=EVENTS.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot.to_dict()


def channels(content: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str, Any]]]:
    calls = [(block["id"], block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
    thinking = [block["thinking"] for block in content if block["type"] == "thinking"]
    return "".join(thinking), "".join(block["text"] for block in content if block["type"] == "text"), calls


def expected(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str, Any]]]:
    calls = [part for part in parts if part.channel == "call"]
    return (
        "".join(part.text for part in parts if part.channel == "reasoning"),
        "".join(part.text for part in parts if part.channel == "text"),
        [(call_id(i), part.name, json.loads(part.text)) for i, part in enumerate(calls)],
    )


@given(ANSWERS, st.data())
@settings(max_examples=100, deadline=None)
def test_answer_cut_into_any_events_is_the_same(parts: list[Part], data: st.DataObject) -> None:
    events: list[Event] = [*deltas(parts, lambda length: data.draw(st.integers(0, length))), finished()]
    message = rebuilt(stream(events))
    assert channels(message["content"]) == expected(parts)
    whole = encoder().whole([result_of(events)])
    Message.model_validate(whole, strict=True)
    assert channels(whole["content"]) == expected(parts)
    for name in ("id", "role", "model", "stop_reason", "stop_sequence", "usage"):
        assert whole[name] == message[name]


def test_blocks_of_thinking_text_and_call_are_whole() -> None:
    parts = [Part("reasoning", "so"), Part("text", "la"), Part("call", '{"a": 1}', "look"), Part("call", "{}", "wait")]
    found = stream([*deltas(parts, lambda length: length), finished(pb.FINISH_REASON_TOOL_CALLS)])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in found] == [
        *("message_start", block[0], block[1], block[1], block[2], *block, *block, *block),
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in found[1:-2]] == [*[0] * 4, *[1] * 3, *[2] * 3, *[3] * 3]
    start, change = found[0]["message"], found[-2]
    assert (start["id"], start["content"], start["stop_reason"]) == ("msg_r7", [], None)
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (5, 4)
    assert change["delta"]["stop_reason"] == "tool_use"
    assert change["usage"]["output_tokens"] == 5
    assert change["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


@pytest.mark.parametrize(
    ("reason", "stop_string", "tokens", "expected_reason"),
    [
        (pb.FINISH_REASON_STOP, "", 5, "end_turn"),
        (pb.FINISH_REASON_STOP, "###", 5, "stop_sequence"),
        (pb.FINISH_REASON_TOOL_CALLS, "", 5, "tool_use"),
        (pb.FINISH_REASON_LENGTH, "", 5, "max_tokens"),
        (pb.FINISH_REASON_LENGTH, "", 4, "model_context_window_exceeded"),
    ],
)
def test_stop_reason_says_why_the_answer_ended(
    reason: pb.FinishReason.ValueType, stop_string: str, tokens: int, expected_reason: str
) -> None:
    end = finished(reason, stop_string)
    end.finish.usage.completion_tokens = tokens
    change = stream([Delta(0, "la"), end])[-2]["delta"]
    assert (change["stop_reason"], change["stop_sequence"]) == (expected_reason, stop_string or None)


def test_omitted_thinking_leaves_a_block_with_a_signature() -> None:
    body = json.loads(BODY) | {"thinking": {"type": "adaptive", "display": "omitted"}}
    one = messages.parse(json.dumps(body).encode(), 1).encoder
    events: list[Event] = [Delta(0, "", reasoning="so"), Delta(0, "la"), finished()]
    data = one.begin(0, progress_of([])) + b"".join(one.event(0, event) for event in events) + one.end()
    message = rebuilt([event for _, event in frames(data)])
    whole = one.whole([result_of(events)])
    assert message["content"][0] == whole["content"][0]
    assert whole["content"][0]["thinking"] == ""
    assert whole["content"][0]["signature"]


def test_call_that_is_cut_has_an_empty_input() -> None:
    part = pb.ToolCallDelta(index=0, id="c", name="look", arguments_json='{"a')
    result = result_of([Delta(0, "", tool_calls=(part,)), finished(pb.FINISH_REASON_LENGTH)])
    assert encoder().whole([result])["content"][0]["input"] == {}


def test_ping_is_an_event_that_clients_skip() -> None:
    assert frames(PING) == [("ping", {"type": "ping"})]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_failure_is_an_error_event_of_its_type(status: int, kind: str) -> None:
    [(_, event)] = frames(encoder().failure(HttpError(status, "no")))
    assert event == {"type": "error", "error": {"type": kind, "message": "no"}}
    if kind != "request_too_large":
        ErrorResponse.model_validate(event, strict=True)


def test_prompt_that_is_too_long_is_told_in_the_words_that_claude_code_reads() -> None:
    error = HttpError(400, "messages has 5000 tokens; valid: at most 4095", "TOO_LONG", "messages")
    assert error_form(error)["error"]["message"] == "prompt is too long: 5000 tokens > 4095 maximum"
    other = HttpError(400, "messages has 9 bytes", "TOO_LONG", "messages")
    assert error_form(other)["error"]["message"] == "prompt is too long: messages has 9 bytes"
