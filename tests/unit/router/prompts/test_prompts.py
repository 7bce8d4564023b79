"""Prompts: work that must not block the event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidFieldError, PromptTooLongError, QueueFullError, TextTooLongError
from common.limits import MAX_TEXT_ANSWER_BYTES, MAX_TOKENIZE_TEXT_BYTES, TOKENIZE_THREADS
from common.text.tokenizer import Tokenizer
from router.model_registry import ServedModel, TextAssets
from router.prompts.prompts import LONG_TEXT, LONG_TEXT_NICE, PromptEncoder, Steps, _compact, yield_to_loop
from router.prompts.text_queue import TextJob, TextQueue
from tests.unit.router.support import tokenizer_files


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_become_compact_from_a_list_and_from_a_message(ids: list[int]) -> None:
    assert _compact(ids) == _compact(pb.TokenIds(ids=ids).ids) == array("I", ids)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_only_text_threads_have_lower_priority() -> None:
    def own_nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own_nice()
    with ThreadPoolExecutor(1, initializer=yield_to_loop) as pool:
        assert pool.submit(own_nice).result() == min(19, before + LONG_TEXT_NICE)
    assert own_nice() == before


def model(max_model_len: int = 1024) -> ServedModel:
    text = TextAssets.from_files(tokenizer_files())
    return ServedModel("m", "X", max_model_len, 300, "", "", 16, 0, text)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def held(event: threading.Event) -> Steps[None]:
    event.wait()
    return
    yield


async def test_short_text_does_not_wait_for_long_texts() -> None:
    encoder, end = PromptEncoder(TextQueue()), threading.Event()
    long = [asyncio.create_task(encoder._run(held(end), LONG_TEXT + 1)) for _ in range(2 * TOKENIZE_THREADS)]
    try:
        assert await asyncio.wait_for(encoder.for_generate(pb.GenerateRequest(text="hi"), model()), 60)
        assert not any(task.done() for task in long)
    finally:
        end.set()
        await asyncio.gather(*long)
        encoder.close()


async def test_too_long_text_is_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one text of 7 MB cost 18 s and 1.5 GB before it was refused."""
    encoder, served = PromptEncoder(TextQueue()), model()
    monkeypatch.setattr(Tokenizer, "encode_pieces", lambda *_, **__: pytest.fail("was tokenized"))
    for text in ("7" * 7_000_000, "word" * 1_500_000, " " * 7_000_000, "中" * 2_000_000):
        with pytest.raises(PromptTooLongError) as refused:
            await encoder.for_generate(pb.GenerateRequest(text=text), served)
        assert refused.value.violations[0].path == "text"
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="7" * 7_000_000)])
    with pytest.raises(PromptTooLongError):
        await encoder.for_chat(chat, served)
    embed = pb.EmbedRequest(inputs=[pb.TextOrTokens(text="hi"), pb.TextOrTokens(text="中" * 300_000)])
    monkeypatch.setattr(Tokenizer, "encode_pieces", lambda _, text, **__: iter([[7] * len(text)]))
    with pytest.raises(PromptTooLongError) as refused:
        await encoder.for_embed(embed, served)
    # A bound: all of them would be 300,000.
    assert str(refused.value.violations[0].problem).startswith("has at least ")
    assert "300000" not in refused.value.violations[0].problem
    assert len(encoder) == 0
    encoder.close()


async def test_tokenizing_stops_at_model_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose bytes do not show that it is too long is tokenized only up to the model's length."""
    encoder, served, seen = PromptEncoder(TextQueue()), model(20_000), list[int]()
    ids = Tokenizer._ids

    def counted(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        seen.append(len(text))
        return ids(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "fewest_tokens", lambda *_: 0)
    monkeypatch.setattr(Tokenizer, "_ids", staticmethod(counted))
    with pytest.raises(PromptTooLongError, match="at least"):
        await encoder.for_generate(pb.GenerateRequest(text="two words " * 400_000), served)
    assert sum(seen) < 3 * 32_768
    encoder.close()


async def test_cancelled_texts_leave_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: cancelled texts stayed in the threads' queue and were tokenized to their end."""
    encoder, served, steps = PromptEncoder(TextQueue()), model(1 << 30), list[str]()
    pieces = Tokenizer.encode_pieces

    def watched(self: Tokenizer, text: str, **options: Any) -> Iterator[list[int]]:
        for piece in pieces(self, text, **options):
            steps.append(text[:1])
            yield piece

    monkeypatch.setattr(Tokenizer, "encode_pieces", watched)
    texts = [pb.GenerateRequest(text="two words " * 400_000) for _ in range(12)]
    calls = [asyncio.create_task(encoder.for_generate(text, served)) for text in texts]
    await until(lambda: len(steps) >= 3)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: len(encoder) == 0)
    # Of 12 texts with 123 pieces each.
    assert len(steps) < 60
    assert encoder._queue.bytes == 0
    encoder.close()


