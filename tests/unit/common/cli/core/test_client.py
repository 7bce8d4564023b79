"""Output and exit codes of client commands, against a real gRPC server with scripted answers."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.client import AsyncClient
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status

from common.cli.client.models import as_table, list_models
from common.cli.core.client import CommandAnswer, Credentials, Question, ask, client_arguments, printable
from common.cli.core.errors import CommandError
from common.errors import (
    ApiError,
    DeadlineError,
    EngineError,
    InvalidFieldError,
    NoWorkerError,
    QueueFullError,
    UnknownModelError,
    WorkerLostError,
)
from common.rpc.server import GrpcServer
from common.rpc.tls import ClientTls, ServerTls
from tests.certificates import LOOPBACK, Authority
from tests.scripted_router import PartialRouter

FINISH = pb.Finish(
    reason=pb.FINISH_REASON_LENGTH,
    usage=pb.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2),
    timings=pb.Timings(ttft=Duration(nanos=12_300_000), tpot=Duration(nanos=4_560_000)),
    worker_id="worker-0",
    attempts=1,
    exact=True,
)
MODEL = pb.Model(
    name="demo", architecture="Qwen3ForCausalLM", max_model_len=512, vocab_size=1024, capabilities=[pb.CAPABILITY_CHAT]
)


class ScriptedRouter(PartialRouter):
    """Streams `pieces`, then ends with `error` or a finish; records its requests."""

    def __init__(self, pieces: list[str], error: ApiError | None) -> None:
        self.pieces = pieces
        self.error = error
        self.requests: list[pb.GenerateRequest | pb.ChatRequest] = []
        self.sent: set[str] = set()
        self.traceresponse = ""

    async def _stream(self, kind: Callable[..., Any], request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.sent = {name for name, _ in context.invocation_metadata()}
        if self.traceresponse:
            context.set_trailing_metadata((("traceresponse", self.traceresponse),))
        for piece in self.pieces:
            text = {"delta": pb.ChatDelta(content=piece)} if kind is pb.ChatResponse else {"text": piece}
            yield kind(request_id="r1", **text)
        if self.error is not None:
            await context.abort_with_status(rpc_status.to_status(self.error.to_status()))
        yield kind(request_id="r1", finish=FINISH)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for part in self._stream(pb.GenerateResponse, request, context):
            yield part

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.ChatResponse]:
        async for part in self._stream(pb.ChatResponse, request, context):
            yield part

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=MODEL)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[MODEL])


async def serve(router: ScriptedRouter) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def asked(router: ScriptedRouter, question: Question) -> tuple[CommandAnswer, str]:
    """The answer and the streamed text."""
    server, address = await serve(router)
    streamed: list[str] = []
    try:
        async with AsyncClient(**client_arguments([address])) as client:
            return await ask(client, question, 60.0, streamed.append), "".join(streamed)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("trace_id", ["", "7" * 32])
async def test_streams_an_answer_and_names_its_trace_or_its_request(trace_id: str) -> None:
    """The client starts no trace if no exporter records its root; it prints the router's trace."""
    router = ScriptedRouter(["Once ", "upon"], None)
    router.traceresponse = f"00-{trace_id}-{'1' * 16}-01" if trace_id else ""
    answer, streamed = await asked(router, Question("hi", chat=False, request_id="r1", sampling={"seed": 7}))
    assert answer.text == streamed == "Once upon"
    request = router.requests[0]
    assert isinstance(request, pb.GenerateRequest)
    assert (request.text, request.sampling_params) == ("hi", pb.SamplingParams(seed=7))
    assert "traceparent" not in router.sent
    assert answer.trace_id == trace_id
    named = f"trace {trace_id}" if trace_id else "request r1"
    assert answer.figures() == f"TTFT 12.3 ms, 4.56 ms per token, 3 tokens from 5 (2 cached), length, {named}"


def test_json_answer_has_draft_counts_only_with_drafts() -> None:
    drafts = [pb.DraftCounts(verified=9, accepted=7), pb.DraftCounts(verified=7, accepted=2)]
    assert CommandAnswer(finish=pb.Finish(drafts=drafts)).as_dict()["drafts"] == [
        {"verified": 9, "accepted": 7},
        {"verified": 7, "accepted": 2},
    ]
    assert "drafts" not in CommandAnswer().as_dict()


async def test_ask_uses_chat_for_model_with_template() -> None:
    router = ScriptedRouter(["x"], None)
    await asked(router, Question("hi", system="Be brief."))
    request = router.requests[0]
    assert isinstance(request, pb.ChatRequest)
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief."), ("user", "hi")]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (InvalidFieldError("model", "is odd", "even"), 2),
        (UnknownModelError("x", ["demo"]), 2),
        (NoWorkerError("no worker serves"), 3),
        (QueueFullError(4, 1.0), 3),
        (EngineError("it broke"), 1),
        (DeadlineError("in the queue"), 1),
    ],
)
async def test_failed_call_is_one_line_with_an_exit_code(error: ApiError, exit_code: int) -> None:
    with pytest.raises(CommandError) as failed:
        await asked(ScriptedRouter([], error), Question("hi", chat=False))
    assert str(failed.value) == f"{error.code.name}: {error.message}"
    assert failed.value.exit_code == exit_code


