"""`/v1/chat/completions` over real sockets by the `openai` package.

A test whose docstring names a surprise shows what users of other servers reported as a fault.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import openai
import pytest
from fissile.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from fissile.worker.v1 import worker_pb2 as wpb
from structlog.testing import capture_logs

from common.constraints.library import ENGINE
from common.errors import QueueFullError
from common.rpc.errors import abort
from common.text.tokenizer import Tokenizer
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.http_bench import HttpBench, checked, facade_of
from tests.e2e.router_bench import Bench, bench, until
from tests.scripted_router import PartialRouter
from tests.unit.router.support import EOS, tool_files

FILES = tool_files()
TOKENIZER = Tokenizer.from_files(FILES)
ARGUMENTS = ('{"z": 1.50, "a": "so } la"}', '{"a": "é"}')
CALLS = "\n".join(f'<tool_call>\n{{"name": "look", "arguments": {each}}}\n</tool_call>' for each in ARGUMENTS)
CALLING = f"<think>\nla\n</think>\n\nso:\n{CALLS}"
PLAIN = "<think>\nla\n</think>\n\nhello é"
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
}
SAY: Any = {"model": "m", "messages": [{"role": "user", "content": "say"}], "seed": 7, "max_tokens": 300}


def answer(submitted: wpb.SubmitSequence) -> list[int]:
    """Calls of tools if the prompt has some; else a text."""
    return [*TOKENIZER.encode(CALLING if "look" in TOKENIZER.decode(list(submitted.token_ids)) else PLAIN), EOS]


@dataclass
class Served:
    """A router with a model that thinks and calls a tool, and a facade."""

    router: Bench
    bench: HttpBench

    async def create(self, **more: Any) -> Any:
        return checked(await self.bench.openai.chat.completions.create(**SAY | more))

    async def stream(self, **more: Any) -> list[Any]:
        stream = await self.bench.openai.chat.completions.create(**SAY | more, stream=True)
        return [checked(chunk) async for chunk in stream]

    async def post(self, body: Any, **headers: str) -> Any:
        return await self.bench.http.post("/v1/chat/completions", json=body, headers=headers)

    @property
    def params(self) -> Any:
        """Sampling parameters of the newest request, as its worker has received them."""
        return self.router.workers[0].submitted[-1].params


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    description = {"vocab_size": 304, "grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    worker = FakeWorker(FILES, answer=answer, description=description)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        yield Served(router, http)
        await router.empty()


@pytest.mark.client("openai", "chat completions, whole and streamed, async")
async def test_stream_and_whole_answer_are_equal(served: Served) -> None:
    whole = await served.create()
    chunks = await served.stream()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", "") for chunk in chunks)
    assert text == whole.choices[0].message.content == "hello é"
    assert thought == whole.choices[0].message.reasoning_content == "la"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].fissile["exact"] is whole.choices[0].fissile["exact"] is True
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}


@pytest.mark.client("openai", "chat completions, whole and streamed, sync")
async def test_synchronous_client_reads_both(served: Served) -> None:
    def read() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{served.bench.url}/v1", api_key="none", max_retries=0) as client:
            whole = checked(client.chat.completions.create(**SAY))
            chunks = [checked(chunk) for chunk in client.chat.completions.create(**SAY, stream=True)]
        return whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(read) == ("hello é", "hello é")


async def test_error_is_an_object_with_param_and_no_422(served: Served) -> None:
    """Surprise 1."""
    for body, param, status in [
        (SAY | {"top_p": 7}, "top_p", 400),
        (SAY | {"messages": "hi"}, "messages", 400),
        (SAY | {"messages": [{"content": "hi"}]}, "messages[0].role", 400),
        ({"model": "m"}, "messages", 400),
        (SAY | {"n": "two"}, "n", 400),
        (SAY | {"model": "other"}, None, 404),
        ([], "body", 400),
    ]:
        response = await served.post(body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"]
    with pytest.raises(openai.NotFoundError) as caught:
        await served.create(model="other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_too_long_prompt_is_status_400_also_with_stream(served: Served, is_stream: bool) -> None:
    """Surprise 2."""
    with pytest.raises(openai.BadRequestError) as caught:
        await served.create(messages=[{"role": "user", "content": "hi" * 9000}], stream=is_stream)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "messages"


@pytest.mark.client("openai", "tool calls, whole and streamed")
async def test_tool_deltas_have_index_always_and_name_once(served: Served) -> None:
    """Surprises 3, 4 and 6."""
    chunks = await served.stream(tools=[LOOK])
    calls: dict[int, Any] = {}
    for delta in (chunk.choices[0].delta for chunk in chunks):
        for call in delta.tool_calls or ():
            if call.index not in calls:
                assert call.id
                assert (call.type, call.function.name) == ("function", "look")
                calls[call.index] = [call.id, ""]
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            calls[call.index][1] += call.function.arguments
    assert [text for _, text in calls.values()] == [*ARGUMENTS]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    whole = (await served.create(tools=[LOOK])).choices[0]
    assert [[call.id, call.function.arguments] for call in whole.message.tool_calls] == [*calls.values()]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "so:")
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]


async def test_conversation_with_calls_is_sent_back_as_received(served: Served) -> None:
    message = (await served.create(tools=[LOOK])).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
    await served.create(messages=[*SAY["messages"], message.to_dict(), *results], tools=[LOOK])
    prompt = TOKENIZER.decode(list(served.router.workers[0].submitted[-1].token_ids))
    assert prompt.count("so } la") == 1
    assert prompt.count("sun") == 2


@pytest.mark.client("openai", "several answers (`n`)")
async def test_choice_index_is_the_choice(served: Served) -> None:
    """Surprise 5."""
    chunks = await served.stream(n=3)
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2}
    roles = [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks if chunk.choices[0].delta.role]
    assert sorted(roles) == [(i, "assistant") for i in range(3)]
    whole = await served.create(n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage.completion_tokens == 3 * (await served.create()).usage.completion_tokens


@pytest.mark.client("openai", "`stream_options.include_usage`")
async def test_usage_has_a_last_chunk_without_choices_on_request_alone(served: Served) -> None:
    """Surprise 7."""
    plain = await served.stream()
    assert all(len(chunk.choices) == 1 for chunk in plain)
    response = await served.post(SAY | {"stream": True, "stream_options": {"include_usage": True}})
    *frames, last, done = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    assert all(json.loads(frame)["usage"] is None and json.loads(frame)["choices"] for frame in frames)
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"] == (await served.create()).usage.to_dict() | {
        "prompt_tokens_details": json.loads(last)["usage"]["prompt_tokens_details"]
    }


@pytest.mark.parametrize(("stop", "strings"), [(None, []), ("o", ["o"]), (["o", "é"], ["o", "é"])])
async def test_stop_is_null_a_string_or_a_list_and_is_obeyed(served: Served, stop: Any, strings: list[str]) -> None:
    """Surprise 9."""
    choice = (await served.create(stop=stop)).choices[0]
    assert choice.message.content == ("hell" if strings else "hello é")
    assert choice.stop_reason == ("o" if strings else None)


async def test_max_completion_tokens_beats_max_tokens(served: Served) -> None:
    """Surprise 10."""
    usage = (await served.create(max_tokens=200, max_completion_tokens=3)).usage
    assert usage.completion_tokens == 3
    assert (await served.create(max_tokens=2)).choices[0].finish_reason == "length"


async def test_unserved_field_is_refused_by_name_and_harmless_ones_are_not(served: Served) -> None:
    """Surprise 11."""
    for name, value in {"audio": {}, "store": True, "service_tier": "flex", "prediction": {}, "made_up": 1}.items():
        response = await served.post(SAY | {name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
        assert response.json()["error"]["code"] == "unsupported_parameter"
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]}
    await served.create(**harmless, parallel_tool_calls=True)


@pytest.mark.client("openai", "closed connection, whole and streamed: the worker stops")
async def test_closed_connection_cancels_the_request() -> None:
    """Surprise 13."""
    worker = FakeWorker(FILES, answer=lambda _: TOKENIZER.encode("la") * 40_000, description={"vocab_size": 304})
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        request: Any = SAY | {"max_tokens": 3000}
        async with await http.openai.chat.completions.create(**request, stream=True) as stream:
            async for _ in stream:
                break
        await router.empty()
        whole = asyncio.ensure_future(http.openai.chat.completions.create(**request))
        await until(lambda: router.router.service.in_flight == 1)
        whole.cancel()
        await router.empty()


@pytest.mark.client("openai", "full queue: status 429")
async def test_full_queue_is_429_with_retry_after_at_once() -> None:
    class Full(PartialRouter):
        calls = 0

        async def Chat(self, request: Any, context: Any) -> Any:  # type: ignore[override]
            self.calls += 1
            await abort(context, QueueFullError(9, retry_after_s=7.0))

    router = Full()
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with facade_of([f"127.0.0.1:{port}"]) as http:
        response = await http.http.post("/v1/chat/completions", json=SAY)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("7", "true")
        assert router.calls == 1
    await server.stop(None)


async def test_silent_stream_gets_comments(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Surprise 12."""
    monkeypatch.setattr("facade.http.runner.SSE_PING_S", 0.05)
    worker = served.router.workers[0]
    worker.silent = True
    body = SAY | {"stream": True, "tools": [LOOK]}
    async with served.bench.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        pings = []
        async for line in lines:
            if line == ": ping":
                pings.append(line)
                worker.silent = False
            if line == "data: [DONE]":
                break
        assert pings


