"""Logprobs through router and worker: one entry per token, whatever becomes of the stream, its worker or its client."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.client import Client
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2

from common.errors import DOMAIN
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, TOKENIZER, bench, detail, error_of
from tests.e2e.router_bench import request as text_request
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import simulated_model, wait_workers
from tests.e2e.test_chat import command

PROMPT = [*range(7, 107)]
SLOW = ["--simulate", "fixed:4ms", "--max-num-batched-tokens", "64"]


def request(
    prompt: list[int] = PROMPT, *, max_tokens: int = 30, options: dict[str, Any] | None = None, **params: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
        output_options=pb.OutputOptions(return_token_ids=True, **(options or {"logprobs": 2})),
    )


def logprobs_of(parts: list[Any], index: int = 0) -> list[pb.TokenLogprobs]:
    return [entry for part in parts if part.index == index for entry in part.logprobs]


def prompt_logprobs_of(parts: list[Any]) -> list[pb.TokenLogprobs]:
    return [entry for part in parts for entry in part.prompt_logprobs]


def tokens_of(parts: list[Any], index: int = 0) -> list[int]:
    return [token for part in parts if part.index == index for token in part.token_ids]


def check(parts: list[Any], index: int = 0) -> None:
    """Each message has the logprobs of its tokens, and the finish their sum."""
    mine = [part for part in parts if part.index == index]
    for part in mine:
        assert [entry.token_id for entry in part.logprobs] == list(part.token_ids)
        assert not (part.prompt_logprobs and part.text)
    total = 0.0
    for entry in logprobs_of(parts, index):
        total += entry.logprob
    assert mine[-1].finish.logprob == total


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("simulated")
    with running_service(folder, simulated_model(folder / "model"), worker_options=SLOW) as service:
        yield service


@pytest.mark.proto_field(
    "OutputOptions.logprobs",
    "OutputOptions.logprob_token_ids",
    "GenerateResponse.logprobs",
    "TokenLogprobs.token_id",
    "Finish.logprob",
)
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_stream_resumes_after_each_message(simulated: Service, prompt_logprobs: int | None) -> None:
    options: dict[str, Any] = {"logprobs": 2, "logprob_token_ids": [5]}
    if prompt_logprobs is not None:
        options |= {"prompt_logprobs": prompt_logprobs, "prompt_logprobs_start": 40}
    asked = request(options=options)
    whole = list(simulated.stub.Generate(asked, timeout=60))
    check(whole)
    assert len(logprobs_of(whole)) == 30
    given = prompt_logprobs_of(whole)
    assert [entry.token_id for entry in given] == (PROMPT[40:] if prompt_logprobs is not None else [])
    assert all(len(entry.top) == 2 and len(entry.given) == 1 for entry in logprobs_of(whole))
    for count in range(1, len(whole), 7):
        again = request(options=options)
        again.resume.numerics = whole[0].prompt_info.numerics
        if ids := tokens_of(whole[:count]):
            again.resume.answers.add(token_ids=pb.TokenIds(ids=ids))
        rest = list(simulated.stub.Generate(again, timeout=60))
        assert logprobs_of(whole[:count]) + logprobs_of(rest) == logprobs_of(whole)
        assert rest[-1].finish.logprob == whole[-1].finish.logprob
        assert prompt_logprobs_of(rest) == ([] if ids else given)


@pytest.mark.proto_field("OutputOptions.token_bytes", "TokenLogprobs.token_bytes", "TopLogprob.token_bytes")
def test_token_bytes_join_to_text_and_need_option(simulated: Service) -> None:
    prompt = [*TOKENIZER.encode("say é")]
    options = {"logprobs": 2, "prompt_logprobs": 0, "token_bytes": True}
    parts = list(simulated.stub.Generate(request(prompt, options=options), timeout=60))
    assert b"".join(entry.token_bytes for entry in prompt_logprobs_of(parts)) == "say é".encode()[1:]
    for entry in logprobs_of(parts):
        assert entry.token_bytes == TOKENIZER.pieces.inner(entry.token_id)
        assert all(top.token_bytes == TOKENIZER.pieces.inner(top.token_id) for top in entry.top)
    assert any(entry.token_bytes for entry in logprobs_of(parts))
    plain = logprobs_of(list(simulated.stub.Generate(request(prompt), timeout=60)))
    assert not any(entry.token_bytes or any(top.token_bytes for top in entry.top) for entry in plain)
    for entry in (given := logprobs_of(parts)):
        entry.token_bytes = b""
        for top in entry.top:
            top.token_bytes = b""
    assert given == plain


def text_of(parts: list[Any]) -> str:
    return "".join(part.text for part in parts)


@pytest.mark.proto_field("TextDigest.tokens")
def test_stream_resumes_after_text_and_token_count(simulated: Service) -> None:
    whole = list(simulated.stub.Generate(request(), timeout=60))
    for count in range(2, len(whole), 5):
        data = text_of(whole[:count]).encode()
        again = request()
        again.resume.numerics = whole[0].prompt_info.numerics
        num_tokens = len(tokens_of(whole[:count]))
        digest = pb.TextDigest(bytes=len(data), sha256=hashlib.sha256(data).digest(), tokens=num_tokens)
        again.resume.answers.add(text=digest)
        rest = list(simulated.stub.Generate(again, timeout=60))
        assert logprobs_of(whole[:count]) + logprobs_of(rest) == logprobs_of(whole)
        assert tokens_of(whole[:count]) + tokens_of(rest) == tokens_of(whole)
        assert text_of(whole[:count]) + text_of(rest) == text_of(whole)
        assert rest[-1].finish.logprob == whole[-1].finish.logprob
        # Few tokens have less text, many have more, and 31 are too many. One more or less may have the same.
        for tokens in (num_tokens // 2, num_tokens + 5, 31):
            if abs(tokens - num_tokens) < 5 and tokens <= 30:
                continue
            again.resume.answers[0].text.tokens = tokens
            with pytest.raises(grpc.RpcError) as caught:
                list(simulated.stub.Generate(again, timeout=60))
            refused = tokens > 30
            wanted = grpc.StatusCode.INVALID_ARGUMENT if refused else grpc.StatusCode.DATA_LOSS
            assert caught.value.code() is wanted


def test_stream_resumes_after_tokens_without_text(simulated: Service) -> None:
    """Former fault: after tokens without text, a client could resume only if it had their ids."""
    found = 0
    for seed in range(40):
        asked = request([seed + 1, 5, 9], max_tokens=8)
        asked.sampling_params.seed = seed
        whole = list(simulated.stub.Generate(asked, timeout=60))
        count = next((i for i in range(len(whole)) if tokens_of(whole[:i]) and not text_of(whole[:i])), 0)
        if not count:
            continue
        found += 1
        again = pb.GenerateRequest.FromString(asked.SerializeToString())
        again.resume.numerics = whole[0].prompt_info.numerics
        digest = pb.TextDigest(sha256=hashlib.sha256().digest(), tokens=len(tokens_of(whole[:count])))
        again.resume.answers.add(text=digest)
        rest = list(simulated.stub.Generate(again, timeout=60))
        assert tokens_of(whole[:count]) + tokens_of(rest) == tokens_of(whole)
        assert text_of(rest) == text_of(whole)
        # The tokens of the whole answer have text, and no text has only one digest.
        for wrong, code in (
            (pb.TextDigest(sha256=digest.sha256, tokens=len(tokens_of(whole)) - 1), grpc.StatusCode.DATA_LOSS),
            (pb.TextDigest(sha256=bytes(32), tokens=digest.tokens), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.TextDigest(sha256=digest.sha256), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            again.resume.answers[0].text.CopyFrom(wrong)
            with pytest.raises(grpc.RpcError) as caught:
                list(simulated.stub.Generate(again, timeout=60))
            assert caught.value.code() is code
    assert found


@pytest.mark.proto_field(
    "GenerateResponse.prompt_logprobs", "GeneratedText.logprobs", "GenerateOnceResponse.prompt_logprobs"
)
def test_long_prompts_and_several_answers(simulated: Service) -> None:
    """More logprobs than a message can hold come in several messages; those of the prompt once, before any text."""
    prompt = [i % 250 for i in range(1500)]
    asked = request(prompt, max_tokens=5, n=3, options={"logprobs": 0, "prompt_logprobs": 3})
    parts = list(simulated.stub.Generate(asked, timeout=60))
    given = prompt_logprobs_of(parts)
    assert [entry.token_id for entry in given] == prompt[1:]
    of_prompt = [i for i, part in enumerate(parts) if part.prompt_logprobs]
    assert len(of_prompt) > 1
    assert of_prompt == [*range(len(of_prompt))]
    for index in range(3):
        check(parts, index)
        assert len(logprobs_of(parts, index)) == 5
    once = simulated.stub.GenerateOnce(asked, timeout=60)
    assert list(once.prompt_logprobs) == given
    assert [list(answer.logprobs) for answer in once.answers] == [logprobs_of(parts, index) for index in range(3)]


@pytest.mark.proto_field(
    "ChatResponse.logprobs",
    "ChatResponse.prompt_logprobs",
    "ChatAnswer.logprobs",
    "ChatOnceResponse.prompt_logprobs",
)
def test_chat_returns_logprobs(simulated: Service) -> None:
    said = pb.ChatMessage(role="user", content="hello")
    asked = pb.ChatRequest(request_id="r", messages=[said], sampling_params=pb.SamplingParams(max_tokens=9))
    asked.sampling_params.ignore_eos = True
    asked.output_options.CopyFrom(pb.OutputOptions(logprobs=1, prompt_logprobs=0, return_token_ids=True))
    parts = list(simulated.stub.Chat(asked, timeout=60))
    for part in parts:
        assert [entry.token_id for entry in part.logprobs] == list(part.token_ids)
    rendered = simulated.stub.RenderPrompt(pb.RenderPromptRequest(chat=asked), timeout=60).token_ids
    assert [entry.token_id for entry in prompt_logprobs_of(parts)] == list(rendered)[1:]
    once = simulated.stub.ChatOnce(asked, timeout=60)
    assert list(once.answers[0].logprobs) == logprobs_of(parts)
    assert list(once.prompt_logprobs) == prompt_logprobs_of(parts)


def test_echoed_prompt_has_no_logprobs(simulated: Service) -> None:
    """Ids of the prompt come with the first generated ones, and a stream resumes by the ids that logprobs name."""
    asked = request(options={"logprobs": 0, "echo": True})
    whole = list(simulated.stub.Generate(asked, timeout=60))
    assert tokens_of(whole) == PROMPT + [entry.token_id for entry in logprobs_of(whole)]
    asked.output_options.return_token_ids = False
    asked.resume.numerics = whole[0].prompt_info.numerics
    asked.resume.answers.add(token_ids=pb.TokenIds(ids=tokens_of(whole)[len(PROMPT) : -10]))
    rest = list(simulated.stub.Generate(asked, timeout=60))
    assert logprobs_of(rest) == logprobs_of(whole)[-10:]
    assert rest[-1].finish.logprob == whole[-1].finish.logprob


def test_client_library_returns_logprobs(simulated: Service) -> None:
    options = pb.OutputOptions(logprobs=1, prompt_logprobs=0)
    with Client(simulated.router.address) as client:
        result = client.generate(PROMPT, max_tokens=8, ignore_eos=True, request_id="r", output_options=options)
        assert [entry.token_id for entry in result.prompt_logprobs] == PROMPT[1:]
        (answer,) = result.answers
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        assert result.finish.logprob == sum(entry.logprob for entry in answer.logprobs)


def test_lost_worker_changes_no_logprob(tmp_path: Path) -> None:
    options = {"logprobs": 3, "prompt_logprobs": 1, "logprob_token_ids": [9]}
    asked = request(max_tokens=300, options=options)
    model = simulated_model(tmp_path / "model")
    with running_service(tmp_path, model, workers=2, worker_options=SLOW) as service:
        wait_workers(service, 2)
        expected = list(service.stub.Generate(asked, timeout=60))
        busy: list[int] = []
        # On a busy machine the stream may have ended before its worker is found.
        while not busy:
            call = service.stub.Generate(asked, timeout=60)
            parts = [next(call)]
            while not parts[-1].token_ids:
                parts.append(next(call))
            busy = [i for i in range(2) if service.worker_load(i).decoding_seqs]
            if busy:
                service.workers[busy[0]].stop(signal.SIGKILL)
            parts += list(call)
        check(parts)
        assert logprobs_of(parts) == logprobs_of(expected)
        assert prompt_logprobs_of(parts) == prompt_logprobs_of(expected)
        assert parts[-1].finish.exact
        assert parts[-1].finish.attempts == 2


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("logprob_token_ids", {"logprob_token_ids": [1]}),
        ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [1] * 129}),
        ("logprob_token_ids[0]", {"logprobs": 1, "logprob_token_ids": [300]}),
        ("logprobs_kind", {"logprobs_kind": pb.LOGPROBS_KIND_PROCESSED}),
        ("prompt_logprobs_start", {"prompt_logprobs_start": 2}),
        ("prompt_logprobs_start", {"prompt_logprobs": 0, "prompt_logprobs_start": 0}),
        ("prompt_logprobs_start", {"prompt_logprobs": 0, "prompt_logprobs_start": 101}),
    ],
)
def test_bad_options_are_named(simulated: Service, path: str, options: dict[str, Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(simulated.stub.Generate(request(options=options), timeout=60))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"output_options.{path}" in str(error.details())


async def test_workers_without_logprobs_are_named() -> None:
    """Workers of an older version lack the capability, and requests for logprobs are refused."""
    async with bench(FakeWorker(FILES)) as b:
        described = (await b.stub.GetModel(pb.GetModelRequest())).model
        assert pb.CAPABILITY_LOGPROBS not in described.capabilities
        for name in ("logprobs", "prompt_logprobs"):
            options = pb.OutputOptions()
            setattr(options, name, 0)
            error = await error_of(b.stub.Generate(text_request(output_options=options)))
            violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
            assert violation.field == f"output_options.{name}"
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert detail(error, error_details_pb2.ErrorInfo).domain == DOMAIN
            assert "workers of model" in str(error.details())
    claims = FakeWorker(FILES, description={"features": ["logprobs"]})
    async with bench(claims) as b:
        error = await error_of(b.stub.Generate(text_request(output_options=pb.OutputOptions(logprobs=0))))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "sends no logprobs" in str(error.details())
        await b.empty()


async def test_resume_by_text_with_logprobs_needs_token_count() -> None:
    async with bench(FakeWorker(FILES, description={"features": ["logprobs"]})) as b:
        asked = text_request(request_id="r")
        asked.output_options.CopyFrom(pb.OutputOptions(logprobs=0))
        point = asked.resume.answers.add()
        point.text.bytes, point.text.sha256 = 1, bytes(32)
        for beside, tokens, problem in ((True, 0, "is 0 beside logprobs"), (False, 3, "is 3")):
            asked.output_options.CopyFrom(pb.OutputOptions(logprobs=0) if beside else pb.OutputOptions())
            point.text.tokens = tokens
            error = await error_of(b.stub.Generate(asked))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
            assert violation.field == "resume.answers[0].text.tokens"
            assert problem in violation.description


def test_generate_and_chat_with_logprobs_show_them(simulated: Service) -> None:
    """Former fault: both commands ended with a traceback, because the client library had no argument `logprobs`."""
    options = ["--address", simulated.router.address, "--max-tokens", "5", "--logprobs", "2"]
    for arguments in (["generate", *options, "--logprobs-kind", "processed", "hi"], ["chat", *options]):
        code, _, err = asyncio.run(command(*arguments, text="hi\n"))
        assert code == 0, err
        heading, *rows = [line for line in err.splitlines() if line.startswith(" ")]
        assert heading.split()[:3] == ["answer", "token", "logprob"]
        assert len(rows) == 5
