"""Reasoning as a channel of its own, through real routers with scripted workers: streamed, whole and broken."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import pytest
from fissile.client import AsyncClient, Delta
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.text.tokenizer import Tokenizer
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import bench, collect, detail, error_of
from tests.e2e.test_chat import command, terminal
from tests.e2e.test_client_receipts import receipts_of
from tests.unit.router.support import EOS, thinking_files

FILES = thinking_files()
SPELLED = thinking_files(with_tokens=False)
TOKENIZER = Tokenizer.from_files(FILES)
THOUGHT, SAID = "so lo and la, é", "la la lo\n\nx"
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"


def worker_of(files: dict[str, bytes] = FILES, answer: str = ANSWER, **options: Any) -> FakeWorker:
    ids = [*Tokenizer.from_files(files).encode(answer), EOS]
    return FakeWorker(files, answer=lambda _: ids, description={"vocab_size": 302}, **options)


def chat(**fields: Any) -> pb.ChatRequest:
    made = pb.ChatRequest(request_id="r", messages=[pb.ChatMessage(role="user", content="hi")], **fields)
    if not made.sampling_params.HasField("max_tokens"):
        made.sampling_params.max_tokens = 200
    return made


def channels(parts: Iterable[Any]) -> tuple[str, str]:
    gathered = [*parts]
    return "".join(part.delta.reasoning for part in gathered), "".join(part.delta.content for part in gathered)


@pytest.mark.proto_field(
    "ChatRequest.reasoning",
    "ReasoningOptions.separate",
    "ChatDelta.reasoning",
    "Usage.reasoning_tokens",
)
async def test_reasoning_arrives_in_its_channel() -> None:
    async with bench(worker_of()) as b:
        model = (await b.stub.GetModel(pb.GetModelRequest())).model
        assert pb.CAPABILITY_REASONING in model.capabilities
        parts = await collect(b.stub.Chat(chat()))
        assert channels(parts) == (THOUGHT, SAID)
        thought = len(TOKENIZER.encode(ANSWER.partition("\n\n")[0]))
        usage = parts[-1].finish.usage
        assert usage.reasoning_tokens == thought
        assert usage.completion_tokens == len(TOKENIZER.encode(ANSWER)) + 1
        once = await b.stub.ChatOnce(chat(reasoning=pb.ReasoningOptions(separate=True)))
        assert (once.answers[0].message.reasoning, once.answers[0].message.content) == (THOUGHT, SAID)
        assert once.answers[0].finish.usage == usage
        together = await collect(b.stub.Chat(chat(reasoning=pb.ReasoningOptions(separate=False))))
        assert channels(together) == ("", ANSWER)
        assert together[-1].finish.usage.reasoning_tokens == 0
        await b.empty()


@pytest.mark.proto_field("ChatMessage.reasoning")
async def test_answer_with_reasoning_can_be_sent_back() -> None:
    """The template prints it like `reasoning_content`; only messages of the assistant may have it."""
    async with bench(worker_of()) as b:
        once = await b.stub.ChatOnce(chat())
        asked = chat()
        asked.messages.extend([once.answers[0].message, pb.ChatMessage(role="user", content="and?")])
        rendered = await b.stub.RenderPrompt(pb.RenderPromptRequest(chat=asked))
        assert f"assistant\n{ANSWER}<|im_end|>" in rendered.text
        asked.messages[0].reasoning = "none of a user"
        error = await error_of(b.stub.Chat(asked))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "messages[0].reasoning"
        await b.empty()


async def test_template_arguments_start_or_skip_reasoning() -> None:
    """If the prompt opens a reasoning block, the reader of the answer knows it."""
    for arguments, answer in (
        ('{"begin_thinking": true}', ANSWER.removeprefix("<think>\n")),
        ('{"enable_thinking": false}', SAID),
    ):
        async with bench(worker_of(answer=answer)) as b:
            parts = await collect(b.stub.Chat(chat(template_arguments_json=arguments)))
            assert channels(parts) == (THOUGHT if "begin" in arguments else "", SAID)
            await b.empty()


async def test_spelled_out_delimiter_is_text() -> None:
    spelled = Tokenizer.from_files(SPELLED).encode(ANSWER)
    worker = FakeWorker(FILES, answer=lambda _: [*spelled, EOS], description={"vocab_size": 302})
    async with bench(worker) as b:
        assert channels(await collect(b.stub.Chat(chat()))) == ("", ANSWER)
        await b.empty()


async def test_channel_missing_in_model_is_refused_by_name() -> None:
    plain = {**FILES, "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}"}
    async with bench(worker_of(plain)) as b:
        assert pb.CAPABILITY_REASONING not in (await b.stub.GetModel(pb.GetModelRequest())).model.capabilities
        assert channels(await collect(b.stub.Chat(chat()))) == ("", ANSWER)
        error = await error_of(b.stub.Chat(chat(reasoning=pb.ReasoningOptions(separate=True))))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "reasoning.separate"
        error = await error_of(b.stub.Chat(chat(reasoning=pb.ReasoningOptions(max_tokens=5))))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "reasoning.max_tokens"
        await b.empty()


@pytest.mark.parametrize("files", [FILES, SPELLED], ids=["tokens", "spelled"])
@pytest.mark.parametrize("by", ["token_ids", "text"])
async def test_stream_with_channels_resumes_after_each_message(files: dict[str, bytes], by: str) -> None:
    """The stream resumes by token ids, and by a digest of both channels, after any message."""
    async with bench(worker_of(files, "<think>\nso\n</think>\n\nla", step_s=0.005)) as b:
        asked = chat(output_options=pb.OutputOptions(return_token_ids=by == "token_ids"))
        whole = await collect(b.stub.Chat(asked))
        assert len(whole) > 5
        assert channels(whole) == ("so", "la")
        for count in range(1, len(whole)):
            rest = await collect(b.stub.Chat(going_on(asked, whole[:count])))
            assert channels([*whole[:count], *rest]) == ("so", "la"), count
        await b.empty()


def going_on(asked: pb.ChatRequest, had: list[Any]) -> pb.ChatRequest:
    """The request again, behind the parts that have come."""
    again = pb.ChatRequest()
    again.CopyFrom(asked)
    again.resume.weights_digest = had[0].prompt_info.weights_digest
    calls: dict[int, str] = {}
    for call in (call for part in had for call in part.delta.tool_calls):
        calls[call.index] = calls.get(call.index, "") + call.arguments_json
    data = "".join([*channels(had), *calls.values()]).encode()
    if asked.output_options.return_token_ids:
        again.resume.answers.add().token_ids.ids.extend(i for part in had for i in part.token_ids)
    elif data:
        again.resume.answers.add().text.MergeFrom(pb.TextDigest(bytes=len(data), sha256=hashlib.sha256(data).digest()))
    return again


@pytest.mark.parametrize("count", [4, 10, 14])
async def test_worker_death_inside_delimiter_changes_nothing(count: int) -> None:
    """The delimiters are spelled in several tokens."""
    ids = [*Tokenizer.from_files(SPELLED).encode("<think>la</think>lo"), EOS]
    parts = await of_two_workers(SPELLED, chat(), ids, count)
    assert channels(parts) == ("la", "lo")
    assert (parts[-1].finish.attempts, parts[-1].finish.exact) == (2, True)


async def of_two_workers(files: dict[str, bytes], asked: pb.ChatRequest, ids: list[int], count: int) -> list[Any]:
    """The parts of an answer whose worker dies after `count` tokens, and which another one goes on with."""

    def answer(sequence: wpb.SubmitSequence) -> list[int]:
        """Stops for ever after so many tokens, at the first worker that has it."""
        return ids if len(sequence.token_ids) > sequence.prompt_len else ids[:count]

    workers = [FakeWorker(files, worker_id=f"w{i}", answer=answer) for i in range(2)]
    async with bench(*workers) as b:
        asked.output_options.return_token_ids = True
        call = b.stub.Chat(asked)
        parts = list[Any]()
        while sum(len(part.token_ids) for part in parts) < count:
            parts.append(await call.read())
        await next(worker for worker in workers if worker.running).stop()
        return parts + await collect(call)


async def test_client_library_separates_reasoning() -> None:
    async with bench(worker_of()) as b, AsyncClient(b.router.server.address) as client:
        stream = client.chat_stream("hi", max_tokens=200)
        events = [event async for event in stream if isinstance(event, Delta)]
        assert ("".join(e.reasoning for e in events), "".join(e.text for e in events)) == (THOUGHT, SAID)
        result = await client.chat("hi", max_tokens=200, stop_strings=["zz"], receipt=True)
        assert (result.reasoning, result.text) == (THOUGHT, SAID)
        assert receipts_of(result) == [True]
        assert result.receipt is not None
        assert (await client.verify(result.receipt)).is_equal
        other: dict[str, Any] = {"reasoning": {"separate": False}}
        assert receipts_of(await client.chat("hi", max_tokens=200, stop_strings=["zz"], receipt=True, **other)) == [
            True
        ]
        await b.empty()


async def test_delimiter_stop_string_is_in_receipt() -> None:
    """A delimiter that is a special token ends only answers that are read in channels."""
    async with bench(worker_of()) as b:
        digests = set[bytes]()
        for stops in ([], ["zz"]):
            for separate in (True, False):
                asked = chat(reasoning=pb.ReasoningOptions(separate=separate))
                asked.sampling_params.stop_strings.extend(stops)
                asked.output_options.receipt.SetInParent()
                parts = await collect(b.stub.Chat(asked))
                digests.add(parts[-1].finish.receipt.request_sha256)
        # Without stop strings the tokens do not depend on it.
        assert len(digests) == 3
        await b.empty()


async def test_fissile_chat_shows_reasoning_dim_on_a_terminal_alone() -> None:
    async with bench(worker_of()) as b:
        async with terminal(b) as talk:
            talk.type("hi\n")
            shown = await talk.sees("x\r\n")
            assert (
                shown.index("\x1b[2m") < shown.index(THOUGHT[-1]) < shown.rindex("\x1b[22m") < shown.index("la la lo")
            )
        code, out, err = await command("chat", "--address", b.router.server.address, text="hi\n")
        assert (code, out) == (0, f"{SAID}\n"), err
        prompts = [TOKENIZER.decode([*one.token_ids], skip_special=False) for one in b.workers[0].submitted]
        assert all("<think>" not in prompt for prompt in prompts)
        await b.empty()
