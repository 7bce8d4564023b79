"""Calls and reasoning that are held to their form: through routers and workers that compute the demo model."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from fissile.client import Client
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from common.constraints.library import ENGINE
from router.answers.channels.families import QWEN
from tests.e2e.router_bench import bench, collect, detail, error_of
from tests.e2e.service import Service, running_service
from tests.e2e.test_constraints import DEMO
from tests.e2e.test_tools import calls_of, content_of, worker_of
from tests.unit.router.support import EOS, tool_files

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    # A model that knows nothing of tools likes blanks.
    "x-guidance": {"whitespace_flexible": False},
}
# A call is the whole answer, as of Llama 3.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls of a checkpoint's own form.
OWN_CALLS = {
    "open_pattern": r"<tool_call>call\s+(?P<name>\w+)\s*(?:->|=>)",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model with a template of Llama's kind, which it does not know."""
    folder = with_tools(tmp_path_factory.mktemp("model") / "demo")
    with running_service(tmp_path_factory.mktemp("service"), folder, workers=2) as service:
        yield service


def with_tools(folder: Path) -> Path:
    """The demo model in a new folder, with that template."""
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def asking(seed: int = 5, **fields: Any) -> pb.ChatRequest:
    tools = [
        pb.Tool(name="forecast", parameters_json=json.dumps(SCHEMA), strict=True),
        pb.Tool(name="other", parameters_json='{"type": "object"}'),
    ]
    made = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")], **{"tools": tools, **fields})
    made.sampling_params.MergeFrom(pb.SamplingParams(max_tokens=120, seed=seed, temperature=0.8))
    made.output_options.return_token_ids = True
    made.request_id = f"r{seed}"
    return made


def check_call(parts: list[pb.ChatResponse], name: str = "") -> str:
    """Checks a finished answer that must call, by something else than what has confined it; the arguments."""
    finish = parts[-1].finish
    assert finish.reason == pb.FINISH_REASON_TOOL_CALLS
    (call,) = calls_of(parts)
    assert content_of(parts) == ""
    assert call.name == name or not name
    value = json.loads(call.arguments_json)
    if call.name == "forecast":
        jsonschema.Draft202012Validator(SCHEMA).validate(value)
    assert isinstance(value, dict)
    return call.arguments_json


@pytest.mark.proto_field("ToolChoice.name")
def test_named_tool_choice_forces_strict_call(service: Service) -> None:
    named = pb.ToolChoice(name="forecast")
    answers = {check_call([*service.stub.Chat(asking(seed, tool_choice=named))], "forecast") for seed in range(3)}
    assert len(answers) > 1
    once = service.stub.ChatOnce(asking(tool_choice=named)).answers[0]
    assert once.finish.reason == pb.FINISH_REASON_TOOL_CALLS
    # Any object may be longer than the answer.
    required = [
        [*service.stub.Chat(asking(seed, tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)))] for seed in range(2)
    ]
    ended = [parts for parts in required if parts[-1].finish.reason != pb.FINISH_REASON_LENGTH]
    assert ended
    for parts in ended:
        check_call(parts)


def test_constrained_call_resumes_after_each_token(service: Service) -> None:
    """The answer resumes by token ids after each message; its receipt and a replay equal those of an unbroken one."""
    asked = asking(7, tool_choice=pb.ToolChoice(name="forecast"))
    whole = [*service.stub.Chat(asked)]
    arguments = check_call(whole)
    for count in range(1, len(whole)):
        again = pb.ChatRequest()
        again.CopyFrom(asked)
        again.resume.answers.add().token_ids.ids.extend(i for part in whole[:count] for i in part.token_ids)
        assert check_call([*whole[:count], *service.stub.Chat(again)]) == arguments
    with Client(service.router.address) as client:
        given: dict[str, Any] = {
            "tools": [*asked.tools],
            "tool_choice": asked.tool_choice,
            "seed": 7,
            "max_tokens": 120,
        }
        result = client.chat("Hi", temperature=0.8, receipt=True, **given)
        assert [call.arguments_json for call in result.tool_calls] == [arguments]
        assert result.receipt is not None
        assert result.receipt.is_of_request
        assert client.verify(result.receipt).is_equal


def field_of(error: grpc.RpcError) -> tuple[str, str]:
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.BadRequest()
    assert any(packed.Unpack(found) for packed in status.details)
    return error.code().name, found.field_violations[0].field


