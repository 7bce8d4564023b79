"""`/v1/messages` over real sockets by the `anthropic` package: events, tools, errors, keys, and a coding agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from pydantic import TypeAdapter

from common.rpc.api_keys import Role, new_key
from common.rpc.auth import KeyAccess
from common.rpc.key_store import KeyStore
from facade.http import runner
from router.security import RouterSecurity
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.http_bench import facade_of
from tests.e2e.router_bench import Bench, bench, collect, until
from tests.e2e.test_contract import admin_of
from tests.e2e.test_http_responses import ARGUMENTS, DESCRIPTION, FILES, answer, submitted

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK: Any = {"name": "look", "description": "looks", "input_schema": SCHEMA}
ASK: Any = {"model": "m", "max_tokens": 300, "messages": [{"role": "user", "content": "say"}], "tools": [LOOK]}


@dataclass
class Served:
    """A router with a model that thinks and calls a tool, a facade, and Anthropic's client of it."""

    router: Bench
    url: str
    client: anthropic.AsyncAnthropic


def client_of(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    worker = FakeWorker(FILES, answer=answer, description=DESCRIPTION)
    async with (
        bench(worker) as router,
        facade_of([router.router.server.address]) as http,
        client_of(http.url) as client,
    ):
        yield Served(router, http.url, client)
        await router.empty()


def checked(event: Any) -> Any:
    """The event, valid for Anthropic's types."""
    EVENTS.validate_python(event.to_dict(), strict=True)
    return event


def said(message: Message) -> list[tuple[str, Any]]:
    """Kind and content of each block of a message."""
    found: list[tuple[str, Any]] = []
    for block in message.content:
        if block.type == "thinking":
            found.append((block.type, block.thinking))
        elif block.type == "text":
            found.append((block.type, block.text))
        elif block.type == "tool_use":
            found.append((block.name, block.input))
    return found


EXPECTED = [("thinking", "so lo"), ("text", "la la"), ("look", {"at": "la"})]


@pytest.mark.client("anthropic", "messages, whole and streamed, async")
async def test_stream_and_whole_message_are_the_same(served: Served) -> None:
    whole = await served.client.messages.create(**ASK, extra_body={"request_id": "r7", "seed": 7})
    Message.model_validate(whole.to_dict(), strict=True)
    same = {"request_id": "r7", "seed": 7}
    events = [
        checked(event) async for event in await served.client.messages.create(**ASK, extra_body=same, stream=True)
    ]
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    async with served.client.messages.stream(**ASK, extra_body=same) as stream:
        streamed = await stream.get_final_message()
    assert said(streamed) == said(whole) == EXPECTED
    assert streamed.id == whole.id == "msg_r7"
    assert (streamed.stop_reason, whole.stop_reason) == ("tool_use", "tool_use")
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert events[0].message.usage.input_tokens + (events[0].message.usage.cache_read_input_tokens or 0) > 0


@pytest.mark.client("anthropic", "messages, streamed, sync")
async def test_synchronous_client_streams(served: Served) -> None:
    def read() -> list[tuple[str, Any]]:
        with (
            anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client,
            client.messages.stream(**ASK) as stream,
        ):
            return said(stream.get_final_message())

    assert await asyncio.to_thread(read) == EXPECTED


@pytest.mark.client("anthropic", "a session of a coding agent with tools, by messages")
async def test_session_of_a_coding_agent_is_the_request_of_grpc(served: Served) -> None:
    """Sends what Claude Code sends: beta headers, marks of the prompt cache, and the result of the call."""
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "You are a coding agent.", **cached}, {"type": "text", "text": "Be brief."}]
    agent: Any = {
        "model": "m",
        "max_tokens": 300,
        "system": system,
        "stop_sequences": ["so so"],
        "extra_body": {"seed": 7, "temperature": 0.5, "top_k": 3},
        "tools": [{**LOOK, **cached}],
        "metadata": {"user_id": "user_1_account__session_1"},
        "thinking": {"type": "enabled", "budget_tokens": 100},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "weather?", **cached}]}]
    async with served.client.beta.messages.stream(**agent, messages=talk) as stream:
        first = await stream.get_final_message()
    call = first.content[-1].to_dict()
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "sunny"}],
        **cached,
    }
    talk += [
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    async with served.client.beta.messages.stream(**agent, messages=talk) as stream:
        second = await stream.get_final_message()
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert (second.content[-1].text, second.stop_reason) == ("la é", "end_turn")  # type: ignore[union-attr]
    tool = pb.Tool(
        name="look", description="looks", parameters_json='{"type":"object","properties":{"at":{"type":"string"}}}'
    )
    params = pb.SamplingParams(max_tokens=300, temperature=0.5, top_k=3, stop_strings=["so so"], seed=7)
    request = pb.ChatRequest(tools=[tool], sampling_params=params, reasoning=pb.ReasoningOptions(max_tokens=100))
    request.messages.add(role="system", content="You are a coding agent.\n\nBe brief.")
    request.messages.add(role="user", content="weather?")
    turn = request.messages.add(role="assistant", reasoning="so lo", content="la la")
    turn.tool_calls.add(id=call["id"], name="look", arguments_json=ARGUMENTS)
    request.messages.add(role="tool", tool_call_id=call["id"], name="look", content="sunny")
    await collect(served.router.stub.Chat(request))
    [_, second_turn, by_grpc] = submitted(served.router)
    assert by_grpc == second_turn


@pytest.mark.client("anthropic", "`count_tokens`")
async def test_count_equals_the_tokens_of_the_prompt(served: Served) -> None:
    prompt: Any = {name: value for name, value in ASK.items() if name != "max_tokens"}
    counted = await served.client.messages.count_tokens(**prompt, system="Be brief.")
    usage = (await served.client.messages.create(**ASK, system="Be brief.")).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.client("anthropic", "models")
async def test_models_are_listed_for_this_package_too(served: Served) -> None:
    listed = [model async for model in served.client.models.list()]
    one = await served.client.models.retrieve("m")
    assert [(model.id, model.display_name, model.max_input_tokens) for model in [*listed, one]] == [
        ("m", "m", 4096)
    ] * 2
    ModelInfo.model_validate_json(one.to_json(), strict=True)


async def test_stop_sequence_is_named(served: Served) -> None:
    asked = {**ASK, "tools": [], "stop_sequences": ["la la"]}
    message = await served.client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "la la")