async def test_broken_answer_error_says_text_is_partial() -> None:
    with pytest.raises(CommandError, match=r"INTERNAL: it broke \(the text so far is partial\)"):
        await asked(ScriptedRouter(["Once"], EngineError("it broke")), Question("hi", chat=False))
    with pytest.raises(CommandError) as failed:
        await asked(ScriptedRouter(["Once"], WorkerLostError("w", 1)), Question("hi", chat=False))
    assert str(failed.value).count("partial") == 1


async def test_unreachable_router_is_named_with_exit_code_3() -> None:
    with pytest.raises(CommandError, match=r"no router can be reached at 127\.0\.0\.1:1 \(Connection refused\)") as it:
        async with AsyncClient(**client_arguments(["127.0.0.1:1"])) as client:
            await ask(client, Question("hi"), 60.0, print)
    assert it.value.exit_code == 3


@pytest.mark.parametrize("key", ["fk_abc\n", "fk_\u00fc"])
def test_unsendable_api_key_is_refused(key: str) -> None:
    with pytest.raises(CommandError, match="the API key has a character that no key has, such as a line break"):
        Credentials(api_key=key)


async def test_call_timeout_error_names_option() -> None:
    """Also if the router sends no status, where the text would be gRPC's."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(**client_arguments([address])) as client:
            with pytest.raises(CommandError) as failed:
                await ask(client, Question("hi"), 0.05, print)
    assert str(failed.value) == f"DEADLINE_EXCEEDED: {address} has not answered in time (--timeout)"


async def test_unimplemented_call_error_names_wrong_port() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(**client_arguments([address])) as client:
        with pytest.raises(CommandError, match=f"UNIMPLEMENTED: {address} does not know this call; it is the port of"):
            await ask(client, Question("hi"), 60, print)
    await server.stop(None)


async def test_models_as_a_table() -> None:
    server, address = await serve(ScriptedRouter([], None))
    table = as_table(await list_models(address, 60.0))
    await server.stop(None)
    heading, row = table.splitlines()
    assert heading.split()[:4] == ["MODEL", "ARCHITECTURE", "LENGTH", "VOCABULARY"]
    assert row.split() == ["demo", "Qwen3ForCausalLM", "512", "1024", "chat", "0"]


def test_empty_model_list_prints_no_table() -> None:
    with pytest.raises(CommandError, match="no worker has come up") as it:
        as_table([])
    assert it.value.exit_code == 3


async def generated(router: ScriptedRouter, *arguments: str) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of `fissile generate`."""
    server, address = await serve(router)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "common.cli.main", "generate", "hi", "--text", "--address", address, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    await server.stop(None)
    return process.returncode, out.decode(), err.decode()


async def test_generate_prints_the_answer_and_its_figures_apart() -> None:
    code, out, err = await generated(ScriptedRouter(["Once ", "upon"], None))
    assert (code, out) == (0, "Once upon\n")
    assert err.startswith("TTFT 12.3 ms, ")


async def test_generate_prints_one_json_object() -> None:
    code, out, err = await generated(ScriptedRouter(["Once ", "upon"], None), "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert (answer["text"], answer["finish_reason"], answer["usage"]["cached_tokens"]) == ("Once upon", "length", 2)
    assert answer["timings_ms"]["ttft"] == 12.3


async def test_generate_ends_the_line_of_a_partial_answer() -> None:
    code, out, err = await generated(ScriptedRouter(["Once"], EngineError("it broke")))
    assert (code, out, err) == (1, "Once\n", "error: INTERNAL: it broke (the text so far is partial)\n")


def test_answer_on_terminal_has_no_control_sequences() -> None:
    assert printable("a\x1b[2Jb\n\tc\x9bd", terminal=True) == "a\\x1b[2Jb\n\tc\\x9bd"
    assert printable("a\x1b[2Jb", terminal=False) == "a\x1b[2Jb"


async def test_tls_failure_error_says_cause(tmp_path: Path) -> None:
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair, old = ca.issue("server", *LOOPBACK), ca.issue("old", *LOOPBACK, days=(-2, -1))
    servers = {
        "new": GrpcServer("127.0.0.1", 0, [], tls=ServerTls(pair.cert, pair.key, other.cert)),
        "old": GrpcServer("127.0.0.1", 0, [], tls=ServerTls(old.cert, old.key)),
        "plain": GrpcServer("127.0.0.1", 0, []),
    }
    for server in servers.values():
        await server.start()
    for name, tls, said in [
        ("new", ClientTls(other.cert), "(its certificate is of another CA); --tls-ca names the right one"),
        ("new", ClientTls(ca.cert, name="x"), "(its certificate has another name); --tls-name says which it must have"),
        ("new", None, "(it closes the connection); it may want TLS (--tls-ca) or a certificate (--client-cert)"),
        ("old", ClientTls(ca.cert), "(its certificate has expired); renew it"),
        ("plain", ClientTls(ca.cert), "(it speaks plain text); leave --tls and --tls-ca away"),
    ]:
        with pytest.raises(CommandError) as caught:
            await list_models(servers[name].address, 60.0, Credentials(tls))
        assert str(caught.value) == f"no router can be reached at {servers[name].address} {said}"
    for server in servers.values():
        await server.stop(0)
