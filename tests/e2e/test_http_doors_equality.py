"""Random requests by Responses, by Messages and by gRPC: texts, reasoning, calls, ends and counts are the same."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.http_bench import HttpBench, facade_of
from tests.e2e.service import Service, running_service
from tests.e2e.test_http_equality import AT_ONCE, DEMO, SCHEMA, TOOL, WORDS

LENGTH, STOP, CALLS = "length", "stop", "tool_calls"


@dataclass
class DoorAnswer:
    """An answer that every door can tell.

    Attributes:
        text: content.
        thought: reasoning.
        calls: name and arguments of each call.
        end: LENGTH, CALLS, STOP or the stop string; of Responses LENGTH or STOP.
        usage: tokens of prompt and answer.
    """

    text: str
    thought: str
    calls: list[tuple[str, Any]]
    end: str
    usage: tuple[int, int]


def drawn(draw: random.Random, path: str) -> tuple[pb.ChatRequest, dict[str, Any]]:
    """A request in the form of gRPC and in that of a door, without `stream`."""
    is_messages = path == "/v1/messages"
    limit = "max_tokens" if is_messages else "max_output_tokens"
    made, seed = pb.ChatRequest(), draw.getrandbits(63)
    body: dict[str, Any] = {"model": "test", "seed": seed, limit: draw.randint(1, 60)}
    made.sampling_params.seed, made.sampling_params.max_tokens = seed, body[limit]
    if draw.random() < 0.4:
        body["system" if is_messages else "instructions"] = system = draw.choice(WORDS)
        made.messages.add(role="system", content=system)
    roles = draw.choice((("user",), ("user", "assistant", "user")))
    turns: list[dict[str, Any]] = [{"role": role, "content": draw.choice(WORDS)} for role in roles]
    made.messages.extend(pb.ChatMessage(**turn) for turn in turns)
    body["messages" if is_messages else "input"] = turns
    for name, values in {"temperature": (0.0, 0.7, 1.0), "top_p": (0.5, 0.9)}.items():
        if draw.random() < 0.6:
            body[name] = draw.choice(values)
            setattr(made.sampling_params, name, body[name])
    if is_messages and draw.random() < 0.4:
        body["top_k"] = made.sampling_params.top_k = draw.choice((1, 20))
    if is_messages and draw.random() < 0.4:
        body["stop_sequences"] = draw.sample((" ", "e", "the"), draw.randint(1, 2))
        made.sampling_params.stop_strings.extend(body["stop_sequences"])
    _form(draw, made, body, is_messages=is_messages)
    return made, body


def _form(draw: random.Random, made: pb.ChatRequest, body: dict[str, Any], *, is_messages: bool) -> None:
    """Sometimes a tool, sometimes a schema."""
    chance = draw.random()
    if chance < 0.3:
        made.tools.add(name=TOOL["name"], parameters_json=json.dumps(TOOL["parameters"]), strict=False)
        shown = {"name": TOOL["name"], "strict": False}
        schema = TOOL["parameters"]
        body["tools"] = [
            shown | {"input_schema": schema} if is_messages else shown | {"type": "function", "parameters": schema}
        ]
        if draw.random() < 0.5:
            made.tool_choice.mode = pb.TOOL_MODE_REQUIRED
            body["tool_choice"] = {"type": "any"} if is_messages else "required"
    elif chance < 0.5 and "stop_sequences" not in body:
        made.sampling_params.constraint.json_schema = json.dumps(SCHEMA)
        form: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
        if is_messages:
            body["output_config"] = {"format": form}
        else:
            body["text"] = {"format": {**form, "name": "x"}}


async def by_grpc(stub: Any, request: pb.ChatRequest) -> DoorAnswer:
    """The answer of a stream by gRPC."""
    text, thought, end, usage = "", "", "", pb.Usage()
    calls: dict[int, list[str]] = {}
    async for part in stub.Chat(request, timeout=120):
        text, thought = text + part.delta.content, thought + part.delta.reasoning
        for call in part.delta.tool_calls:
            found = calls.setdefault(call.index, ["", ""])
            found[0], found[1] = found[0] + call.name, found[1] + call.arguments_json
        if part.HasField("finish"):
            end = pb.FinishReason.Name(part.finish.reason).removeprefix("FINISH_REASON_").lower()
            end, usage = part.finish.stop.stop_string or end, part.finish.usage
    return DoorAnswer(
        text,
        thought,
        [(name, said) for name, said in calls.values()],
        end,
        (usage.prompt_tokens, usage.completion_tokens),
    )


def of_response(said: Mapping[str, Any]) -> DoorAnswer:
    """A response of OpenAI's Responses."""
    found: dict[str, list[Any]] = {"message": [], "reasoning": [], "function_call": []}
    for item in said["output"]:
        is_call = item["type"] == "function_call"
        texts = [] if is_call else [part["text"] for part in item["content"]]
        found[item["type"]].append((item["name"], item["arguments"]) if is_call else "".join(texts))
    end = LENGTH if said["status"] == "incomplete" else STOP
    usage = said["usage"]["input_tokens"], said["usage"]["output_tokens"]
    return DoorAnswer("".join(found["message"]), "".join(found["reasoning"]), found["function_call"], end, usage)


