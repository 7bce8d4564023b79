"""HTTP streams while workers and routers are killed, and callers who send or read badly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from facade import app
from facade.http.exchange import EVENT
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.http_bench import HttpBench, facade_of
from tests.e2e.router_bench import FILES, Bench, bench, until
from tests.e2e.service import Process, Service, free_port, running_service
from tests.e2e.simulated import OPTIONS, simulated_model, wait_workers

NUM_STREAMS = 8
NUM_TOKENS = 200
CHAT = "/v1/chat/completions"
SAY: Any = {"model": "m", "messages": [{"role": "user", "content": "say"}], "max_tokens": 4}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Service, Process]]:
    """Two routers of two simulated workers, as processes."""
    model = simulated_model(tmp_path / "model")
    with running_service(tmp_path, model, workers=2, worker_options=OPTIONS) as service:
        port = free_port()
        workers = [argument for worker in service.workers for argument in ("--worker", worker.address)]
        other = Process("other", ["router", "--port", str(port), *workers], port, tmp_path / "other.log")
        other.start()
        try:
            other.wait_serving()
            wait_workers(service, 2)
            yield service, other
        finally:
            other.stop()


@pytest.mark.slow
async def test_streams_survive_the_death_of_a_worker_and_a_router_with_the_same_bytes(
    fleet: tuple[Service, Process],
) -> None:
    service, other = fleet
    async with facade_of([service.router.address, other.address]) as http:
        client = http.openai.completions
        more: Any = {"temperature": 0.8, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
        prompts: Any = [[7 + i, 8, 9] for i in range(NUM_STREAMS)]
        wanted = [(await client.create(model="test", prompt=p, seed=5, **more)).choices[0].text for p in prompts]
        texts = ["" for _ in prompts]
        ends: list[Any] = []

        async def read(i: int) -> None:
            async for chunk in await client.create(model="test", prompt=prompts[i], seed=5, stream=True, **more):
                texts[i] += chunk.choices[0].text
                if chunk.choices[0].finish_reason:
                    ends.append((chunk.choices[0].finish_reason, chunk.choices[0].fissile["exact"]))

        reads = [asyncio.ensure_future(read(i)) for i in range(NUM_STREAMS)]
        for process in (service.workers[0], service.router):
            await until(functools.partial(_has_grown, texts, sum(map(len, texts)) + NUM_STREAMS))
            assert not all(task.done() for task in reads)
            process.running.kill()
        await asyncio.gather(*reads)
        assert texts == wanted
        assert ends == [("length", True)] * NUM_STREAMS


async def test_stream_continues_at_the_next_router_without_a_gap() -> None:
    first, second = FakeWorker(FILES, step_s=0.01), FakeWorker(FILES, step_s=0.01, worker_id="w1")
    async with (
        bench(first) as b,
        bench(second) as other,
        facade_of([b.router.server.address, other.router.server.address]) as http,
    ):
        chunks: list[Any] = []
        request: Any = SAY | {"max_tokens": 80}
        reading = asyncio.ensure_future(
            _append(await http.openai.chat.completions.create(**request, stream=True), chunks)
        )
        await until(lambda: len(chunks) >= 3)
        await b.router.stop()
        await reading
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == ("hijklmnpqrstuvwxyz" * 5)[:80]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert len({chunk.id for chunk in chunks}) == 1


@pytest.fixture
async def served() -> AsyncIterator[tuple[Bench, HttpBench]]:
    async with bench() as router, facade_of([router.router.server.address]) as http:
        yield router, http


BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b"null",
    b'"text"',
    b"[" * 100_000,
    b'{"messages": ' + b'[{"a":' * 5_000,
    b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "m", "messages": [], "seed": 1e400}',
    b'{"model": "m", "messages": [], "seed": 999999999999999999999999999}',
    b'{"model": "m", "messages": [], "max_tokens": -1}',
    b'{"model": "m", "messages": [], "temperature": NaN}',
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "logit_bias": {"a": 1}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": '
    + b"[" * 600
    + b"]" * 600
    + b"}",
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize"])
async def test_bad_body_is_a_clear_4xx_in_openai_form(served: tuple[Bench, HttpBench], path: str) -> None:
    for body in BAD_BODIES:
        response = await served[1].http.post(path, content=body, headers={"content-type": "application/json"})
        assert 400 <= response.status_code < 500, body[:80]
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, '"messages": [], "model": "m", "model": "n"', "model"),
        (CHAT, '"messages": [{"role": "user", "content": "a", "role": "system"}]', "messages[0].role"),
        (
            CHAT,
            '"messages": [], "chat_template_kwargs": {"a": [[1, {"b": 1, "\\u0062": 2}]]}',
            "chat_template_kwargs.a[0][1].b",
        ),
        (
            "/v1/responses",
            '"input": [{"role": "user", "content": [{"type": "a", "type": "b"}]}]',
            "input[0].content[0].type",
        ),
        (
            "/v1/messages",
            '"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "a", "content": "b"}]',
            "messages[0].content",
        ),
        ("/v1/completions", '"prompt": "a", "prompt": "b"', "prompt"),
        ("/v1/embeddings", '"input": "a", "input": "b"', "input"),
        ("/v1/rerank", '"query": "a", "documents": [{"text": "a", "text": "b"}]', "documents[0].text"),
        ("/tokenize", '"prompt": "a", "prompt": "b"', "prompt"),
        ("/detokenize", '"tokens": [1], "tokens": [2]', "tokens"),
    ],
)
async def test_name_twice_in_an_object_is_refused_with_its_path(
    served: tuple[Bench, HttpBench], path: str, body: str, param: str
) -> None:
    response = await served[1].http.post(path, content=f"{{{body}}}")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == f"{param} is given twice; valid: each name once in an object"
    assert error.get("param", param) == param


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
    ],
    ids=["no HTTP", "large headers", "bad chunk", "bad length"],
)
async def test_bad_http_closes_its_connection_alone(served: tuple[Bench, HttpBench], sent: bytes) -> None:
    reader, writer = await _connect(served[1])
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        assert (await reader.readline()).split()[1] in (b"400", b"431")
    writer.close()
    assert (await served[1].http.post(CHAT, json=SAY)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "reason", "allowed"),
    [
        ("POST", "/v1/nothing", 404, "UNKNOWN_PATH", None),
        ("POST", f"{CHAT}/", 404, "UNKNOWN_PATH", None),
        ("POST", "/v1/messages/nothing", 404, "UNKNOWN_PATH", None),
        ("GET", CHAT, 405, "WRONG_METHOD", "POST"),
        ("DELETE", "/v1/messages", 405, "WRONG_METHOD", "POST"),
        ("POST", "/v1/models", 405, "WRONG_METHOD", "GET, HEAD"),
    ],
)
async def test_wrong_path_or_method_is_refused_in_form_of_door_and_logged(
    served: tuple[Bench, HttpBench], method: str, path: str, status: int, reason: str, allowed: str | None
) -> None:
    with capture_logs() as lines:
        response = await served[1].http.request(method, path)
        await until(lambda: [line for line in lines if line["event"] == EVENT])
    assert (response.status_code, response.headers.get("allow")) == (status, allowed)
    body = response.json()
    assert "message" in body["error"]
    assert (body.get("type") == "error") is path.startswith("/v1/messages")
    (line,) = [line for line in lines if line["event"] == EVENT]
    assert (line["method"], line["status"], line["reason"]) == (f"{method} {path}", status, reason)


async def test_probes_at_once_ask_the_routers_once(
    served: tuple[Bench, HttpBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    health, asked = served[1].facade.app.health, list[str]()
    look = health._look

    async def counted() -> str:
        asked.append("")
        return await look()

    monkeypatch.setattr(health, "_look", counted)
    # No answer gets old while the probes run.
    monkeypatch.setattr(app, "HEALTH_KEPT_S", 1e9)
    answers = await asyncio.gather(*(served[1].http.get("/health") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(asked) == 1


async def test_facade_is_healthy_beside_silent_router(
    served: tuple[Bench, HttpBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Former fault: the slowest of all routers decided how long a probe took."""
    monkeypatch.setattr(app, "HEALTH_TIMEOUT_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        routers = [f"127.0.0.1:{silent.getsockname()[1]}", served[0].router.server.address]
        async with facade_of(routers) as http:
            assert (await http.http.get("/health")).json() == {"status": "ok"}


async def test_large_body_is_refused(served: tuple[Bench, HttpBench]) -> None:
    text = json.dumps(SAY | {"messages": [{"role": "user", "content": "a" * (17 << 20)}]})
    with contextlib.suppress(OSError):
        response = await served[1].http.post(CHAT, content=text)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert (await served[1].http.post(CHAT, json=SAY)).status_code == 200


async def test_unfinished_uploads_refuse_the_largest_alone(served: tuple[Bench, HttpBench]) -> None:
    served[1].facade.app.uploads._most_bytes = 1 << 20
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 8000000\r\n\r\n"
    small_reader, small = await _connect(served[1])
    small.write(head + b" " * 1000)
    reader, large = await _connect(served[1])
    large.write(head + b" " * (2 << 20))
    assert b" 503 " in await reader.readline()
    assert (await served[1].http.post(CHAT, json=SAY)).status_code == 200
    assert not small_reader.at_eof()
    small.close()
    large.close()


async def test_caller_who_does_not_read_costs_others_nothing() -> None:
    worker = FakeWorker(FILES, step_s=0.0, tokens_per_step=64, max_model_len=100_000)
    async with bench(worker, max_unread_tokens=20_000) as router, facade_of([router.router.server.address]) as http:
        host, port = http.facade.address.rsplit(":", 1)
        lazy = socket.create_connection((host, int(port)))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(SAY | {"stream": True, "max_tokens": 90_000}).encode()
        lazy.sendall(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
        await until(lambda: router.router.service.in_flight == 1)
        whole = await http.openai.chat.completions.create(**SAY | {"max_tokens": 50})
        assert whole.choices[0].finish_reason == "length"
        # The router ends a stream with so much unread.
        await until(lambda: router.router.service.in_flight == 0)
        lazy.close()
        await until(lambda: http.facade.runner.in_flight == 0)


async def test_drain_finishes_streams_and_refuses_health() -> None:
    worker = FakeWorker(FILES, step_s=0.01)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        chunks: list[Any] = []

        async def read() -> None:
            stream = await http.openai.chat.completions.create(**SAY | {"max_tokens": 60}, stream=True)
            await _append(stream, chunks)

        reading = asyncio.ensure_future(read())
        await until(lambda: chunks)
        draining = asyncio.ensure_future(http.facade.drain())
        await until(lambda: http.facade.app.health.is_ending)
        await reading
        assert chunks[-1].choices[0].finish_reason == "length"
        await draining


async def test_stopped_facade_ends_streams_with_an_error_event() -> None:
    worker = FakeWorker(FILES, step_s=0.01)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        chunks: list[Any] = []

        async def read() -> None:
            stream = await http.openai.chat.completions.create(**SAY | {"max_tokens": 4000}, stream=True)
            await _append(stream, chunks)

        reading = asyncio.ensure_future(read())
        await until(lambda: chunks)
        await http.facade.stop()
        with pytest.raises(openai.APIError) as caught:
            await reading
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["code"] == "server_ending"
        await router.empty()


def _has_grown(texts: list[str], least: int) -> bool:
    return sum(map(len, texts)) > least


async def _append(stream: Any, chunks: list[Any]) -> None:
    """Reads a stream; a list comprehension would show no chunk before the end."""
    while (chunk := await anext(aiter(stream), None)) is not None:
        chunks.append(chunk)


async def _connect(http: HttpBench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = http.facade.address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))
