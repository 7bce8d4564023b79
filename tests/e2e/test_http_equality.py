"""Random requests by HTTP and by gRPC: every text, token, logprob, finish reason and count is the same."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx2
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.http_bench import HttpBench, facade_of
from tests.e2e.service import REPOSITORY, Service, running_service

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
AT_ONCE = 16
WORDS = ("Once upon a time", "12 + 7 =", "The word cat is spelled", "a", "é 😀", "Tell me a story.", "1 2 3")
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TOOL: Mapping[str, Any] = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}
LEAST = -9999.0
# Entry of a prompt's first token, which has no logprob; its text is not compared.
FIRST = "first"


@dataclass
class AskedTwice:
    """One request in both forms.

    Attributes:
        grpc: for Generate or Chat.
        path: of HTTP.
        body: of HTTP, without `stream`.
    """

    grpc: Any
    path: str
    body: dict[str, Any]


@dataclass
class Answers:
    """Answers of one request by index, and its counts of tokens."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    thoughts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    token_ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    # Name and arguments, by answer and place.
    calls: defaultdict[int, dict[int, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    # As vLLM has them, in responses that ask for them.
    prompt_logprobs: list[Any] = field(default_factory=list)
    finishes: dict[int, tuple[str, str | int | None]] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)

    def think(self, index: int, text: str | None) -> None:
        """Adds a part of the reasoning."""
        if text:
            self.thoughts[index] += text

    def call(self, index: int, place: int, name: str, arguments: str) -> None:
        """Adds a part of a tool call."""
        call = self.calls[index].setdefault(place, ["", ""])
        call[0] += name
        call[1] += arguments


def drawn(draw: random.Random) -> AskedTwice:
    """A request of a random form with random parameters."""
    is_chat = draw.random() < 0.5
    made: Any = pb.ChatRequest() if is_chat else pb.GenerateRequest()
    body: dict[str, Any] = {"model": "test", "return_token_ids": True}
    made.output_options.return_token_ids = True
    (_messages if is_chat else _prompt)(draw, made, body)
    _sampling(draw, made.sampling_params, body)
    _constraint(draw, made, body)
    if draw.random() < 0.4:
        count = draw.randint(0, 3)
        made.output_options.logprobs, made.output_options.token_bytes = count, True
        body |= {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}
    _prompt_logprobs(draw, made, body)
    return AskedTwice(made, "/v1/chat/completions" if is_chat else "/v1/completions", body)


def _prompt(draw: random.Random, made: pb.GenerateRequest, body: dict[str, Any]) -> None:
    """A text, or token ids in one of two fields."""
    form = draw.choice(("text", "text", "prompt", "prompt_token_ids"))
    if form == "text":
        made.text = body["prompt"] = draw.choice(WORDS)
        return
    ids = [draw.randrange(250) for _ in range(draw.randint(1, 40))]
    made.token_ids.ids.extend(ids)
    body[form] = ids


def _messages(draw: random.Random, made: pb.ChatRequest, body: dict[str, Any]) -> None:
    """A conversation, some with a tool."""
    roles = [*draw.choice(((), ("system",))), *draw.choice((("user",), ("user", "assistant", "user")))]
    messages = [{"role": role, "content": draw.choice(WORDS)} for role in roles]
    made.messages.extend(pb.ChatMessage(**message) for message in messages)
    body["messages"] = messages
    if draw.random() < 0.3:
        made.tools.add(name=TOOL["name"], parameters_json=json.dumps(TOOL["parameters"]))
        body["tools"] = [{"type": "function", "function": TOOL}]
        if draw.random() < 0.5:
            made.tool_choice.mode = pb.TOOL_MODE_REQUIRED
            body["tool_choice"] = "required"


def _sampling(draw: random.Random, params: pb.SamplingParams, body: dict[str, Any]) -> None:
    """Limits, seed, and some of the parameters that both forms name alike."""
    body["max_tokens"] = params.max_tokens = 100 if "tools" in body else draw.randint(1, 24)
    seed = draw.choice((draw.getrandbits(64), draw.randint(-9, 9)))
    body["seed"], params.seed = seed, seed % (1 << 64)
    choices: dict[str, Sequence[Any]] = {
        "temperature": (0.0, 0.7, 1.3),
        "top_p": (0.5, 0.9),
        "top_k": (1, 20),
        "min_p": (0.05,),
        "presence_penalty": (0.5, -0.5),
        "frequency_penalty": (0.5,),
        "repetition_penalty": (1.2,),
        "n": (2, 3),
        "min_tokens": (1,),
        "ignore_eos": (True,),
    }
    for name in draw.sample([*choices], draw.randint(0, 5)):
        body[name] = draw.choice(choices[name])
        setattr(params, name, body[name])
    if draw.random() < 0.3:
        stop = draw.sample((" ", "e", "the", "\n", "1"), draw.randint(1, 2))
        params.stop_strings.extend(stop)
        body["stop"] = stop[0] if len(stop) == 1 else stop
        params.include_stop_string = body["include_stop_str_in_output"] = draw.random() < 0.5
    if draw.random() < 0.2:
        params.logit_bias[65] = 5.0
        body["logit_bias"] = {"65": 5.0}
    if draw.random() < 0.1:
        params.bad_words.append("the")
        body["bad_words"] = ["the"]


def _prompt_logprobs(draw: random.Random, made: Any, body: dict[str, Any]) -> None:
    """The prompt before the answer, its logprobs, and tokens named by their ids."""
    chance, output = draw.random(), made.output_options
    if chance < 0.3 and "messages" not in body:
        body["echo"] = output.echo = True
        if "logprobs" in body:
            output.prompt_logprobs = body["logprobs"]
    elif chance < 0.5:
        body["prompt_logprobs"] = output.prompt_logprobs = draw.randint(0, 2)
        output.token_bytes = True
    if draw.random() < 0.3:
        body["return_tokens_as_token_ids"] = True


def _constraint(draw: random.Random, made: Any, body: dict[str, Any]) -> None:
    """A form of the answer; beside tools it is refused, and beside end tokens that are ignored it has no end."""
    if draw.random() > 0.25 or "tools" in body or "ignore_eos" in body:
        return
    constraint = made.sampling_params.constraint
    form = draw.choice(("regex", "choice", "schema"))
    if form == "regex":
        constraint.regex = "[a-d]{1,8}"
        body["structured_outputs"] = {"regex": "[a-d]{1,8}"}
    elif form == "choice":
        constraint.choices.texts.extend(("yes", "no"))
        body["structured_outputs"] = {"choice": ["yes", "no"]}
    else:
        constraint.json_schema = json.dumps(SCHEMA)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


async def by_grpc(stub: Any, asked: AskedTwice) -> Answers:
    """The answers of a stream by gRPC."""
    found, usages = Answers(), []
    is_chat = isinstance(asked.grpc, pb.ChatRequest)
    has_ids = "return_tokens_as_token_ids" in asked.body
    form = functools.partial(_chat_logprob if is_chat else _column, has_ids=has_ids)
    of_prompt: list[pb.TokenLogprobs] = []
    async for part in (stub.Chat if is_chat else stub.Generate)(asked.grpc, timeout=120):
        index = part.index
        found.texts[index] += part.delta.content if is_chat else part.text
        found.token_ids[index] += part.token_ids
        found.logprobs[index] += map(form, part.logprobs)
        of_prompt += part.prompt_logprobs
        if is_chat:
            found.think(index, part.delta.reasoning)
            for call in part.delta.tool_calls:
                found.call(index, call.index, call.name, call.arguments_json)
        if part.HasField("finish"):
            matched = part.finish.stop.WhichOneof("matched")
            reason = pb.FinishReason.Name(part.finish.reason).removeprefix("FINISH_REASON_").lower()
            is_told = matched in ("stop_string", "stop_token_id")
            found.finishes[index] = reason, getattr(part.finish.stop, matched) if is_told else None
            usages.append(part.finish.usage)
    found.usage = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
    if "echo" in asked.body and "logprobs" in asked.body:
        for index in found.finishes:
            found.logprobs[index] = [FIRST, *map(form, of_prompt), *found.logprobs[index]]
    if "prompt_logprobs" in asked.body:
        found.prompt_logprobs = [None, *(_ranked(entry, has_ids=has_ids) for entry in of_prompt)]
    return found


def _name(token: Any, *, has_ids: bool) -> str:
    return f"token_id:{token.token_id}" if has_ids else token.token_bytes.decode("utf-8", "replace")


def _chat_logprob(entry: pb.TokenLogprobs, *, has_ids: bool) -> Any:
    tokens: list[Any] = [entry, *entry.top]
    first, *tops = [
        (_name(token, has_ids=has_ids), max(token.logprob, LEAST), [*token.token_bytes]) for token in tokens
    ]
    return [first, tops]


def _column(entry: pb.TokenLogprobs, *, has_ids: bool) -> Any:
    top: dict[str, float] = {}
    tokens: list[Any] = [*entry.top, entry]
    for token in tokens:
        name = _name(token, has_ids=has_ids)
        top[name] = max(top.get(name, LEAST), token.logprob)
    return [_name(entry, has_ids=has_ids), max(entry.logprob, LEAST), top if entry.top else None]


def _ranked(entry: pb.TokenLogprobs, *, has_ids: bool) -> dict[str, Any]:
    tokens: list[Any] = [(rank, token) for rank, token in enumerate(entry.top, 1)]
    return {
        str(token.token_id): {
            "logprob": max(token.logprob, LEAST),
            "rank": rank,
            "decoded_token": _name(token, has_ids=has_ids),
        }
        for rank, token in [*tokens, (entry.rank, entry)]
    }


async def by_http(client: httpx2.AsyncClient, asked: AskedTwice, *, is_stream: bool) -> Answers:
    """The answers of HTTP, streamed or not."""
    body = {**asked.body, "stream": is_stream}
    if not is_stream:
        response = await client.post(asked.path, json=body)
        assert response.status_code == 200, (response.text, asked.body)
        return _read(Answers(), response.json())
    found, is_whole = Answers(), False
    async with client.stream("POST", asked.path, json=body | {"stream_options": {"include_usage": True}}) as response:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                _read(found, json.loads(line[6:]))
    assert is_whole, asked.body
    return found


def _read(found: Answers, said: Any) -> Answers:
    """Adds the choices of a chunk, or of a whole response."""
    for choice in said["choices"]:
        index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
        found.texts[index] += choice.get("text") or message.get("content") or ""
        found.think(index, message.get("reasoning_content"))
        found.token_ids[index] += choice.get("token_ids") or ()
        found.logprobs[index] += _logprobs_of(choice["logprobs"] or {})
        found.prompt_logprobs = choice.get("prompt_logprobs") or found.prompt_logprobs
        for place, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            found.call(index, call.get("index", place), function.get("name", ""), function["arguments"])
        if choice["finish_reason"] is not None:
            found.finishes[index] = choice["finish_reason"], choice["stop_reason"]
    found.prompt_logprobs = said.get("prompt_logprobs") or found.prompt_logprobs
    if said.get("usage"):
        found.usage = said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]
    return found