def of_response_events(events: list[Any]) -> DoorAnswer:
    """The deltas of a stream of Responses; end and counts of its last event."""
    answer = of_response(events[-1]["response"])
    deltas = {"text": "", "thought": ""}
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            deltas["text"] += event["delta"]
        elif event["type"] == "response.reasoning_text.delta":
            deltas["thought"] += event["delta"]
        elif event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
            calls[event["output_index"]] = event["item"]["name"], ""
        elif event["type"] == "response.function_call_arguments.delta":
            name, arguments = calls[event["output_index"]]
            calls[event["output_index"]] = name, arguments + event["delta"]
    return DoorAnswer(deltas["text"], deltas["thought"], [*calls.values()], answer.end, answer.usage)


def of_message(said: Mapping[str, Any]) -> DoorAnswer:
    """A message of Anthropic's Messages."""
    texts = {"text": "", "thinking": ""}
    calls = []
    for block in said["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], block["input"]))
        else:
            texts[block["type"]] += block[block["type"]]
    return DoorAnswer(texts["text"], texts["thinking"], calls, _end_of(said), _usage(said["usage"]))


def of_message_events(events: list[Any]) -> DoorAnswer:
    """The deltas of a stream of Messages."""
    found = {"text_delta": "", "thinking_delta": "", "signature_delta": ""}
    calls: dict[int, tuple[str, str]] = {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = event["content_block"]["name"], ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            name, arguments = calls[event["index"]]
            calls[event["index"]] = name, arguments + event["delta"]["partial_json"]
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            found[kind] += event["delta"][kind.removesuffix("_delta")]
    last = next(event for event in events if event["type"] == "message_delta")
    end, usage = _end_of(last["delta"]), _usage(last["usage"])
    return DoorAnswer(found["text_delta"], found["thinking_delta"], [*calls.values()], end, usage)


def _end_of(said: Mapping[str, Any]) -> str:
    names = {"end_turn": STOP, "tool_use": CALLS, "max_tokens": LENGTH, "model_context_window_exceeded": LENGTH}
    return said["stop_sequence"] or names[said["stop_reason"]]


def _usage(said: Mapping[str, int]) -> tuple[int, int]:
    return said["input_tokens"] + said["cache_read_input_tokens"], said["output_tokens"]


def _object(arguments: str) -> Any:
    """Arguments as a whole message has them: {} if they were cut."""
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return {}


async def _events(client: httpx2.AsyncClient, path: str, body: Mapping[str, Any]) -> list[Any]:
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


# Path -> readers of a whole answer and of events.
DOORS: dict[str, tuple[Callable[[Any], DoorAnswer], Callable[[list[Any]], DoorAnswer]]] = {
    "/v1/responses": (of_response, of_response_events),
    "/v1/messages": (of_message, of_message_events),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("demo"), DEMO) as running:
        yield running


@pytest.fixture
async def bench(service: Service) -> AsyncIterator[HttpBench]:
    async with facade_of([service.router.address]) as http:
        yield http


async def compare(service: Service, http: HttpBench, path: str, seed: int, count: int) -> set[str]:
    """Asks requests in three ways each; ends by gRPC."""
    draw, limit, ends = random.Random(f"{path}{seed}"), asyncio.Semaphore(AT_ONCE), set[str]()
    of_whole, of_events = DOORS[path]
    async with grpc.aio.insecure_channel(service.router.address) as channel:
        stub: Any = InferenceServiceStub(channel)

        async def one(request: pb.ChatRequest, body: dict[str, Any]) -> None:
            async with limit:
                expected = await by_grpc(stub, request)
                whole = await http.http.post(path, json=body)
                events = await _events(http.http, path, body)
            assert whole.status_code == 200, (whole.text, body)
            ends.add(expected.end)
            if path == "/v1/responses":
                expected.end = LENGTH if expected.end == LENGTH else STOP
            assert of_events(events) == expected, body
            if path == "/v1/messages":
                expected.calls = [(name, _object(arguments)) for name, arguments in expected.calls]
            assert of_whole(whole.json()) == expected, body

        async with asyncio.TaskGroup() as calls:
            for _ in range(count):
                calls.create_task(one(*drawn(draw, path)))
    return ends


@pytest.mark.parametrize("path", DOORS)
async def test_30_random_requests_of_door_have_answers_of_grpc(service: Service, bench: HttpBench, path: str) -> None:
    assert {LENGTH, STOP} <= await compare(service, bench, path, 1, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", DOORS)
async def test_400_random_requests_of_door_have_answers_of_grpc(service: Service, bench: HttpBench, path: str) -> None:
    assert {LENGTH, STOP, CALLS} <= await compare(service, bench, path, 2, 400)
