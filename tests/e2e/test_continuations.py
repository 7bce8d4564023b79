"""Text of streams of a model with SentencePiece's kind of tokenizer: what Generate continues, and what Chat answers."""

from __future__ import annotations

from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from common.text.tokenizer import Tokenizer
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import bench, collect
from tests.unit.common.text.continuations import TOKENIZERS, continuation
from tests.unit.common.text.support import CHATML, files

KIND = "sentencepiece"
TOKENIZER: Tokenizer = TOKENIZERS[KIND]
BOS = 1
PROMPT = TOKENIZER.encode("the cat")
WORDS = TOKENIZER.encode("sat on the mat 中文")[1:]


def words(_: wpb.SubmitSequence) -> list[int]:
    """The same words again and again, without an end."""
    return WORDS * 1000


def worker(worker_id: str = "w0", **fields: Any) -> FakeWorker:
    made = {**files(KIND), "chat_template.jinja": CHATML.encode()}
    described = {"vocab_size": TOKENIZER.vocab_size}
    return FakeWorker(made, worker_id, words, description=described, **fields)


def params(max_tokens: int, *stop_strings: str) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=max_tokens, stop_strings=stop_strings)


def given(ids: list[int], sampling_params: pb.SamplingParams) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling_params=sampling_params)


def said(part: pb.GenerateResponse | pb.ChatResponse) -> str:
    """Text that a message adds."""
    return part.delta.content if isinstance(part, pb.ChatResponse) else part.text


async def text_of(call: Any) -> str:
    return "".join(said(part) for part in await collect(call))


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
async def test_generate_continues_prompt_and_chat_starts_message(tokens_per_step: int) -> None:
    """Former fault: the text of Generate lacked the space before its first word."""
    expected = " sat on the mat 中文"
    once = params(len(WORDS))
    async with bench(worker(tokens_per_step=tokens_per_step)) as b:
        assert await text_of(b.stub.Generate(pb.GenerateRequest(text="the cat", sampling_params=once))) == expected
        assert await text_of(b.stub.Generate(given(PROMPT, once))) == expected
        assert await text_of(b.stub.Generate(given([BOS], once))) == expected.removeprefix(" ")
        stopped = params(len(WORDS), " sat on")
        assert await text_of(b.stub.Generate(given(PROMPT, stopped))) == ""

        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], sampling_params=once)
        assert await text_of(b.stub.Chat(chat)) == expected.removeprefix(" ")
        await b.empty()


async def test_lost_worker_changes_no_text() -> None:
    """A stream that continues on another worker continues its text too."""
    one, two = worker("w0"), worker("w1")
    answer = WORDS * 40
    async with bench(one, two) as b:
        calls = [b.stub.Generate(given(PROMPT, params(len(answer)))) for _ in range(4)]
        firsts: list[Any] = [await call.read() for call in calls]
        await one.stop()
        for first, call in zip(firsts, calls, strict=True):
            text = said(first) + await text_of(call)
            assert text == continuation(KIND, PROMPT, answer)
        assert any(len(sequence.token_ids) > len(PROMPT) for sequence in two.submitted)
        await b.empty()
