"""Prompts in front of answers (`echo`) and special tokens in the text, also where a stream goes on."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, TOKENIZER, bench, collect, detail, error_of, request
from tests.e2e.test_contract import resumed
from tests.unit.router.support import EOS

START, PAD = 256, 258
# Half of "é", which nothing finishes.
HALF = TOKENIZER.encode("é")[:1]
PROMPTS: list[dict[str, Any]] = [
    {"text": "say é"},
    {"token_ids": pb.TokenIds(ids=[START, *TOKENIZER.encode("say"), EOS])},
    {"token_ids": pb.TokenIds(ids=[*TOKENIZER.encode("say"), *HALF])},
]


def special(_: wpb.SubmitSequence) -> list[int]:
    """Special tokens within an answer, and at its end."""
    return [*TOKENIZER.encode("hel"), START, *TOKENIZER.encode("lo"), PAD, PAD, *TOKENIZER.encode("é"), EOS]


def text_of(parts: list[Any]) -> str:
    return "".join(part.text for part in parts)


def ids_of(parts: list[Any]) -> list[int]:
    return [i for part in parts for i in part.token_ids]


def _of(index: int, parts: list[Any]) -> list[Any]:
    return [part for part in parts if part.index == index]


def asking(prompt: dict[str, Any], **options: Any) -> pb.GenerateRequest:
    made = request(request_id="r", params={"max_tokens": 64, **options.pop("params", {})})
    made.MergeFrom(pb.GenerateRequest(**prompt, output_options=pb.OutputOptions(**options)))
    return made


@pytest.mark.proto_field("OutputOptions.prompt_token_ids", "PromptInfo.token_ids")
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_prompt_token_ids_come_with_the_first_message_alone(prompt: dict[str, Any]) -> None:
    async with bench(FakeWorker(FILES)) as b:
        ids = list(prompt["token_ids"].ids) if "token_ids" in prompt else TOKENIZER.encode(prompt["text"])
        parts = await collect(b.stub.Generate(asking(prompt, prompt_token_ids=True)))
        assert [list(part.prompt_info.token_ids) for part in parts] == [ids, *([[]] * (len(parts) - 1))]
        plain = await collect(b.stub.Generate(asking(prompt)))
        assert not plain[0].prompt_info.token_ids
        assert text_of(plain) == text_of(parts)


@pytest.mark.proto_field("OutputOptions.echo")
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("keep", [False, True])
async def test_echo_puts_prompt_before_same_answer(prompt: dict[str, Any], keep: bool) -> None:
    async with bench(FakeWorker(FILES, answer=special)) as b:
        plain = await collect(b.stub.Generate(asking(prompt, keep_special_tokens=keep)))
        echoed = await collect(b.stub.Generate(asking(prompt, keep_special_tokens=keep, echo=True)))
        ids = list(prompt["token_ids"].ids) if "token_ids" in prompt else TOKENIZER.encode(prompt["text"])
        assert text_of(echoed) == TOKENIZER.decode(ids, skip_special=not keep) + text_of(plain)
        assert ids_of(echoed) == [*ids, *ids_of(plain)]
        assert echoed[0].text.startswith(TOKENIZER.decode(ids, skip_special=not keep))
        assert echoed[-1].finish.usage == plain[-1].finish.usage
        assert echoed[-1].finish.usage.completion_tokens == len(special(wpb.SubmitSequence()))
        once = await b.stub.GenerateOnce(asking(prompt, keep_special_tokens=keep, echo=True))
        assert once.answers[0].text == text_of(echoed)
        await b.empty()


async def test_each_of_several_answers_has_echo() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        parts = await collect(b.stub.Generate(asking({"text": "say "}, echo=True, params={"n": 3})))
        for index in range(3):
            assert text_of([part for part in parts if part.index == index]) == "say hello"


async def test_stop_strings_ignore_prompt() -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        parts = await collect(
            b.stub.Generate(asking({"text": "say kl"}, echo=True, params={"stop_strings": ["kl", "lh"]}))
        )
        assert text_of(parts) == "say klhij"


@pytest.mark.parametrize("by", ["token_ids", "text"])
@pytest.mark.parametrize("keep", [False, True])
async def test_stream_with_echo_resumes_at_each_message(by: str, keep: bool) -> None:
    async with bench(FakeWorker(FILES, answer=special)) as b:
        asked = asking(PROMPTS[0], keep_special_tokens=keep, echo=True)
        asked.output_options.return_token_ids = by == "token_ids"
        whole = await collect(b.stub.Generate(asked))
        for count in range(1, len(whole)):
            rest = await collect(b.stub.Generate(resumed(asked, whole[:count], by=by)))
            assert text_of([*whole[:count], *rest]) == text_of(whole)
            assert ids_of([*whole[:count], *rest]) == ids_of(whole)
            assert rest[-1].finish.stop == whole[-1].finish.stop
            assert rest[-1].finish.usage.completion_tokens == whole[-1].finish.usage.completion_tokens
        await b.empty()


async def test_text_with_echo_resumes_after_any_character() -> None:
    async with bench(FakeWorker(FILES, answer=special)) as b:
        asked = asking(PROMPTS[0], keep_special_tokens=True, echo=True)
        asked.output_options.return_token_ids = False
        whole = text_of(await collect(b.stub.Generate(asked)))
        for size in range(1, len(whole), 3):
            got = whole[:size].encode()
            again = pb.GenerateRequest()
            again.CopyFrom(asked)
            point = again.resume.answers.add(index=0)
            point.text.bytes, point.text.sha256 = len(got), hashlib.sha256(got).digest()
            assert got.decode() + text_of(await collect(b.stub.Generate(again))) == whole
        await b.empty()


async def test_resume_without_token_ids_repeats_echo() -> None:
    """One of three answers has arrived in part; an empty list of ids counts like none."""
    async with bench(FakeWorker(FILES, answer=special)) as b:
        asked = asking(PROMPTS[0], echo=True, params={"n": 3})
        whole = await collect(b.stub.Generate(asked))
        again = pb.GenerateRequest()
        again.CopyFrom(asked)
        first, *_ = (part for part in whole if part.index == 0)
        again.resume.answers.add(index=0).token_ids.ids.extend(first.token_ids)
        again.resume.answers.add(index=1).token_ids.SetInParent()
        rest = await collect(b.stub.Generate(again))
        for index, got in enumerate(([first], [], [])):
            parts, all_parts = [*got, *_of(index, rest)], _of(index, whole)
            assert (text_of(parts), ids_of(parts)) == (text_of(all_parts), ids_of(all_parts))


async def test_resume_with_wrong_or_too_many_token_ids_is_refused() -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        asked = asking({"text": "say"}, echo=True, params={"max_tokens": 6})
        for ids, status in (
            (letters(wpb.SubmitSequence())[:3], "DATA_LOSS"),
            ([*TOKENIZER.encode("say"), *letters(wpb.SubmitSequence())[:7]], "INVALID_ARGUMENT"),
        ):
            again = pb.GenerateRequest()
            again.CopyFrom(asked)
            again.resume.answers.add(index=0).token_ids.ids.extend(ids)
            error = await error_of(b.stub.Generate(again))
            assert error.code().name == status
        await b.empty()


@pytest.mark.proto_field("OutputOptions.keep_special_tokens")
async def test_special_tokens_stay_in_the_text() -> None:
    async with bench(FakeWorker(FILES, answer=special)) as b:
        parts = await collect(b.stub.Generate(asking({"text": "say"}, keep_special_tokens=True)))
        assert text_of(parts) == "hel<|start|>lo<|pad|><|pad|>é<|end|>"
        assert parts[-1].finish.stop.eos_token_id == EOS
        asked = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="say")])
        asked.output_options.keep_special_tokens = True
        chat = await collect(b.stub.Chat(asked))
        assert "".join(part.delta.content for part in chat) == text_of(parts)
        asked.output_options.keep_special_tokens = False
        chat = await collect(b.stub.Chat(asked))
        assert "".join(part.delta.content for part in chat) == "helloé"


async def test_stop_strings_match_text_as_sent() -> None:
    async with bench(FakeWorker(FILES, answer=special)) as b:
        for keep, stop, text in (
            (False, "ello", "h"),
            (False, "<|pad|>", "helloé"),
            (True, "ello", "hel<|start|>lo<|pad|><|pad|>é<|end|>"),
            (True, "<|pad|>", "hel<|start|>lo"),
            (True, "|><|", "hel<|start|>lo<|pad"),
            (True, "é<|end|>", "hel<|start|>lo<|pad|><|pad|>"),
        ):
            parts = await collect(
                b.stub.Generate(asking({"text": "say"}, keep_special_tokens=keep, params={"stop_strings": [stop]}))
            )
            assert text_of(parts) == text
            matched = parts[-1].finish.stop
            assert matched == (
                pb.StopDetail(eos_token_id=EOS) if text.endswith(("é", "<|end|>")) else pb.StopDetail(stop_string=stop)
            )


async def test_stop_token_is_no_text_with_kept_special_tokens() -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        b.workers[0].end_with = wpb.SequenceEnd(reason=wpb.END_REASON_STOP_TOKEN, stop_token_id=5)
        parts = await collect(b.stub.Generate(asking({"text": "say"}, keep_special_tokens=True)))
        assert text_of(parts) == TOKENIZER.decode(ids_of(parts)[:-1])


async def test_chat_refuses_echo() -> None:
    async with bench() as b:
        asked = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")])
        asked.output_options.echo = True
        error = await error_of(b.stub.Chat(asked))
        assert error.code().name == "INVALID_ARGUMENT"
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "output_options.echo"