def _logprobs_of(said: Any) -> Iterator[Any]:
    for entry in said.get("content") or ():
        top = [(each["token"], each["logprob"], each["bytes"]) for each in entry["top_logprobs"]]
        yield [(entry["token"], entry["logprob"], entry["bytes"]), top]
    tokens = said.get("tokens") or ()
    tops = said.get("top_logprobs") or [None] * len(tokens)
    for token, logprob, top in zip(tokens, said.get("token_logprobs") or (), tops, strict=True):
        yield FIRST if logprob is None else [token, logprob, top]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("demo"), DEMO) as running:
        yield running


@pytest.fixture
async def bench(service: Service) -> AsyncIterator[HttpBench]:
    async with facade_of([service.router.address]) as http:
        yield http


async def compare(service: Service, http: HttpBench, seed: int, count: int) -> Counter[str]:
    """Asks requests in three ways each; finish reasons by gRPC."""
    draw, limit, reasons = random.Random(seed), asyncio.Semaphore(AT_ONCE), Counter[str]()
    async with grpc.aio.insecure_channel(service.router.address) as channel:
        stub: Any = InferenceServiceStub(channel)

        async def one(asked: AskedTwice) -> None:
            async with limit:
                expected, whole, streamed = await asyncio.gather(
                    by_grpc(stub, asked),
                    by_http(http.http, asked, is_stream=False),
                    by_http(http.http, asked, is_stream=True),
                )
            assert whole == expected, asked.body
            assert streamed == expected, asked.body
            reasons.update(reason for reason, _ in expected.finishes.values())

        async with asyncio.TaskGroup() as calls:
            for _ in range(count):
                calls.create_task(one(drawn(draw)))
    return reasons


async def test_50_random_requests_have_equal_answers_by_http_and_grpc(service: Service, bench: HttpBench) -> None:
    reasons = await compare(service, bench, 42, 50)
    assert {"stop", "length", "tool_calls"} <= {*reasons}, reasons


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_1000_random_requests_have_equal_answers_by_http_and_grpc(service: Service, bench: HttpBench) -> None:
    await compare(service, bench, 2, 1000)