async def test_waiting_texts_are_bounded_in_bytes() -> None:
    """Regression: 4096 texts of 8 MiB could wait. A caller whose text is dropped gets a retry time."""
    encoder, end = PromptEncoder(TextQueue(most_bytes=100_000)), threading.Event()
    hold = [asyncio.create_task(encoder._run(held(end), 20_000, "a")) for _ in range(TOKENIZE_THREADS)]
    waiting = [asyncio.create_task(encoder._run(held(end), 20_000, "a")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as refused:
        await encoder._run(held(end), 20_000, "a")
    assert refused.value.retry_after_s
    other = asyncio.create_task(encoder._run(held(end), 20_000, "b"))
    with pytest.raises(QueueFullError):
        await waiting.pop()
    end.set()
    await asyncio.gather(*hold, *waiting, other)
    assert len(encoder) == 0
    encoder.close()


async def test_tenant_waits_for_one_step_of_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ten Tokenize calls of 2 MB delayed another tenant's prompt of 24 kB by 13.9 s."""
    encoder, served, order = PromptEncoder(TextQueue()), model(1 << 30), list[str]()
    pieces = Tokenizer.encode_pieces

    def watched(self: Tokenizer, text: str, **options: Any) -> Iterator[list[int]]:
        for piece in pieces(self, text, **options):
            order.append(text[:1])
            yield piece

    add = encoder._queue.add

    def watched_add(job: TextJob) -> list[TextJob]:
        order.append(f"{job.tenant} waits")
        return add(job)

    monkeypatch.setattr(Tokenizer, "encode_pieces", watched)
    monkeypatch.setattr(encoder._queue, "add", watched_add)
    long = [asyncio.create_task(encoder.tokenize("a few words " * 80_000, served, "a")) for _ in range(10)]
    await asyncio.sleep(0)
    await asyncio.wait_for(encoder.for_generate(pb.GenerateRequest(text="b a c " * 4000), served, "b"), 60)
    # The order before it waits does not matter.
    assert order[order.index("b waits") : order.index("b")].count("a") < 10
    assert not any(call.done() for call in long)
    for call in long:
        call.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    encoder.close()


async def test_answers_fit_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Tokenize of 8 MB computed for seconds, then failed with gRPC's own error."""
    encoder, served = PromptEncoder(TextQueue()), model()
    worst = await encoder.tokenize("\0" * MAX_TOKENIZE_TEXT_BYTES, served)
    assert worst.ByteSize() < MAX_TEXT_ANSWER_BYTES
    monkeypatch.setattr("router.prompts.prompts.MAX_TEXT_ANSWER_BYTES", 50_000)
    with pytest.raises(TextTooLongError, match="text has tokens of more than"):
        await encoder.tokenize("\0" * 50_000, served)
    with pytest.raises(TextTooLongError, match="token_ids stand for more than"):
        await encoder.detokenize([65] * 60_000, served, keep_special=False)
    assert len(await encoder.detokenize([65] * 40_000, served, keep_special=False)) == 40_000
    encoder.close()


async def test_token_unknown_to_model_is_invalid_text() -> None:
    """Regression: the status was INTERNAL, with the worker's message about token_ids."""
    encoder, served = PromptEncoder(TextQueue()), replace(model(), vocab_size=259)
    with pytest.raises(InvalidFieldError, match="text has a part that the model's tokenizer makes token"):
        await encoder.for_generate(pb.GenerateRequest(text="say lo"), served)
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="lo")])
    with pytest.raises(InvalidFieldError, match="messages has a part"):
        await encoder.for_chat(chat, served)
    assert (await encoder.for_generate(pb.GenerateRequest(text="xyz"), served)).token_ids
    encoder.close()


async def test_rendered_prompt_has_no_marks() -> None:
    """Regression: the text had U+FDD0 and U+FDD1 around a special token of the input."""
    encoder, served = PromptEncoder(TextQueue()), model()
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a<|end|>b")])
    rendered = await encoder.render(chat, served)
    assert rendered.text == "<|start|>user\na<|end|>b<|end|><|start|>assistant\n"
    assert list(rendered.token_ids).count(257) == 1
    encoder.close()


async def test_text_left_out_by_the_template_is_refused_with_its_field() -> None:
    """Regression: the prompt lacked the text, and the status was OK."""
    files = {**tokenizer_files(), "chat_template.jinja": b"{{ messages[-1].content }}"}
    encoder, served = PromptEncoder(TextQueue()), replace(model(), text=TextAssets.from_files(files))
    messages = [pb.ChatMessage(role="system", content="be kind"), pb.ChatMessage(role="user", content="hi")]
    with pytest.raises(InvalidFieldError) as refused:
        await encoder.for_chat(pb.ChatRequest(messages=messages), served)
    assert refused.value.violations[0].path == "messages[0].content"
    assert (await encoder.for_chat(pb.ChatRequest(messages=messages[1:]), served)).token_ids
    encoder.close()


@pytest.mark.parametrize("role", ["bogus", "asistant", "user<|end|>", "User", "x" * 4_000_000])
async def test_role_unknown_to_template_is_refused(role: str) -> None:
    """Regression: a typo silently gave a worse answer, and a role could look like a token."""
    encoder = PromptEncoder(TextQueue())
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(role=role, content="x")])
    with pytest.raises(InvalidFieldError) as refused:
        await encoder.for_chat(chat, model())
    assert refused.value.violations[0].path == "messages[1].role"
    assert len(str(refused.value)) < 300
    chat.messages[1].role = "tool"
    assert (await encoder.for_chat(chat, model())).token_ids
    encoder.close()


async def test_score_without_bos_skips_first_token() -> None:
    encoder, served = PromptEncoder(TextQueue()), model()
    assert served.text.tokenizer is not None
    assert served.text.tokenizer.bos_token_id is None
    ids = served.text.tokenizer.encode("hello, hello")
    try:
        by_text = pb.ScoreRequest(continuations=[pb.TextOrTokens(text="hello, hello")])
        by_tokens = pb.ScoreRequest(continuations=[pb.TextOrTokens(token_ids=pb.TokenIds(ids=ids))])
        for request in (by_text, by_tokens):
            (scored,) = await encoder.for_score(request, served)
            assert (scored.prompt.token_ids.tolist(), scored.start) == (ids, 1)
        by_tokens.continuations[0].token_ids.ids[1:] = []
        with pytest.raises(InvalidFieldError, match="has no token that can be scored"):
            await encoder.for_score(by_tokens, served)
    finally:
        encoder.close()
