"""Bad JSON in any field of a request is the client's fault, with the field and the place in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2

from common.constraints.library import ENGINE
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import Bench, bench, collect, detail
from tests.e2e.test_tools import ANSWER, calls_of, chat, content_of, worker_of
from tests.unit.common.test_json_text import BAD, ODD
from tests.unit.router.support import EOS

Field = Callable[[str], pb.ChatRequest]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def worker(answer: str = ANSWER) -> FakeWorker:
    """A worker that serves tools and constraints."""
    made = worker_of(answer=answer)
    made.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    return made


def of_template(value: str) -> pb.ChatRequest:
    return chat(template_arguments_json=f'{{"x": {{"y": {value}}}}}')


def of_tool(value: str, **others: Any) -> pb.ChatRequest:
    parameters = f'{{"type": "object", "properties": {{"a": {{"type": "string", "default": {value}}}}}}}'
    return chat(tools=[pb.Tool(name="look", parameters_json=parameters, **others)])


def of_strict_tool(value: str) -> pb.ChatRequest:
    return of_tool(value, strict=True)


def of_required_tool(value: str) -> pb.ChatRequest:
    made = of_tool(value, strict=True)
    made.tool_choice.name = "look"
    return made


def of_call(value: str) -> pb.ChatRequest:
    made = chat()
    called = pb.ToolCall(id="a" * 9, name="look", arguments_json=f'{{"a": {value}}}')
    made.messages.add(role="assistant", tool_calls=[called])
    made.messages.add(role="tool", tool_call_id="a" * 9, content="seen")
    return made


def of_schema(value: str) -> pb.ChatRequest:
    return confined(json_schema=f'{{"items": {{"enum": [1, {value}]}}}}')


def of_note(value: str) -> pb.ChatRequest:
    return confined(json_schema=f'{{"type": "string", "title": "a", "examples": {value}}}')


def of_name(value: str) -> pb.ChatRequest:
    return confined(json_schema=f'{{"properties": {{"a": {{"default": {value}}}}}, "type": "object"}}')


def of_grammar(value: str) -> pb.ChatRequest:
    return confined(grammar=f'start: "x" %json {{"enum": [1, {value}]}} "y"')


def confined(**form: Any) -> pb.ChatRequest:
    made = chat(tools=[])
    made.sampling_params.constraint.CopyFrom(pb.Constraint(**form))
    return made


FIELDS: dict[str, tuple[Field, str]] = {
    "template": (of_template, "template_arguments_json"),
    "tool": (of_tool, "tools[0].parameters_json"),
    "strict tool": (of_strict_tool, "tools[0].parameters_json"),
    "required tool": (of_required_tool, "tools[0].parameters_json"),
    "call": (of_call, "messages[1].tool_calls[0].arguments_json"),
    "schema": (of_schema, "sampling_params.constraint.json_schema"),
    "note of a schema": (of_note, "sampling_params.constraint.json_schema"),
    "name in a schema": (of_name, "sampling_params.constraint.json_schema"),
    "schema in a grammar": (of_grammar, "sampling_params.constraint.grammar"),
}


def callers_of(b: Bench, request: pb.ChatRequest) -> list[Any]:
    """Every call that reads the request, each yet to be made."""
    request.request_id = ""
    request.sampling_params.max_tokens = 1
    called = [partial(b.stub.Chat, request), partial(b.stub.ChatOnce, request)]
    if request.sampling_params.HasField("constraint"):
        plain = pb.GenerateRequest(text="hi", sampling_params=request.sampling_params)
        return [*called, partial(b.stub.Generate, plain), partial(b.stub.GenerateOnce, plain)]
    return [
        *called,
        partial(b.stub.CountTokens, pb.CountTokensRequest(chat=request)),
        partial(b.stub.RenderPrompt, pb.RenderPromptRequest(chat=request)),
    ]


async def outcome_of(call: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    """Status of a call, its message, and the fields that its violations name."""
    try:
        async with asyncio.timeout(60):
            await (collect(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        fields = []
        if error.code() is INVALID:
            violations = detail(error, error_details_pb2.BadRequest).field_violations
            fields = [one.field.removeprefix("chat.") for one in violations]
        return error.code(), str(error.details()), fields
    return grpc.StatusCode.OK, "", []


@pytest.mark.parametrize("name", FIELDS)
async def test_bad_json_is_refused_with_field_and_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    made, path = FIELDS[name]
    async with bench(worker()) as b:
        for kind, (value, said) in BAD.items():
            for call in callers_of(b, made(value)):
                code, message, fields = await outcome_of(call())
                assert (code, fields) == (INVALID, [path]), (kind, message)
                # Text that is no JSON value makes the whole JSON around it invalid.
                assert said in message or "is not valid JSON" in message, kind
        await b.empty()
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize("name", FIELDS)
async def test_odd_json_is_served_or_refused_by_name(name: str) -> None:
    made, path = FIELDS[name]
    async with bench(worker()) as b:
        for kind, value in ODD.items():
            for call in callers_of(b, made(value)):
                code, message, fields = await outcome_of(call())
                # Thousands of digits need more tokens than the model accepts.
                is_too_long = code is grpc.StatusCode.OUT_OF_RANGE and kind in ("digits", "lists")
                is_fine = code is grpc.StatusCode.OK or is_too_long or (code, fields) == (INVALID, [path])
                assert is_fine, (kind, code, message)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (r'{"name": "look", "arguments": {"a": "\ud83d"}}', "look"),
        (r'{"name": "look", "arguments": {"\ud83d": [1]}}', "look"),
        (r'{"name": "lo\ud800ok", "arguments": {"a": "x"}}', ""),
        (r'{"name": "\ud800", "arguments": {}}', ""),
        (r'{"na\ud800me": "look", "arguments": {}}', ""),
    ],
)
async def test_lone_surrogate_of_model_ends_no_stream(call: str, name: str) -> None:
    """Half a surrogate pair stays an escape in arguments. In a name it makes the call plain content."""
    text = f"<tool_call>\n{call}\n</tool_call>"
    async with bench(worker(text)) as b:
        parts = await collect(b.stub.Chat(chat()))
        calls = calls_of(parts)
        assert [one.name for one in calls] == [name] * bool(name)
        assert content_of(parts) == ("" if name else text)
        assert all(one.arguments_json in call for one in calls)
        await b.empty()
