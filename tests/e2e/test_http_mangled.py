"""Mangled HTTP requests of every endpoint: a status below 500 in the form of the door, and honest streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.constraints.library import ENGINE
from common.text.tokenizer import Tokenizer
from facade import server
from facade.anthropic.messages import MessagesBody
from facade.http import uploads
from facade.http.exchange import TIMEOUT_HEADERS
from facade.openai.chat import ChatBody
from facade.openai.completions import CompletionBody
from facade.openai.models import DetokenizeBody, TokenizeBody
from facade.openai.responses import ResponsesBody
from facade.openai.vectors import EmbeddingBody, RerankBody
from tests.e2e.facade_process import facade_process
from tests.e2e.fake_worker import FakeWorker, letters
from tests.e2e.http_bench import facade_of
from tests.e2e.service import Process, free_port, running
from tests.mangled_http import GOOD, GOOD_GETS, MARK, HttpCase, HttpMangler, request_bytes
from tests.unit.router.support import EOS, tool_files

AT_ONCE = 16
# Peak of the facade's memory, with bodies of 17 MiB among the requests.
MOST_MIB = 400
FILES = tool_files()
TOKENIZER = Tokenizer.from_files(FILES)
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
NOT_OF_BODIES = {"body", "headers", "x-fissile-tenant", *TIMEOUT_HEADERS}
# Codes that tell of a wrong field.
NAMES_A_FIELD = {"invalid_value", "unsupported_parameter"}
# Messages and fields of fissile.v1, which no caller of HTTP knows.
OF_GRPC = re.compile(r"sampling_params|output_options|parameters_json|arguments_json|token_ids\.ids|session_id")
HONEST: Any = {"model": "m", "messages": [{"role": "user", "content": "honest"}], "max_tokens": 600, "stream": True}


def answer(submitted: wpb.SubmitSequence) -> list[int]:
    """Endless letters for honest requests, a word for others."""
    is_honest = "honest" in TOKENIZER.decode(list(submitted.token_ids))
    return letters(submitted) if is_honest else [*TOKENIZER.encode("hello"), EOS]


class Wire(asyncio.Protocol):
    """A connection that keeps all bytes it gets."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class _Received(io.BytesIO):
    """The bytes of a connection as `http.client` reads those of a socket."""

    def makefile(self, _: str) -> _Received:
        return self

    def close(self) -> None:
        """Stays open for the next response."""


async def responses_to(address: str, case: HttpCase) -> list[tuple[int, str, bytes]]:
    """Status, media type and body of each response on the connection, when the server has closed it."""
    host, _, port = address.rpartition(":")
    transport, wire = await asyncio.get_running_loop().create_connection(Wire, host, int(port))
    try:
        for piece in case.pieces:
            transport.write(piece)
            await asyncio.sleep(0)
        if case.ends:
            with contextlib.suppress(OSError):
                transport.write_eof()
        async with asyncio.timeout(60):
            await wire.closed
    finally:
        transport.abort()
    return parsed(bytes(wire.received), "HEAD" if case.pieces[0].startswith(b"HEAD ") else "POST")


def parsed(data: bytes, method: str) -> list[tuple[int, str, bytes]]:
    """The responses among bytes; one that is cut raises."""
    stream, found = _Received(data), []
    while stream.tell() < len(data):
        response = http.client.HTTPResponse(stream, method=method)  # type: ignore[arg-type]
        response.begin()
        found.append((response.status, response.getheader("content-type", ""), response.read()))
    return found


def problem_with(case: HttpCase, status: int, media_type: str, body: bytes) -> str:
    """What is wrong about a response; "" for nothing."""
    if not (200 <= status < 300 or 400 <= status < 500):
        return f"status {status}"
    if status < 300:
        return "an error in the stream" if b'"error":' in body and b'"error":null' not in body else ""
    if not body and case.kind == "method":
        return ""
    if media_type != "application/json":
        return f"status {status} with {media_type}"
    try:
        said = json.loads(body)
    except ValueError:
        return "no JSON"
    return problem_with_error(case, said)


def problem_with_error(case: HttpCase, said: Any) -> str:
    """What is wrong about the body of a refusal; "" for nothing."""
    error = said.get("error", {})
    # What is no HTTP has no path, and so OpenAI's form.
    if case.path in ANTHROPIC and (case.body is not None or "type" in said):
        if said.keys() != {"type", "error"} or said["type"] != "error" or error.keys() != {"type", "message"}:
            return "not in Anthropic's form"
    elif said.keys() != {"error"} or error.keys() != {"message", "type", "param", "code"}:
        return "not in OpenAI's form"
    elif error["code"] in NAMES_A_FIELD and not is_field(case, error["param"]):
        return f"param {error['param']!r} is no field"
    if not error["type"] or not error["message"]:
        return "no type or no message"
    return f"{error['message']!r} names a field of gRPC" if OF_GRPC.search(error["message"]) else ""


def is_field(case: HttpCase, param: str | None) -> bool:
    """True if a path begins with a field of the endpoint, one of the body, or a header."""
    if not param:
        return False
    known = {*NOT_OF_BODIES, '""'}
    if not case.path:
        return True
    if case.path in BODIES:
        known |= {field.encode_name for field in msgspec.structs.fields(BODIES[case.path])}
    if (case.body or b"").startswith(b'{"a":{"a":'):
        known.add("a")
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        known |= {key[:128] for key in json.loads(case.body or b"")}
    return param in known or re.split(r"[.\[]", param)[0] in known


