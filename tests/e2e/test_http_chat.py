"""`/v1/chat/completions` over real sockets, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.http_bench import HttpBench, facade_of
from tests.e2e.router_bench import Bench, bench

SAY: Any = {"model": "m", "messages": [{"role": "user", "content": "say"}], "seed": 7, "max_tokens": 6}


@pytest.fixture
async def served() -> AsyncIterator[tuple[Bench, HttpBench]]:
    async with bench() as router, facade_of([router.router.server.address]) as http:
        yield router, http


async def test_stream_and_whole_answer_have_the_same_text(served: tuple[Bench, HttpBench]) -> None:
    _, http = served
    whole = await http.openai.chat.completions.create(**SAY)
    stream = await http.openai.chat.completions.create(**SAY, stream=True)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content == "hijklm"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