async def test_fingerprint_is_the_numerics_class_and_seeds_may_be_negative(served: Served) -> None:
    """Surprise 17."""
    assert (await served.create()).system_fingerprint == "nn"
    assert {chunk.system_fingerprint for chunk in await served.stream(seed=-1)} == {"nn"}
    assert served.router.workers[0].submitted[-1].seed == (1 << 64) - 1


async def test_token_ids_of_prompt_and_answer_on_request(served: Served) -> None:
    """Surprise 19."""
    whole = await served.create(extra_body={"return_token_ids": True})
    assert whole.choices[0].token_ids == [*TOKENIZER.encode(PLAIN), EOS]
    assert whole.prompt_token_ids == [*served.router.workers[0].submitted[-1].token_ids]
    response = await served.post(SAY | {"stream": True, "return_token_ids": True})
    frames = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    ids = [token for frame in frames for token in frame["choices"][0].get("token_ids", ())]
    assert ids == whole.choices[0].token_ids
    assert [frame.get("prompt_token_ids") for frame in frames] == [whole.prompt_token_ids, *[None] * (len(frames) - 1)]


@pytest.mark.client("openai", "`response_format` and `tool_choice`")
async def test_response_format_and_tool_choice_confine_the_answer(served: Served) -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    await served.create(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert served.params.grammar
    await served.create(tools=[LOOK], tool_choice={"type": "function", "function": {"name": "look"}})
    assert served.params.grammar
    await served.create(tools=[LOOK], tool_choice="none")
    assert not served.params.grammar


async def test_receipt_is_a_field_of_the_choice(served: Served) -> None:
    choice = (await served.create(extra_body={"receipt": True})).choices[0]
    assert choice.fissile["receipt"]["output_tokens"] == len(TOKENIZER.encode(PLAIN)) + 1


@pytest.mark.client("openai", "failure after the first byte: APIError")
async def test_failure_after_the_first_byte_is_one_error_event() -> None:
    worker = FakeWorker(FILES, answer=answer, description={"vocab_size": 304}, step_s=0.01)
    async with bench(worker) as router, facade_of([router.router.server.address], give_up_s=0) as http:
        received = []

        async def read() -> None:
            async for chunk in await http.openai.chat.completions.create(**SAY, stream=True):
                received.append(chunk)
                await worker.stop()

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert received
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "server_error"


async def test_deadline_header_ends_the_request(served: Served) -> None:
    served.router.workers[0].silent = True
    response = await served.post(SAY, **{"x-request-timeout-ms": "100"})
    assert response.status_code in (429, 504)
    assert response.headers["x-should-retry"] == "false"
    response = await served.post(SAY, **{"x-request-timeout-ms": "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_request_id_and_trace_are_sent_back(served: Served) -> None:
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    response = await served.post(SAY, traceparent=trace, **{"x-request-id": "mine"})
    assert (response.headers["x-request-id"], response.headers["traceparent"]) == ("mine", trace)
    assert served.router.workers[0].submitted[-1].traceparent.split("-")[1] == "ab" * 16
    assert (await served.post(SAY)).headers["x-request-id"] != "mine"


@pytest.mark.parametrize(
    ("age_s", "written"), [(5.0, "t={:f}"), (0.0, ""), (-5.0, "t={:f}"), (5.0, "at {:f}"), (5.0, "t={:f};clock=mine")]
)
async def test_router_knows_when_the_request_was_sent(served: Served, age_s: float, written: str) -> None:
    """The time of the caller or its proxy counts, else the one at which the head arrived; no time in the future."""
    header = {"x-request-start": written.format(time.time() - age_s)} if written else {}
    with capture_logs() as lines:
        assert (await served.post(SAY, **header)).status_code == 200
        await until(lambda: any("parts_ms" in line for line in lines))
    (inbound_ms,) = [line["parts_ms"].get("inbound", 0.0) for line in lines if "parts_ms" in line]
    if written == "t={:f}":
        assert inbound_ms >= 4900 if age_s > 0 else inbound_ms == 0
    else:
        assert inbound_ms > 0
