"""Tools: prompts, calls as typed parts, and conversations with calls, through real routers with scripted workers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from fissile.client import AsyncClient, ChatArguments, Delta, tool
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.text.tokenizer import Tokenizer
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import bench, collect, detail, error_of
from tests.e2e.service import REPOSITORY
from tests.e2e.test_client_receipts import receipts_of
from tests.e2e.test_reasoning import going_on, of_two_workers
from tests.unit.router.support import EOS, thinking_files, tool_files

FILES = tool_files()
SPELLED = tool_files(with_tokens=False)
SCHEMA = {"type": "object", "properties": {"z": {"type": "number"}, "a": {"type": "string"}}}
ARGUMENTS = ('{"z": 1.50, "a": "so } la"}', '{"a": "é"}')
CALLS = "\n".join(f'<tool_call>\n{{"name": "look", "arguments": {each}}}\n</tool_call>' for each in ARGUMENTS)
ANSWER = f"<think>\nla\n</think>\n\nso:\n{CALLS}"


def worker_of(files: dict[str, bytes] = FILES, answer: str = ANSWER, **options: Any) -> FakeWorker:
    ids = [*Tokenizer.from_files(files).encode(answer), EOS]
    return FakeWorker(files, answer=lambda _: ids, description={"vocab_size": 304}, **options)


def chat(**fields: Any) -> pb.ChatRequest:
    tools = [tool("look", "looks", SCHEMA), tool("never")]
    made = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], **{"tools": tools, **fields})
    made.request_id = "r"
    made.sampling_params.max_tokens = 400
    return made


def calls_of(parts: Iterable[Any]) -> list[pb.ToolCall]:
    """Whole calls of a stream; each begins with its id and name, and these come once."""
    calls: list[pb.ToolCall] = []
    for call in (call for part in parts for call in part.delta.tool_calls):
        if call.name:
            assert (call.index, bool(call.id)) == (len(calls), True)
            calls.append(pb.ToolCall(id=call.id, name=call.name))
        else:
            assert not call.id
        calls[call.index].arguments_json += call.arguments_json
    return calls


def content_of(parts: Iterable[Any]) -> str:
    return "".join(part.delta.content for part in parts)


@pytest.mark.proto_field(
    "ChatRequest.tools",
    "Tool.name",
    "Tool.description",
    "Tool.parameters_json",
    "ChatDelta.tool_calls",
    "ToolCallDelta.index",
    "ToolCallDelta.id",
    "ToolCallDelta.name",
    "ToolCallDelta.arguments_json",
)
async def test_tool_calls_arrive_as_typed_parts() -> None:
    async with bench(worker_of()) as b:
        model = (await b.stub.GetModel(pb.GetModelRequest())).model
        assert pb.CAPABILITY_TOOLS in model.capabilities
        parts = await collect(b.stub.Chat(chat()))
        calls = calls_of(parts)
        assert [(call.name, call.arguments_json) for call in calls] == [("look", each) for each in ARGUMENTS]
        assert content_of(parts) == "so:"
        assert "".join(part.delta.reasoning for part in parts) == "la"
        assert parts[-1].finish.reason == pb.FINISH_REASON_TOOL_CALLS
        assert parts[-1].finish.stop.eos_token_id == EOS
        once = (await b.stub.ChatOnce(chat())).answers[0]
        assert [*once.message.tool_calls] == calls
        assert (once.message.content, once.message.reasoning) == ("so:", "la")
        rendered = await b.stub.RenderPrompt(pb.RenderPromptRequest(chat=chat()))
        first = json.dumps({"name": "look", "description": "looks", "parameters": SCHEMA})
        assert rendered.text.startswith(f'<|im_start|>system\n{{"type": "function", "function": {first}}}\n')
        assert [*b.workers[0].submitted[0].token_ids] == [*rendered.token_ids]
        await b.empty()


async def test_ids_of_calls_are_a_function_of_the_request() -> None:
    """Ids differ with another seed, answer or turn."""
    async with bench(worker_of()) as b:

        async def ids(**fields: Any) -> list[str]:
            asked = chat()
            asked.request_id = ""
            asked.sampling_params.seed, asked.sampling_params.n = fields.get("seed", 7), fields.get("n", 1)
            asked.messages.extend(fields.get("said", ()))
            answers = (await b.stub.ChatOnce(asked)).answers
            return [call.id for answer in answers for call in answer.message.tool_calls]

        first = await ids()
        assert await ids() == first
        both = await ids(n=2)
        assert both[:2] == first
        later = await ids(said=[pb.ChatMessage(role="assistant", content="so")])
        every = {*both, *later, *await ids(seed=8)}
        assert len(every) == 8
        assert all(len(each) == 9 and each.isalnum() for each in every)
        await b.empty()


@pytest.mark.proto_field("ChatRequest.tool_choice", "ToolChoice.mode", "Tool.strict")
async def test_without_tools_in_force_calls_are_text() -> None:
    async with bench(worker_of()) as b:
        none = chat(tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_NONE))
        auto = chat(tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_AUTO))
        auto.tools[0].strict = False
        for asked in (none, chat(tools=[])):
            parts = await collect(b.stub.Chat(asked))
            assert (calls_of(parts), content_of(parts)) == ([], f"so:\n{CALLS}")
            assert parts[-1].finish.reason == pb.FINISH_REASON_STOP
        assert len(calls_of(await collect(b.stub.Chat(auto)))) == 2
        with_none, without, with_auto = ([*one.token_ids] for one in b.workers[0].submitted)
        assert with_none == without != with_auto
        await b.empty()


@pytest.mark.proto_field("ChatRequest.parallel_tool_calls")
async def test_parallel_tool_calls_false_allows_one_call() -> None:
    """The answer ends with the token that completes the call; receipt and replay agree."""
    async with bench(worker_of()) as b, AsyncClient(b.router.server.address) as client:
        parts = await collect(b.stub.Chat(chat(parallel_tool_calls=False)))
        assert [call.arguments_json for call in calls_of(parts)] == [ARGUMENTS[0]]
        finish = parts[-1].finish
        assert (finish.reason, finish.HasField("stop")) == (pb.FINISH_REASON_TOOL_CALLS, False)
        assert len(calls_of(await collect(b.stub.Chat(chat(parallel_tool_calls=True))))) == 2
        for one in (False, True):
            given: ChatArguments = {
                "tools": [*chat().tools],
                "max_tokens": 400,
                "receipt": True,
                "parallel_tool_calls": one,
            }
            result = await client.chat("hi", **given)
            assert len(result.tool_calls) == 1 + one
            assert receipts_of(result) == [True]
            assert result.receipt is not None
            assert (await client.verify(result.receipt)).is_equal
        await b.empty()


@pytest.mark.proto_field(
    "ChatMessage.tool_calls",
    "ChatMessage.tool_call_id",
    "ChatMessage.name",
    "ToolCall.id",
    "ToolCall.name",
    "ToolCall.arguments_json",
)
async def test_tool_calls_and_results_are_sent_back() -> None:
    async with bench(worker_of()) as b:
        once = (await b.stub.ChatOnce(chat())).answers[0]
        asked = chat()
        result = pb.ChatMessage(role="tool", content="21", tool_call_id=once.message.tool_calls[0].id, name="look")
        asked.messages.extend([once.message, result])
        rendered = await b.stub.RenderPrompt(pb.RenderPromptRequest(chat=asked))
        assert f"assistant\n{ANSWER.replace('1.50', '1.5')}<|im_end|>" in rendered.text
        assert f"<|im_start|>tool\n21{once.message.tool_calls[0].id}look<|im_end|>" in rendered.text
        asked.messages[1].tool_calls[0].arguments_json = "{"
        error = await error_of(b.stub.Chat(asked))
        assert error.code().name == "INVALID_ARGUMENT"
        violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
        assert violation.field == "messages[1].tool_calls[0].arguments_json"
        await b.empty()


async def test_tools_not_shown_by_template_are_refused() -> None:
    async with bench(FakeWorker(thinking_files(), description={"vocab_size": 302})) as b:
        assert pb.CAPABILITY_TOOLS not in (await b.stub.GetModel(pb.GetModelRequest())).model.capabilities
        error = await error_of(b.stub.Chat(chat()))
        assert error.code().name == "INVALID_ARGUMENT"
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "tools"
        await b.empty()


@pytest.mark.parametrize(
    "broken",
    [
        'so <tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        "<tool_call>\nlook()\n</tool_call> la",
        '<tool_call>\n{"arguments": {"a": 1}, "na',
    ],
)
async def test_broken_call_loses_no_token(broken: str) -> None:
    async with bench(worker_of(answer=broken)) as b:
        parts = await collect(b.stub.Chat(chat()))
        assert (calls_of(parts), content_of(parts)) == ([], broken)
        assert parts[-1].finish.reason == pb.FINISH_REASON_STOP
        await b.empty()


@pytest.mark.parametrize("by", ["token_ids", "text"])
async def test_stream_with_tool_calls_resumes_after_each_message(by: str) -> None:
    answer = '<think>a</think>b<tool_call>{"name": "look", "arguments": {"a": "c"}}</tool_call>'
    async with bench(worker_of(answer=answer, step_s=0.005, tokens_per_step=5)) as b:
        asked = chat(output_options=pb.OutputOptions(return_token_ids=by == "token_ids"))
        whole = await collect(b.stub.Chat(asked))
        calls = calls_of(whole)
        assert [call.arguments_json for call in calls] == ['{"a": "c"}']
        assert len(whole) > 5
        for count in range(1, len(whole)):
            parts = [*whole[:count], *await collect(b.stub.Chat(going_on(asked, whole[:count])))]
            assert (calls_of(parts), content_of(parts)) == (calls, "b"), count
        await b.empty()


@pytest.mark.parametrize("count", [7, 25])
async def test_worker_death_inside_tool_call_changes_nothing(count: int) -> None:
    ids = [*Tokenizer.from_files(SPELLED).encode('<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'), EOS]
    parts = await of_two_workers(SPELLED, chat(), ids, count)
    assert [each.arguments_json for each in calls_of(parts)] == ['{"a": 1}']
    assert (parts[-1].finish.attempts, parts[-1].finish.reason) == (2, pb.FINISH_REASON_TOOL_CALLS)


async def test_client_library_returns_tool_calls() -> None:
    async with bench(worker_of()) as b, AsyncClient(b.router.server.address) as client:
        stream = client.chat_stream("hi", max_tokens=400, tools=[tool("look", "looks", SCHEMA)])
        deltas = [event async for event in stream if isinstance(event, Delta)]
        parts = [part for delta in deltas for part in delta.tool_calls]
        assert [part.name for part in parts if part.name] == ["look", "look"]
        declared = {"name": "look", "parameters_json": json.dumps(SCHEMA)}
        result = await client.chat("hi", max_tokens=400, tools=[declared])
        assert [call.arguments_json for call in result.tool_calls] == [*ARGUMENTS]
        said: list[Any] = [
            {"role": "user", "content": "hi"},
            result.message,
            *({"role": "tool", "content": "21", "tool_call_id": call.id} for call in result.tool_calls),
        ]
        assert (await client.chat(said, max_tokens=400)).text.startswith("so:")
        await b.empty()


async def test_tools_example_answers_calls_until_final_answer() -> None:
    """The model calls a known tool, then an unknown one, and then answers."""
    tokenizer = Tokenizer.from_files(FILES)

    def answer(sequence: wpb.SubmitSequence) -> list[int]:
        prompt = tokenizer.decode([*sequence.token_ids][: sequence.prompt_len], skip_special=False)
        calls = [("multiply", '{"a": 6, "b": 7}'), ("other", "{}")]
        texts = [f'la <tool_call>{{"name": "{name}", "arguments": {given}}}</tool_call>' for name, given in calls]
        # As many results as there are in the prompt so far.
        return [*tokenizer.encode([*texts, "so"][min(prompt.count("<|im_start|>tool"), 2)]), EOS]

    async with bench(FakeWorker(FILES, answer=answer, description={"vocab_size": 304})) as b:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(REPOSITORY / "examples" / "tools_client.py"),
            b.router.server.address,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert out.decode().splitlines() == [
            "> What is the weather in Paris and in Oslo?",
            "la",
            'multiply({"a": 6, "b": 7}) -> {"result": 42}',
            "la",
            """other({}) -> {"error": "KeyError: 'other'"}""",
            "so",
            *("> What is 12 times 7?", "so"),
            *("> Thank you!", "so"),
        ]
        await b.empty()