def test_unenforceable_constraint_is_refused_by_name(service: Service) -> None:
    def refused(**fields: Any) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as caught:
            [*service.stub.Chat(asking(**fields))]
        return field_of(caught.value)

    # Calls of this family are the whole text: whether some text is one, is known behind it alone.
    assert refused() == ("INVALID_ARGUMENT", "tools[0].strict")
    beside = pb.SamplingParams(constraint=pb.Constraint(json_object=True))
    plain = [pb.Tool(name="f")]
    assert refused(tools=plain, sampling_params=beside) == ("INVALID_ARGUMENT", "sampling_params.constraint")
    tools = [pb.Tool(name="f", parameters_json='{"type": "object", "not": {}}', strict=True)]
    required = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)
    assert refused(tools=tools, tool_choice=required) == ("INVALID_ARGUMENT", "tools[0].parameters_json")
    tools[0].parameters_json = '{"type": "string"}'
    assert refused(tools=tools, tool_choice=required) == ("INVALID_ARGUMENT", "tools[0].parameters_json")
    budget = pb.ReasoningOptions(max_tokens=3)
    assert refused(tools=[], reasoning=budget) == ("INVALID_ARGUMENT", "reasoning.max_tokens")


@pytest.mark.slow
def test_worker_killed_inside_constrained_call_changes_nothing(tmp_path: Path) -> None:
    """Streams of both workers continue at the other one, each in the middle of its arguments."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 60}
    schema = {**SCHEMA, "properties": {"numbers": {**numbers, "maxItems": 60}}, "required": ["numbers"]}
    tools = [pb.Tool(name="f", parameters_json=json.dumps(schema), strict=True)]
    asked = [asking(seed, tools=tools, tool_choice=pb.ToolChoice(name="f")) for seed in range(6)]
    for one in asked:
        one.sampling_params.max_tokens = 600
    with running_service(tmp_path, with_tools(tmp_path / "demo"), workers=2) as service:
        expected = [[*service.stub.Chat(one)] for one in asked]
        assert [len(json.loads(calls_of(parts)[0].arguments_json)["numbers"]) for parts in expected] == [60] * 6
        streams = [service.stub.Chat(one, timeout=60) for one in asked]
        firsts = [_until_arguments(stream) for stream in streams]
        service.workers[0].stop(signal.SIGKILL)
        for stream, first, whole in zip(streams, firsts, expected, strict=True):
            parts = [*first, *stream]
            assert [i for part in parts for i in part.token_ids] == [i for part in whole for i in part.token_ids]
            assert calls_of(parts) == calls_of(whole)
            assert parts[-1].finish.exact


def _until_arguments(stream: Iterator[pb.ChatResponse]) -> list[pb.ChatResponse]:
    parts = [next(stream)]
    while not any(call.arguments_json for part in parts for call in part.delta.tool_calls):
        parts.append(next(stream))
    return parts


async def test_arguments_between_tags_follow_their_schemas() -> None:
    files = tool_files()
    # Calls in Qwen3-Coder's form.
    files["chat_template.jinja"] = re.sub(
        rb'\{"name": .*\| tojson \}\}\}\n',
        b"<function={{ call.function.name }}>\n"
        b"{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n"
        b"{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n",
        files["chat_template.jinja"],
    )
    worker = worker_of(files)
    worker.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    properties = {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}}
    tools = [pb.Tool(name="f", strict=True)]
    tools[0].parameters_json = json.dumps({"type": "object", "properties": properties, "required": ["days"]})
    async with bench(worker) as b:
        await collect(b.stub.Chat(asking(tools=tools)))
        grammar = worker.submitted[-1].params.grammar
        for part in ('("Rome" | "Oslo")', '"\\n</parameter>"', '"maximum":9', "arguments_0_0? arguments_0_1", "calls?"):
            assert part in grammar
        tools[0].parameters_json = '{"type": "object", "properties": {"a": {"type": "array"}}}'
        error = await error_of(b.stub.Chat(asking(tools=tools)))
        assert error.code().name == "INVALID_ARGUMENT"
        (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
        assert violation.field == "tools[0].parameters_json"
        assert "at /properties/a: an array or an object could have a text in it" in violation.description
        await b.empty()


def own_files(fields: dict[str, Any]) -> dict[str, bytes]:
    """Files of a model whose checkpoint has a response template of its own."""
    files = tool_files()
    spec = {"start_anchor": "assistant\n", "fields": fields}
    config = {**json.loads(files["tokenizer_config.json"]), "response_template": spec}
    return {**files, "tokenizer_config.json": json.dumps(config).encode()}


async def test_own_form_with_a_familys_calls_is_held() -> None:
    worker = worker_of(
        own_files(QWEN["fields"]),
        answer='<tool_call>\n{"name": "forecast", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
    )
    worker.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    async with bench(worker) as b:
        for choice in (pb.ToolChoice(mode=pb.TOOL_MODE_AUTO), pb.ToolChoice(name="forecast")):
            parts = await collect(b.stub.Chat(asking(tool_choice=choice)))
            assert check_call(parts, "forecast")
            grammar = worker.submitted[-1].params.grammar
            for part in ("<[302]>", "<[303]>", "Oslo", "forecast"):
                assert part in grammar
        await b.empty()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"tool_choice": pb.ToolChoice(name="forecast")}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)}, "tool_choice"),
        ({}, "tools[0].strict"),
    ],
)
async def test_own_form_with_other_calls_is_read_and_refused_by_name(asked: dict[str, Any], field: str) -> None:
    answer = '<tool_call>call  forecast -> {"city": "Oslo", "days": 3}</tool_call>'
    worker = worker_of(own_files({**QWEN["fields"], "tool_calls": OWN_CALLS}), answer=answer)
    worker.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    async with bench(worker) as b:
        error = await error_of(b.stub.Chat(asking(**asked)))
        assert error.code().name == "INVALID_ARGUMENT"
        (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
        assert violation.field == field
        assert "its response_template has calls of no built-in form" in violation.description
        assert "leave it out" in violation.description
        free = [pb.Tool(name="forecast", parameters_json=json.dumps(SCHEMA))]
        assert check_call(await collect(b.stub.Chat(asking(tools=free))), "forecast")
        # No call is held, so a budget of reasoning can be.
        await collect(b.stub.Chat(asking(tools=[], reasoning=pb.ReasoningOptions(max_tokens=5))))
        assert "thought[max_tokens=5]" in worker.submitted[-1].params.grammar
        await b.empty()


async def test_reasoning_budget_is_refused_for_unknown_pattern() -> None:
    thinking = {"open_pattern": "<think>|<mull>", "close": "</done>"}
    worker = worker_of(own_files({"thinking": thinking, "content": {}}))
    worker.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    async with bench(worker) as b:
        error = await error_of(b.stub.Chat(asking(tools=[], reasoning=pb.ReasoningOptions(max_tokens=5))))
        (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
        assert violation.field == "reasoning.max_tokens"
        assert "leave it out" in violation.description
        await b.empty()


async def test_workers_without_grammars_get_no_constrained_calls() -> None:
    asked = asking(tool_choice=pb.ToolChoice(name="forecast"))
    async with bench(worker_of()) as b:
        error = await error_of(b.stub.Chat(asked))
        assert error.code().name == "UNIMPLEMENTED"
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "tool_choice"
        assert not b.workers[0].submitted


@pytest.mark.parametrize(
    ("answer", "content"), [(" la \n", " la \n"), ("<think>lo</think>\n\nla ", "la "), ("<think>lo</think>", "")]
)
async def test_constrained_content_keeps_blanks(answer: str, content: str) -> None:
    worker = worker_of(answer=answer)
    worker.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    async with bench(worker) as b:
        held = asking(tools=[])
        held.sampling_params.constraint.regex = r"(?s:.*)"
        assert content_of(await collect(b.stub.Chat(held))) == content
        await b.empty()


@pytest.mark.proto_field("ReasoningOptions.max_tokens")
async def test_constraint_moves_with_answer_to_another_worker() -> None:
    """One grammar covers reasoning and what follows: calls, words, or the request's own constraint."""
    worker = worker_of()
    worker.description |= {"grammar_engine": ENGINE, "eos_token_ids": [EOS]}
    async with bench(worker) as b:

        async def grammar(**fields: Any) -> str:
            asked = asking(**fields)
            await collect(b.stub.Chat(asked))
            return worker.submitted[-1].params.grammar

        begin, end, call = "<[300]>", "<[301]>", "<[302]>"
        at_will = await grammar()
        assert all(part in at_will for part in (begin, end, call, "reasoning? answer", "calls?"))
        assert "max_tokens" not in at_will
        named = await grammar(tool_choice=pb.ToolChoice(name="other"))
        assert "call_0" in named
        assert not any(part in named for part in ("call_1", "forecast", "calls?", "call)*"))
        one = await grammar(tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), parallel_tool_calls=False)
        assert "call_1" in one
        assert "call)*" not in one
        budget = await grammar(tools=[], reasoning=pb.ReasoningOptions(max_tokens=5))
        assert "thought[max_tokens=5]" in budget
        assert call not in budget
        begun = await grammar(
            tools=[], reasoning=pb.ReasoningOptions(max_tokens=5), template_arguments_json='{"begin_thinking": true}'
        )
        assert begin not in begun
        held = asking(tools=[])
        held.sampling_params.constraint.choices.texts.extend(["yes", "no"])
        await collect(b.stub.Chat(held))
        behind = worker.submitted[-1].params.grammar
        assert all(part in behind for part in (begin, end, "%lark", '"yes" | "no"'))
        held.reasoning.separate = False
        await collect(b.stub.Chat(held))
        assert begin not in worker.submitted[-1].params.grammar
        beside = asking()
        beside.sampling_params.constraint.choices.texts.extend(["yes", "no"])
        await collect(b.stub.Chat(beside))
        both = worker.submitted[-1].params.grammar
        assert all(part in both for part in (begin, end, call, '"yes" | "no"', "call_0", "Rome"))
        beside.tool_choice.mode = pb.TOOL_MODE_REQUIRED
        await collect(b.stub.Chat(beside))
        assert '"yes"' not in worker.submitted[-1].params.grammar
        assert await grammar(tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_NONE)) == ""
        await b.empty()
