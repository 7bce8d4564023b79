"""`/v1/responses` over real sockets by the `openai` package: events, tools, errors, and a session of a coding agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.constraints.library import ENGINE
from common.text.tokenizer import Tokenizer
from facade.http import runner
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.http_bench import HttpBench, facade_of
from tests.e2e.router_bench import Bench, bench, collect, until
from tests.e2e.test_contract import admin_of
from tests.unit.router.support import EOS, tool_files

FILES = tool_files()
TOKENIZER = Tokenizer.from_files(FILES)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ARGUMENTS = '{"at": "la"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
LOOK: Any = {
    "type": "function",
    "name": "look",
    "description": "looks",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
# A model whose workers compile grammars.
DESCRIPTION = {"vocab_size": 304, "grammar_engine": ENGINE, "eos_token_ids": [EOS]}
# The first turn calls a tool, and the others end the session.
FIRST = f"<think>\nso lo\n</think>\n\nla la {CALL}"
SECOND = "<think>\nlo\n</think>\n\nla é"
ASK: Any = {"model": "m", "input": "say", "tools": [LOOK], "max_output_tokens": 300}


def answer(submitted: wpb.SubmitSequence) -> list[int]:
    """The first answer until the prompt has a result of the tool."""
    said = SECOND if "sunny" in TOKENIZER.decode(list(submitted.token_ids)) else FIRST
    return [*TOKENIZER.encode(said), EOS]


@dataclass
class Served:
    """A router with a model that thinks and calls a tool, and a facade."""

    router: Bench
    http: HttpBench

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return self.http.openai

    @property
    def submitted(self) -> list[tuple[str, wpb.SamplingParams, int]]:
        """Prompt, parameters and seed of each sequence that the worker got."""
        return submitted(self.router)


def submitted(router: Bench) -> list[tuple[str, wpb.SamplingParams, int]]:
    return [(TOKENIZER.decode(list(one.token_ids)), one.params, one.seed) for one in router.workers[0].submitted]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    worker = FakeWorker(FILES, answer=answer, description=DESCRIPTION)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        yield Served(router, http)
        await router.empty()


def checked(event: Any) -> Any:
    """The event, valid for OpenAI's types."""
    EVENTS.validate_python(event.to_dict(), strict=True)
    return event


