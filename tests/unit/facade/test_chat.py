"""Chunks of chat completions: however an answer is cut into events, a client rebuilds the same message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fissile.client import Event, Finished
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from common.errors import ApiError
from facade.http.sse import joined
from facade.openai import chat, completions
from tests.unit.facade.answers import ANSWERS, Part, call_id, deltas, progress_of, result_of

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
CHUNK: TypeAdapter[Any] = TypeAdapter(ChatCompletionChunk)
WHOLE: TypeAdapter[Any] = TypeAdapter(ChatCompletion)
FINISH = pb.Finish(reason=pb.FINISH_REASON_STOP, exact=True)


def encoder() -> Any:
    return chat.parse(msgspec.json.encode(BODY), 7).encoder


def message_of(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str, str]]]:
    calls = [part for part in parts if part.channel == "call"]
    return (
        "".join(part.text for part in parts if part.channel == "reasoning"),
        "".join(part.text for part in parts if part.channel == "text"),
        [(call_id(i), part.name, part.text) for i, part in enumerate(calls)],
    )


@given(ANSWERS, st.data(), st.booleans())
def test_chunks_rebuild_the_message_however_it_is_cut(parts: list[Part], data: st.DataObject, joins: bool) -> None:
    events: list[Event] = [*deltas(parts, lambda length: data.draw(st.integers(0, length))), Finished(0, FINISH)]
    numbered: list[tuple[int, Event]] = [(0, event) for event in events]
    one = encoder()
    written = one.begin(0, progress_of([])) + b"".join(
        one.event(number, event) for number, event in (joined(numbered) if joins else numbered)
    )
    *frames, done = (written + one.end()).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    reasoning = text = ""
    calls: list[list[str]] = []
    for frame in frames:
        chunk = msgspec.json.decode(frame.removeprefix("data: "))
        CHUNK.validate_python(chunk, strict=True)
        delta = chunk["choices"][0]["delta"]
        reasoning += delta.get("reasoning_content", "")
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
    assert (reasoning, text, [tuple(call) for call in calls]) == message_of(parts)


@given(ANSWERS)
def test_whole_message_is_that_of_the_answer(parts: list[Part]) -> None:
    events: list[Event] = [*deltas(parts, lambda length: length), Finished(0, FINISH)]
    whole = msgspec.json.decode(msgspec.json.encode(encoder().whole([result_of(events)])))
    WHOLE.validate_python(whole, strict=True)
    message = whole["choices"][0]["message"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    assert (message.get("reasoning_content", ""), message["content"] or "", calls) == message_of(parts)


@pytest.mark.parametrize("parse", [chat.parse, completions.parse])
@given(
    body=st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["model", "messages", "role", "content", "prompt", "stop", "n", "tools", "seed", "x"]),
                inner,
                max_size=4,
            )
        ),
    ).map(msgspec.json.encode)
)
def test_any_body_is_a_plan_or_a_named_refusal(parse: Any, body: bytes) -> None:
    try:
        found = parse(body, 7)
    except ApiError as error:
        found = error.message
    assert found


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_effort_is_a_variable_of_the_chat_template(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    given = chat.parse(msgspec.json.encode(BODY | fields), 0).arguments["template_arguments_json"]
    assert (msgspec.json.decode(given) if isinstance(given, str) else given) == variables


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "huge"}, {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}]
)
def test_unknown_or_second_effort_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        chat.parse(msgspec.json.encode(BODY | fields), 0)
    assert refused.value.violations[0].path == "reasoning_effort"
