"""The client of the benchmarks against small servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.cli.bench.records import Record
from common.cli.bench.workload import Work
from tests.bench.peers.client import closed_loop, llama_completion, openai_completions
from tests.bench.peers.http_stream import HttpError, events
from tests.bench.peers.runs import Clock, Job, WrongWorkError

Reply = Callable[[dict[str, Any]], list[bytes]]
# Longer than any job here takes.
LIMIT_S = 600.0
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def server(reply: Reply) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(row.split(b":")[1]) for row in head.split(b"\r\n") if row.startswith(b"Content-Length"))
        for part in reply(json.loads(await reader.readexactly(length))):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


def chunks(body: bytes, size: int) -> list[bytes]:
    """The body in HTTP chunks of `size` bytes, regardless of line ends."""
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return [CHUNKED, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def lines(*answers: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(answer).encode() + b"\n\n" for answer in answers)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_are_whole_for_any_chunk_size(size: int) -> None:
    body = lines({"text": "ü"}, {"n": 2}) + b"data: [DONE]\n\n"
    async with server(lambda _: chunks(body, size)) as port:
        assert [event async for event in events(port, "/x", {})] == [{"text": "ü"}, {"n": 2}]


async def test_unchunked_body_ends_with_connection() -> None:
    async with server(lambda _: [b"HTTP/1.1 200 OK\r\n\r\n", lines({"n": 1})[:-2]]) as port:
        assert [event async for event in events(port, "/x", {})] == [{"n": 1}]


async def test_http_error_has_status_and_body() -> None:
    async with server(lambda _: [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"no such model"]) as port:
        with pytest.raises(HttpError, match="status 400: no such model"):
            _ = [event async for event in events(port, "/x", {})]


async def test_vllm_client_reads_counts_and_times() -> None:
    def reply(body: dict[str, Any]) -> list[bytes]:
        assert body["prompt"] == [5, 6, 7]
        assert body["ignore_eos"] is True
        tokens = [{"choices": [{"text": "a"}]}] * body["max_tokens"]
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}}
        return chunks(lines(*tokens, usage) + b"data: [DONE]\n\n", 100)

    async with server(reply) as port:
        run = await closed_loop(openai_completions(port, "m"), Job([Work(4, (5, 6, 7))] * 3, 2, LIMIT_S))
    assert run.complete
    assert sorted(record.index for record in run.records) == [0, 1, 2]
    assert all(len(record.arrivals) == 4 and record.ended >= record.arrivals[-1] for record in run.records)


async def test_llamacpp_client_reads_counts_and_times() -> None:
    def reply(body: dict[str, Any]) -> list[bytes]:
        assert body["cache_prompt"] is False
        end = {"content": "", "stop": True, "tokens_evaluated": 3, "tokens_predicted": body["n_predict"]}
        begin = {"content": "", "stop": False, "tokens_predicted": 0}
        parts = [{"content": "a", "stop": False, "tokens_predicted": i + 1} for i in range(body["n_predict"])]
        return chunks(lines(begin, *parts, end), 64)

    async with server(reply) as port:
        run = await closed_loop(llama_completion(port), Job([Work(4, (5, 6, 7))], 1, LIMIT_S))
    assert [len(record.arrivals) for record in run.records] == [4]


async def asked(work: Work, record: Record, tokens: int) -> None:
    record.input_tokens, record.output_tokens = len(work.token_ids), tokens
    await asyncio.sleep(0)


async def test_closed_loop_keeps_its_concurrency() -> None:
    running = most = 0

    async def ask(work: Work, record: Record, clock: Clock) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asked(work, record, work.output_tokens)
        running -= 1

    run = await closed_loop(ask, Job([Work(4, (1,))] * 10, 3, LIMIT_S))
    assert run.complete
    assert len(run.records) == 10
    assert most == 3


async def test_short_peer_answer_is_an_error() -> None:
    with pytest.raises(WrongWorkError):
        await closed_loop(lambda work, record, _: asked(work, record, 3), Job([Work(4, (1,))], 1, LIMIT_S))


async def test_closed_loop_abandons_requests_past_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])

    async def ask(work: Work, record: Record, clock: Clock) -> None:
        if record.index == 1:
            await asyncio.Event().wait()
        await asked(work, record, work.output_tokens)
        if record.index == 2:
            # The limit passes when all but one have ended.
            now[0] += LIMIT_S

    run = await closed_loop(ask, Job([Work(4, (1,))] * 3, 2, LIMIT_S))
    assert not run.complete
    assert sorted(record.index for record in run.records) == [0, 2]