async def test_bad_requests_are_refused_by_name_before_the_stream(served: Served) -> None:
    long = [{"role": "user", "content": "la " * 9000}]
    for fields, words in (
        ({"container": "c"}, "container is not served"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 200}, "temperature"),
        ({"stop_sequences": ["a", "b" * 999]}, "stop_sequences[1]"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [{**LOOK, "strict": True, "input_schema": {"type": "object", "if": {}}}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"if": {}}}}}, "output_config.format.schema"),
        ({"messages": long}, "prompt is too long"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await served.client.messages.create(**ASK | {"extra_body": fields}, stream=True)
        body: Any = caught.value.body
        assert body["error"]["type"] == "invalid_request_error"
        assert words in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        await served.client.messages.count_tokens(model="other", messages=[{"role": "user", "content": "say"}])


@pytest.mark.client("anthropic", "API keys")
async def test_key_in_the_header_of_anthropic_is_checked_by_the_router() -> None:
    key, kept = new_key("alice", "gold", [Role.INFER])
    security = RouterSecurity(access=KeyAccess(KeyStore(None, [kept.line()])))
    worker = FakeWorker(FILES, answer=answer, description=DESCRIPTION)
    async with bench(worker, start=False, security=security) as router:
        await until(lambda: router.ready_workers() == 1)
        async with facade_of([router.router.server.address]) as http:
            async with client_of(http.url, key) as client:
                assert said(await client.messages.create(**ASK)) == EXPECTED
                assert (await client.messages.count_tokens(model="m", messages=ASK["messages"])).input_tokens > 0
            async with client_of(http.url, "wrong") as client:
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await client.messages.create(**ASK)
                body: Any = caught.value.body
                assert body["error"]["type"] == "authentication_error"
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.count_tokens(model="m", messages=ASK["messages"])


@pytest.mark.client("anthropic", "failure after the first byte: an error event")
async def test_failure_after_text_is_an_error_event() -> None:
    async with bench(admin_port=0) as router, facade_of([router.router.server.address]) as http:
        admin = await admin_of(router)
        asked = {"model": "m", "max_tokens": 4000, "messages": ASK["messages"], "extra_body": {"request_id": "r7"}}
        async with client_of(http.url) as client:
            events = aiter(await client.messages.create(**asked, stream=True))
            while (await anext(events)).type != "content_block_start":
                pass
            await admin.CancelRequest(apb.CancelRequestRequest(request_id="r7"))
            with pytest.raises(anthropic.APIStatusError, match="operator"):
                [event async for event in events]
        await router.empty()


async def test_silent_stream_has_ping_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SSE_PING_S", 0.01)
    worker = FakeWorker(step_s=60, files=FILES)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        asked = {"model": "m", "max_tokens": 9, "messages": ASK["messages"], "stream": True}
        async with (
            httpx2.AsyncClient(timeout=60.0) as client,
            client.stream("POST", f"{http.url}/v1/messages", json=asked) as response,
        ):
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(2)] == ["event: ping", 'data: {"type":"ping"}']
        await router.empty()