@contextlib.asynccontextmanager
async def service(folder: Path) -> AsyncIterator[tuple[Process, Process]]:
    """A router and a facade as processes, in front of a scripted worker."""
    description = {
        "vocab_size": 304,
        "grammar_engine": ENGINE,
        "eos_token_ids": [EOS],
        "features": ["embed"],
        "hidden_size": 3,
        "default_pooling": wpb.POOLING_LAST,
    }
    worker = FakeWorker(FILES, answer=answer, step_s=0.001, tokens_per_step=16, description=description)
    router_port = free_port()
    arguments = ["router", "--port", str(router_port), "--worker", await worker.start()]
    router = Process("router", arguments, router_port, folder / "router.log", {"FISSILE_LOG_FORMAT": "json"})
    facade = facade_process([router.address], folder, {"FISSILE_LOG_FORMAT": "json"})
    processes = running([router, facade])
    try:
        await asyncio.to_thread(processes.__enter__)
        yield router, facade
    finally:
        await asyncio.to_thread(processes.__exit__, None, None, None)
        await worker.stop()


async def honest(client: httpx2.AsyncClient) -> str:
    """The text of an honest stream."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=HONEST) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text


def peak_mib(process: Process) -> float:
    """The most resident memory that a process has had."""
    status = Path(f"/proc/{process.running.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def errors_of(log: str) -> Sequence[str]:
    """Lines of a log that tell of a fault, or that are no event."""
    entries = [json.loads(line) if line.startswith("{") else {"level": line} for line in log.splitlines()]
    return [str(entry) for entry in entries if entry["level"] not in ("debug", "info", "warning")]


async def mangle(folder: Path, seed: int, count: int) -> Counter[str]:
    """Sends mangled requests, many at once, beside honest streams; responses by kind and status."""
    mangler, seen, problems = HttpMangler(random.Random(seed)), Counter[str](), dict[str, str]()
    async with service(folder) as (router, facade), httpx2.AsyncClient(timeout=60.0) as client:
        client.base_url = httpx2.URL(f"http://{facade.address}")
        expected = await honest(client)
        assert expected
        limit, texts = asyncio.Semaphore(AT_ONCE), list[str]()

        async def send(case: HttpCase) -> None:
            async with limit:
                try:
                    responses = await responses_to(facade.address, case)
                except Exception as error:
                    problems[f"{case.kind} {case.path}: {error!r}"] = repr(b"".join(case.pieces)[:900])
                    return
            found = [problem_with(case, *each) for each in responses]
            if len(responses) < case.num_responses:
                found.append(f"{len(responses)} responses")
            seen.update(f"{case.kind} {status}" for status, _, _ in responses)
            for problem in filter(None, found):
                said = [(status, body[:300]) for status, _, body in responses]
                problems[f"{case.kind} {case.path}: {problem}"] = (
                    f"{said}\n{(case.body or b''.join(case.pieces))[:900]!r}"
                )

        async def stream_until(done: asyncio.Event) -> None:
            while not done.is_set():
                texts.append(await honest(client))

        # Heads that never end are held open all the while.
        held = [await asyncio.open_connection("127.0.0.1", facade.port) for _ in range(20)]
        for _, writer in held:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-slow: ")
        done = asyncio.Event()
        async with asyncio.TaskGroup() as beside:
            beside.create_task(stream_until(done))
            async with asyncio.TaskGroup() as calls:
                for _ in range(count):
                    calls.create_task(send(mangler.next()))
            done.set()
        for _, writer in held:
            writer.close()
        assert not problems, f"seed {seed}:\n" + "\n".join(f"{what}\n{case}" for what, case in problems.items())
        assert {*texts} == {expected}
        await assert_good_requests_succeed(client)
        assert peak_mib(facade) < MOST_MIB
        logs = [process.log.read_text() for process in (router, facade)]
    for log in logs:
        assert MARK not in log
        assert "Traceback" not in log
        assert not errors_of(log)
    return seen


async def assert_good_requests_succeed(client: httpx2.AsyncClient) -> None:
    for path, body in GOOD.items():
        response = await client.post(path, json=body)
        # A scripted worker has no logprobs, which rerankers need.
        expected = 400 if path == "/v1/rerank" else 200
        assert (path, response.status_code) == (path, expected), response.text
    for path in GOOD_GETS:
        assert (await client.get(path)).status_code == 200


async def test_mangled_http_requests_get_status_below_500_in_form_of_door(tmp_path: Path) -> None:
    seen = await mangle(tmp_path, 1, 200)
    # The draws reach what they are for.
    statuses = Counter(each.rpartition(" ")[2] for each in seen.elements())
    assert min(statuses[status] for status in ("200", "400", "404", "405")) > 2, statuses


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_5000_mangled_http_requests_get_status_below_500(tmp_path: Path) -> None:
    await mangle(tmp_path, 2, 5000)


async def test_head_that_does_not_end_closes_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with facade_of(["127.0.0.1:1"]) as facade:
        for head in (b"", b"P", b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"):
            assert await responses_to(facade.facade.address, HttpCase("slow", "", [head])) == []


async def test_body_that_does_not_end_is_status_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "REQUEST_READ_TIMEOUT_S", 0.1)
    async with facade_of(["127.0.0.1:1"]) as facade:
        for path in ("/v1/messages", "/v1/chat/completions"):
            case = HttpCase("slow", path, [request_bytes(path, b"{" * 20)[:-5]])
            ((status, media_type, body),) = await responses_to(facade.facade.address, case)
            assert (status, problem_with(case, status, media_type, body)) == (408, "")
