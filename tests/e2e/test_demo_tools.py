"""Tools and JSON of the demo model, which learned them: through the running service, with its head that drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jsonschema
import pytest
from fissile.client import Client
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.cli.serve.command import demo_speculation
from deploy.demo.evaluate import NEEDED_PER_FAMILY
from deploy.demo.questions import questions, tool_questions, tool_rounds
from deploy.demo.tools import WEATHER, DemoTool
from tests.e2e.service import REPOSITORY, Service, running_service

pytestmark = pytest.mark.slow

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
AT_ONCE = 16
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "animal": {"type": "string"}},
    "required": ["name", "age", "animal"],
    "additionalProperties": False,
}
CONSTRAINED: dict[str, Any] = {"constraint": {"json_schema": SCHEMA}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # All drafts there are, whether they pay on this machine or not.
    speculation = json.loads(demo_speculation(None, None)) | {"adaptive": False}
    drafting = ["--dtype", "float32", "--speculative-config", json.dumps(speculation)]
    with running_service(tmp_path_factory.mktemp("demo"), DEMO, worker_options=drafting) as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with Client(service.router.address) as made:
        yield made


def declared(tool: DemoTool) -> pb.Tool:
    function = tool.definition()["function"]
    return pb.Tool(name=function["name"], parameters_json=json.dumps(function["parameters"]))


def message(given: dict[str, Any]) -> pb.ChatMessage:
    made = pb.ChatMessage(role=given["role"], content=given["content"])
    for call in given.get("tool_calls", ()):
        function = call["function"]
        made.tool_calls.add(name=function["name"], arguments_json=json.dumps(function["arguments"]))
    return made


def asking(**fields: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 128, "output_options": {"return_token_ids": True}, **fields}


def called(result: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments_json)) for call in result.tool_calls]


def test_demo_calls_tool_and_continues_with_result(client: Client) -> None:
    """The demo model calls tools with unknown names, with tool_choice auto and no grammar."""
    asked = tool_questions()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(
            pool.map(
                lambda one: client.chat(
                    [message(each) for each in one.messages], **asking(tools=[declared(tool) for tool in one.tools])
                ),
                asked,
            )
        )
    by_family: dict[str, list[bool]] = {}
    expected = {one.user: [(one.tool.name, dict(call)) for call in one.calls] for one, _ in tool_rounds()}
    for one, result in zip(asked, results, strict=True):
        is_right = (
            (called(result), result.text) == (expected[one.messages[0]["content"]], "")
            if one.family == "calls"
            else (called(result), result.text) == ([], one.expected)
        )
        reason = pb.FINISH_REASON_TOOL_CALLS if result.tool_calls else pb.FINISH_REASON_STOP
        assert result.finish.reason == reason
        by_family.setdefault(one.family, []).append(is_right)
    assert {family: len(right) for family, right in by_family.items()}.keys() == {"calls", "results", "no tool"}
    assert all(sum(right) >= NEEDED_PER_FAMILY * len(right) for right in by_family.values()), by_family


def test_demo_calls_tools_only_for_their_purpose(client: Client) -> None:
    tools = [declared(WEATHER)]
    for question, said in (("What is 47 + 35?", "47 + 35 = 82"), ("Thank you!", "You are welcome!")):
        result = client.chat(question, **asking(tools=tools))
        assert (called(result), result.text) == ([], said)
    asked = "What is the weather in Paris?"
    result = client.chat(asked, **asking(tools=tools))
    assert (called(result), result.text) == ([("get_weather", {"city": "Paris"})], "")
    # Without the tool, and where it must not, it says so.
    for fields in ({}, {"tools": tools, "tool_choice": {"mode": "TOOL_MODE_NONE"}}):
        assert client.chat(asked, **asking(**fields)).text.startswith("I am only a small demo model")


def test_strict_call_equals_unconstrained_call(client: Client) -> None:
    free, strict = declared(WEATHER), declared(WEATHER)
    strict.strict = True
    for city in ("Paris", "Oslo", '"Zilpo"'):
        asked = f"What is the weather in {city}?"
        plain = client.chat(asked, **asking(tools=[free]))
        assert called(plain)
        for fields in ({"tools": [strict]}, {"tools": [free], "tool_choice": {"mode": "TOOL_MODE_REQUIRED"}}):
            held = client.chat(asked, **asking(**fields))
            assert held.answers[0].token_ids == plain.answers[0].token_ids


def test_valid_json_is_unchanged_by_its_schema(client: Client) -> None:
    asked = [one for one in questions() if one.family == "json" and one.key.startswith("character")]
    equal = 0
    for one in asked:
        plain = client.chat(one.user, **asking())
        held = client.chat(one.user, **asking(**CONSTRAINED))
        jsonschema.validate(json.loads(held.text), SCHEMA)
        try:
            jsonschema.validate(json.loads(plain.text), SCHEMA)
        except (jsonschema.ValidationError, json.JSONDecodeError):
            continue
        assert held.text == plain.text
        equal += 1
    assert equal >= NEEDED_PER_FAMILY * len(asked)


def verified_drafts(service: Service) -> int:
    """Number of drafts that the worker has verified since it started."""
    with grpc.insecure_channel(service.workers[0].address) as channel:
        worker = WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60)
    return sum(place.verified for place in worker.drafts)


def test_drafts_change_no_token(client: Client, service: Service) -> None:
    requests: list[dict[str, Any]] = [{"tools": [declared(WEATHER)]}, CONSTRAINED]
    for seed, asked in enumerate(("What is the weather in Paris and in Oslo?", "Give me a story character as JSON.")):
        for fields in (each | how for each in requests for how in ({}, {"temperature": 1.0, "seed": seed})):
            before = verified_drafts(service)
            plain = client.chat(asked, **asking(**fields, num_drafts=0))
            assert verified_drafts(service) == before
            drafted = client.chat(asked, **asking(**fields))
            assert verified_drafts(service) > before
            assert drafted.answers[0].token_ids == plain.answers[0].token_ids


def test_tools_example_answers_with_demo_model(service: Service) -> None:
    program = [sys.executable, str(REPOSITORY / "examples" / "tools_client.py"), service.router.address]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "> What is the weather in Paris and in Oslo?",
        'get_weather({"city": "Paris"}) -> {"weather": "sunny"}',
        'get_weather({"city": "Oslo"}) -> {"weather": "snowy"}',
        "It is sunny in Paris and snowy in Oslo.",
        "> What is 12 times 7?",
        'multiply({"a": 12, "b": 7}) -> {"result": 84}',
        "12 times 7 is 84.",
        "> Thank you!",
        "You are welcome!",
    ]