def said(response: Response) -> list[tuple[str, str]]:
    """Kind and text of each item of a response."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        elif item.type == "reasoning":
            assert item.content is not None
            found.append((item.type, "".join(part.text for part in item.content)))
        elif item.type == "message":
            found.append((item.type, response.output_text))
    return found


EXPECTED = [("reasoning", "so lo"), ("message", "la la"), ("look", ARGUMENTS)]


@pytest.mark.client("openai", "responses, whole and streamed, async")
async def test_stream_and_whole_response_are_the_same(served: Served) -> None:
    events = [
        checked(event)
        async for event in await served.openai.responses.create(**ASK, extra_body={"seed": 7}, stream=True)
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
    streamed = events[-1].response
    whole = await served.openai.responses.create(**ASK, extra_body={"seed": 7})
    Response.model_validate(whole.to_dict(), strict=True)
    assert said(streamed) == said(whole) == EXPECTED
    assert (streamed.status, streamed.usage) == ("completed", whole.usage)
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.client("openai", "responses by the stream helper")
async def test_stream_helper_of_the_package_builds_the_response(served: Served) -> None:
    async with served.openai.responses.stream(**ASK) as stream:
        async for event in stream:
            checked_type = event.type
        final = await stream.get_final_response()
    assert checked_type == "response.completed"
    assert said(final) == EXPECTED


@pytest.mark.client("openai", "responses, streamed, sync")
async def test_synchronous_client_streams(served: Served) -> None:
    def read() -> list[tuple[str, str]]:
        with openai.OpenAI(base_url=f"{served.http.url}/v1", api_key="none", max_retries=0) as client:
            events = [checked(event) for event in client.responses.create(**ASK, stream=True)]
            return said(events[-1].response)

    assert await asyncio.to_thread(read) == EXPECTED


async def test_ids_are_functions_of_the_request_id(served: Served) -> None:
    first, second = [await served.openai.responses.create(**ASK, extra_body={"request_id": "r7"}) for _ in range(2)]
    assert first.id == second.id == "resp_r7"
    assert (
        [item.id for item in first.output] == [item.id for item in second.output] == ["rs_r7_0", "msg_r7_1", "fc_r7_2"]
    )
    assert first.output[2].call_id == second.output[2].call_id


@pytest.mark.client("openai", "a session of a coding agent with tools, by responses")
async def test_session_of_a_coding_agent_is_the_request_of_grpc(served: Served) -> None:
    """Sends what Codex sends: all items of the answer and the result of its call."""
    agent: Any = {
        "model": "m",
        "instructions": "You are a coding agent.",
        "tools": [LOOK],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "stream": True,
        "temperature": 0.5,
        "extra_body": {"seed": 7},
    }
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    ]
    done = [
        event.item.to_dict()
        async for event in await served.openai.responses.create(**agent, input=items)
        if event.type == "response.output_item.done"
    ]
    call = done[-1]
    items += [*done, {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    events = [checked(event) async for event in await served.openai.responses.create(**agent, input=items)]
    assert said(events[-1].response) == [("reasoning", "lo"), ("message", "la é")]
    turn = pb.ChatMessage(role="assistant", reasoning="so lo", content="la la")
    turn.tool_calls.add(id=call["call_id"], name="look", arguments_json=ARGUMENTS)
    tool = pb.Tool(name="look", description="looks", parameters_json=_parameters())
    request = pb.ChatRequest(tools=[tool], sampling_params=pb.SamplingParams(temperature=0.5, seed=7))
    request.messages.add(role="system", content="You are a coding agent.\n\nBe brief.")
    request.messages.add(role="user", content="weather?")
    request.messages.append(turn)
    request.messages.add(role="tool", tool_call_id=call["call_id"], name="look", content="sunny")
    await collect(served.router.stub.Chat(request))
    assert served.submitted[2] == served.submitted[1]


def _parameters() -> str:
    return '{"type":"object","properties":{"at":{"type":"string"}}}'


async def test_bad_requests_are_refused_by_name_before_the_stream(served: Served) -> None:
    for fields, param, code in (
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "la " * 9000}, "input", "context_length_exceeded"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.responses.create(**{**ASK, **fields}, stream=True)
        assert (caught.value.param, caught.value.code) == (param, code)


async def test_unknown_model_is_not_found(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await served.openai.responses.create(**{**ASK, "model": "other"}, stream=True)
    assert caught.value.code == "model_not_found"


async def test_failure_after_text_ends_the_stream_with_response_failed() -> None:
    async with bench(admin_port=0) as router, facade_of([router.router.server.address]) as http:
        admin = await admin_of(router)
        asked = {"model": "m", "input": "say", "extra_body": {"request_id": "r7"}, "stream": True}
        events = []
        async for event in await http.openai.responses.create(**asked):  # type: ignore[call-overload]
            if event.type == "response.content_part.added":
                await admin.CancelRequest(apb.CancelRequestRequest(request_id="r7"))
            events.append(checked(event))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert "operator" in events[-1].response.error.message
        await router.empty()


async def test_closed_connection_cancels_the_answer() -> None:
    async with bench() as router, facade_of([router.router.server.address]) as http:
        stream = await http.openai.responses.create(model="m", input="say", max_output_tokens=4000, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await router.empty()


async def test_silent_stream_has_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first token too, because clients end a stream that has no events."""
    monkeypatch.setattr(runner, "SSE_PING_S", 0.01)
    worker = FakeWorker(FILES, answer=answer, description=DESCRIPTION, step_s=60)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        stream = await http.openai.responses.create(**ASK, stream=True)
        kinds = [str((await anext(aiter(stream))).type) for _ in range(4)]
        assert kinds == ["response.created", "response.in_progress", "keepalive", "keepalive"]
        await stream.close()
        await router.empty()


async def test_failure_before_text_ends_a_stream_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SSE_PING_S", 0.01)
    worker = FakeWorker(FILES, answer=answer, description=DESCRIPTION, step_s=60)
    async with bench(worker, admin_port=0) as router, facade_of([router.router.server.address]) as http:
        admin = await admin_of(router)
        async with http.openai.responses.stream(**ASK, extra_body={"request_id": "r7"}) as stream:
            kinds = []
            async for event in stream:
                kinds.append(str(event.type))
                if len(kinds) == 1:
                    await until(lambda: router.workers[0].submitted)
                    await admin.CancelRequest(apb.CancelRequestRequest(request_id="r7"))
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.failed"
        await router.empty()
