"""The public contract beyond one stream: answers in one message, several answers, and what operators see of them."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1 import errors_pb2
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.rpc.durations import to_seconds
from router.api.answer_writer import USAGE_METADATA
from router.api.tenants import TenantPolicy
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import (
    FILES,
    SMALL_WINDOW,
    TOKENIZER,
    Bench,
    bench,
    collect,
    detail,
    details_of,
    error_of,
    request,
    until,
)
from tests.unit.router.support import EOS

ROOT = Path(__file__).resolve().parents[2]


OF_CHOICES = [TOKENIZER.encode("abcdefgh"[: i + 1]) for i in range(8)]


def by_choice(submitted: wpb.SubmitSequence) -> list[int]:
    """Another answer for each choice, of another length, and the end of sequence."""
    return [*OF_CHOICES[submitted.choice], EOS]


def usage_in(metadata: Any) -> pb.Usage:
    """The usage of a call's trailing metadata."""
    (found,) = (value for key, value in metadata if key == USAGE_METADATA)
    return pb.Usage.FromString(found)


async def test_unary_answer_equals_streamed_answer() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        asked = request(request_id="a", params={"max_tokens": 64})
        parts = await collect(b.stub.Generate(asked))
        whole = await b.stub.GenerateOnce(asked)
        (answer,) = whole.answers
        assert (whole.request_id, answer.index) == ("a", 0)
        assert answer.text == "".join(part.text for part in parts) == "hello"
        assert list(answer.token_ids) == [i for part in parts for i in part.token_ids]
        assert (answer.finish.reason, answer.finish.stop) == (parts[-1].finish.reason, parts[-1].finish.stop)
        assert answer.finish.usage == parts[-1].finish.usage
        assert (whole.prompt_info.prompt_tokens, whole.prompt_info.seed) == (3, parts[0].prompt_info.seed)
        await b.empty()


@pytest.mark.proto_field(
    "ChatMessage.parts",
    "ContentPart.text",
)
async def test_message_of_chat_once_can_be_sent_back() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        (answer,) = (await b.stub.ChatOnce(chat)).answers
        assert (answer.message.role, answer.message.content) == ("assistant", "hello")
        chat.messages.append(answer.message)
        chat.messages.add(role="user").parts.extend([pb.ContentPart(text="go "), pb.ContentPart(text="on")])
        await b.stub.ChatOnce(chat)
        joined = pb.ChatRequest(messages=[*chat.messages[:2], pb.ChatMessage(role="user", content="go on")])
        rendered = [await b.stub.RenderPrompt(pb.RenderPromptRequest(chat=one)) for one in (chat, joined)]
        assert rendered[0] == rendered[1]
        assert list(rendered[0].token_ids) == list(b.workers[0].submitted[-1].token_ids)
        assert "go on" in rendered[0].text
        counted = await b.stub.CountTokens(pb.CountTokensRequest(chat=chat))
        assert (counted.prompt_tokens, counted.max_model_len) == (len(rendered[0].token_ids), 4096)
        await b.empty()


async def test_unary_answer_is_never_partial() -> None:
    """The call ends with UNAVAILABLE and may be repeated: nothing was sent, although the worker had made tokens."""
    async with bench(FakeWorker(FILES, answer=letters, step_s=0.01), drain_timeout_s=0.1) as b:
        call = b.stub.GenerateOnce(request(params={"max_tokens": 4000}))
        await until(lambda: b.workers[0].running)
        await asyncio.sleep(0.05)
        ending = asyncio.ensure_future(b.router.stop())
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "ROUTER_ENDING"
        await ending


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.proto_field(
    "SamplingParams.n",
    "GenerateResponse.index",
)
async def test_several_answers_stream_interleaved(n: int) -> None:
    async with bench(FakeWorker(FILES, answer=by_choice)) as b:
        call = b.stub.Generate(request(request_id="n", params={"max_tokens": 64, "n": n}))
        parts = await collect(call)
        texts, finishes = defaultdict[int, str](str), defaultdict[int, int](int)
        for part in parts:
            assert not finishes[part.index], "a message of an index behind its finish"
            texts[part.index] += part.text
            finishes[part.index] += part.HasField("finish")
        assert dict(texts) == {i: "abcdefgh"[: i + 1] for i in range(n)}
        assert dict(finishes) == dict.fromkeys(range(n), 1)
        assert [part.HasField("prompt_info") for part in parts] == [True] + [False] * (len(parts) - 1)
        submitted = b.workers[0].submitted
        assert sorted(one.choice for one in submitted) == list(range(n))
        assert len({one.seed for one in submitted}) == 1
        usage = usage_in(await call.trailing_metadata())
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, sum(len(ids) + 1 for ids in OF_CHOICES[:n]))
        (once,) = [await b.stub.GenerateOnce(request(request_id="n", params={"max_tokens": 64, "n": n}))]
        assert [(answer.index, answer.text) for answer in once.answers] == sorted(texts.items())
        await b.empty()


async def test_failed_answer_ends_other_answers_of_call() -> None:
    ended = wpb.SequenceEnd(reason=wpb.END_REASON_NOT_A_NUMBER, message="not a number")
    async with bench(FakeWorker(FILES, answer=letters, end_with=ended)) as b:
        error = await error_of(b.stub.Generate(request(params={"max_tokens": 3, "n": 3})))
        assert error.code() is grpc.StatusCode.INTERNAL
        await b.empty()


async def test_several_answers_survive_lost_worker() -> None:
    workers = [FakeWorker(FILES, worker_id=f"w{i}", answer=letters, step_s=0.01) for i in range(2)]
    async with bench(*workers) as b:
        call = b.stub.Generate(request(params={"max_tokens": 60, "n": 4}))
        first = await call.read()
        await workers[0].stop()
        parts = [first, *await collect(call)]
        for index in range(4):
            mine = [part for part in parts if part.index == index]
            ids = [i for part in mine for i in part.token_ids]
            assert ids == letters(wpb.SubmitSequence())[:60]
            assert mine[-1].finish.reason == pb.FINISH_REASON_LENGTH
        await b.empty()


async def test_broken_call_usage_is_in_trailing_metadata() -> None:
    async with bench(FakeWorker(FILES, step_s=0.01), drain_timeout_s=0.0) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        ending = asyncio.ensure_future(b.router.stop())
        error = await error_of(call)
        sent = int(detail(error, error_details_pb2.ErrorInfo).metadata["tokens_sent"])
        usage = usage_in(error.trailing_metadata())
        assert error.code() is grpc.StatusCode.ABORTED
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, sent)
        await ending


async def test_answer_without_max_tokens_may_fill_context() -> None:
    async with bench(FakeWorker(FILES, max_model_len=100)) as b:
        asked = pb.GenerateRequest(text="say", sampling_params=pb.SamplingParams(min_tokens=80))
        parts = await collect(b.stub.Generate(asked))
        assert parts[-1].finish.reason == pb.FINISH_REASON_LENGTH
        assert parts[-1].finish.usage.completion_tokens == 97
        await b.empty()


async def test_default_max_tokens_bounds_answers() -> None:
    async with bench(FakeWorker(FILES), default_max_tokens=7) as b:
        for params, tokens in (
            (pb.SamplingParams(), 7),
            (pb.SamplingParams(min_tokens=9), 9),
            (pb.SamplingParams(max_tokens=12), 12),
        ):
            asked = pb.GenerateRequest(text="say", sampling_params=params)
            parts = await collect(b.stub.Generate(asked))
            assert parts[-1].finish.usage.completion_tokens == tokens
        await b.empty()


@pytest.mark.parametrize("num_words", [5_000, 40_000])
async def test_count_tokens_counts_prompt_too_long_for_the_model(num_words: int) -> None:
    """Generate refuses the longer text by a lower bound, and encodes the shorter one until it is too long."""
    async with bench() as b:
        text = "word " * num_words
        tokens = await b.stub.Tokenize(pb.TokenizeRequest(text=text))
        generate = pb.GenerateRequest(text=text)
        error = await error_of(b.stub.GenerateOnce(generate))
        assert error.code() is grpc.StatusCode.OUT_OF_RANGE

        counted = await b.stub.CountTokens(pb.CountTokensRequest(generate=generate))

        assert (counted.prompt_tokens, counted.max_model_len) == (len(tokens.token_ids), 4096)
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=text)])
        assert (await error_of(b.stub.ChatOnce(chat))).code() is grpc.StatusCode.OUT_OF_RANGE
        assert (await b.stub.CountTokens(pb.CountTokensRequest(chat=chat))).prompt_tokens > counted.prompt_tokens
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 5_000))
        assert (await b.stub.CountTokens(pb.CountTokensRequest(generate=ids))).prompt_tokens == 5_000


async def test_error_of_nested_request_names_its_field() -> None:
    async with bench() as b:
        bad = request(params={"top_p": 0})
        error = await error_of(b.stub.CountTokens(pb.CountTokensRequest(generate=pb.GenerateRequest())))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "generate.prompt"
        error = await error_of(b.stub.CountTokens(pb.CountTokensRequest()))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "request"
        assert (await b.stub.CountTokens(pb.CountTokensRequest(generate=bad))).prompt_tokens == 3


def resumed(asked: pb.GenerateRequest, parts: list[Any], *, by: str) -> pb.GenerateRequest:
    """The request again, behind the parts that have come."""
    again = pb.GenerateRequest()
    again.CopyFrom(asked)
    again.request_id = parts[0].request_id
    again.output_options.return_token_ids = by == "token_ids"
    again.resume.weights_digest = parts[0].prompt_info.weights_digest
    again.resume.numerics = parts[0].prompt_info.numerics
    for index in range(max(1, asked.sampling_params.n)):
        mine = [part for part in parts if part.index == index]
        said = "".join(part.text for part in mine).encode()
        point = again.resume.answers.add(index=index, finished=any(part.HasField("finish") for part in mine))
        if by == "token_ids":
            point.token_ids.ids.extend(i for part in mine for i in part.token_ids)
        elif said:
            point.text.bytes, point.text.sha256 = len(said), hashlib.sha256(said).digest()
    return again


@pytest.mark.parametrize("by", ["token_ids", "text"])
@pytest.mark.parametrize("stops", [[], ["lmn"], ["hij"]])
@pytest.mark.proto_field(
    "GenerateRequest.resume",
    "Resume.answers",
    "ResumePoint.index",
    "ResumePoint.token_ids",
    "ResumePoint.text",
    "TextDigest.bytes",
    "TextDigest.sha256",
)
async def test_client_resumes_stream_broken_at_each_message(by: str, stops: list[str]) -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        asked = request(request_id="r", params={"max_tokens": 12, "stop_strings": stops})
        whole = await collect(b.stub.Generate(asked))
        for count in range(1, len(whole)):
            rest = await collect(b.stub.Generate(resumed(asked, whole[:count], by=by)))
            assert "".join(part.text for part in (*whole[:count], *rest)) == "".join(part.text for part in whole)
            assert (rest[-1].finish.reason, rest[-1].finish.stop) == (whole[-1].finish.reason, whole[-1].finish.stop)
            assert rest[-1].finish.usage.completion_tokens == whole[-1].finish.usage.completion_tokens
            assert rest[-1].finish.exact
            if by == "token_ids":
                got = [i for part in (*whole[:count], *rest) for i in part.token_ids]
                assert got == [i for part in whole for i in part.token_ids]
                # What has come is not generated again.
                submitted = b.workers[0].submitted[-1]
                assert len(submitted.token_ids) - submitted.prompt_len == sum(len(p.token_ids) for p in whole[:count])
        await b.empty()


async def test_answers_to_one_prompt_go_to_one_worker() -> None:
    """Then that worker's prefix cache has the prompt; without a cache the answers spread."""
    for caches in (True, False):
        workers = [FakeWorker(FILES, worker_id=f"w{i}", caches_prefixes=caches) for i in range(3)]
        async with bench(*workers) as b:
            parts = await collect(b.stub.Generate(request("say" * 40, params={"n": 9})))
            ends = {part.finish.worker_id for part in parts if part.HasField("finish")}
            assert (len(ends) == 1) == caches
            assert sorted(len(worker.submitted) for worker in workers)[-1] == 9 or not caches
            await b.empty()


@pytest.mark.proto_field(
    "ResumePoint.finished",
)
async def test_finished_answers_are_not_sent_again() -> None:
    async with bench(FakeWorker(FILES, answer=by_choice)) as b:
        asked = request(request_id="r", params={"max_tokens": 64, "n": 4})
        whole = await collect(b.stub.Generate(asked))
        cut = next(i for i, part in enumerate(whole) if part.HasField("finish")) + 1
        rest = await collect(b.stub.Generate(resumed(asked, whole[:cut], by="token_ids")))
        assert not {part.index for part in whole[:cut] if part.HasField("finish")} & {part.index for part in rest}
        for index in range(4):
            said = "".join(part.text for part in (*whole[:cut], *rest) if part.index == index)
            assert said == "abcdefgh"[: index + 1]
        await b.empty()


async def test_resumed_stream_replaces_its_old_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resumed stream takes its place among the tenant's requests too, so that a limit of one suffices."""
    worker = FakeWorker(FILES, answer=letters, step_s=0.01)
    async with bench(worker, tenants=TenantPolicy(concurrency=1)) as b:
        asked = request(request_id="r", params={"max_tokens": 300})
        broken = b.stub.Generate(asked)
        parts = [await broken.read() for _ in range(3)]
        waits: list[Iterable[bytes]] = []

        async def wait(keys: Iterable[bytes]) -> None:
            waits.append(keys)

        # For orphans of other routers: here is none.
        monkeypatch.setattr(b.router.requests, "wait_for_orphans", wait)
        continued = b.stub.Generate(resumed(asked, parts, by="token_ids"))
        first: Any = await continued.read()
        worker.step_s = 0.001
        rest = [first, *await collect(continued)]
        assert waits == []
        assert [i for part in (*parts, *rest) for i in part.token_ids] == letters(wpb.SubmitSequence())[:300]
        error = await error_of(broken)
        assert error.code() is grpc.StatusCode.ABORTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "SUPERSEDED"
        await collect(b.stub.Generate(resumed(asked, parts, by="token_ids")))
        assert len(waits) == 1
        await b.empty()


def text(asked: pb.GenerateRequest) -> pb.TextDigest:
    """Digest of the first answer's text."""
    return asked.resume.answers[0].text


def ids(asked: pb.GenerateRequest) -> Any:
    """Token ids of the first answer."""
    return asked.resume.answers[0].token_ids.ids


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (lambda r: text(r).ClearField("bytes"), "INVALID_ARGUMENT", "resume.answers[0].text"),
        (
            lambda r: setattr(text(r), "sha256", b"x" * 31),
            "INVALID_ARGUMENT",
            "resume.answers[0].text",
        ),
        (lambda r: setattr(text(r), "sha256", b"x" * 32), "DATA_LOSS", "RESUME_MISMATCH"),
        (lambda r: setattr(text(r), "bytes", text(r).bytes + 1), "DATA_LOSS", "RESUME_MISMATCH"),
        (lambda r: setattr(text(r), "bytes", 10_000), "DATA_LOSS", "RESUME_MISMATCH"),
        (lambda r: setattr(r.resume.answers[0], "index", 1), "INVALID_ARGUMENT", "resume.answers[0].index"),
        (lambda r: r.resume.answers.add(index=0), "INVALID_ARGUMENT", "resume.answers[1].index"),
        (lambda r: setattr(r.resume.answers[0], "finished", True), "INVALID_ARGUMENT", "resume.answers"),
        (lambda r: r.ClearField("request_id"), "INVALID_ARGUMENT", "request_id"),
        (lambda r: setattr(r.resume, "weights_digest", "other"), "FAILED_PRECONDITION", "OTHER_MODEL_STATE"),
        (lambda r: setattr(r.resume, "numerics", "other"), "FAILED_PRECONDITION", "OTHER_MODEL_STATE"),
        (
            lambda r: ids(r).append(300),
            "INVALID_ARGUMENT",
            "resume.answers.token_ids.ids[0]",
        ),
        (
            lambda r: ids(r).extend([1] * 13),
            "INVALID_ARGUMENT",
            "resume.answers[0].token_ids.ids",
        ),
        (
            lambda r: (r.sampling_params.ClearField("max_tokens"), ids(r).extend([1] * 4094)),
            "INVALID_ARGUMENT",
            "resume.answers.token_ids.ids",
        ),
    ],
)
@pytest.mark.proto_field(
    "Resume.weights_digest",
    "Resume.numerics",
)
async def test_contradictory_resume_is_refused(change: Any, status: str, said: str) -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        asked = request(request_id="r", params={"max_tokens": 12})
        parts = await collect(b.stub.Generate(asked))
        again = resumed(asked, parts[:2], by="text")
        change(again)
        error = await error_of(b.stub.Generate(again))
        assert error.code().name == status
        kinds = details_of(error)
        found = [detail(error, error_details_pb2.ErrorInfo).reason]
        if "BadRequest" in kinds:
            found += [each.field for each in detail(error, error_details_pb2.BadRequest).field_violations]
        assert said in found
        await b.empty()


def accents(_: wpb.SubmitSequence) -> list[int]:
    """Characters of two bytes each."""
    return TOKENIZER.encode("éàü" * 200)


async def test_text_ending_inside_character_is_refused_worker_stays() -> None:
    """Its digest is right, so only the cut shows the fault; other requests of the Session continue."""
    async with bench(FakeWorker(FILES, answer=accents)) as b:
        beside = asyncio.ensure_future(collect(b.stub.Generate(request(params={"max_tokens": 300}))))
        (session,) = b.sessions()
        again = request(request_id="r", params={"max_tokens": 12})
        again.output_options.return_token_ids = False
        half = "é".encode()[:1]
        again.resume.answers.add().text.CopyFrom(pb.TextDigest(bytes=1, sha256=hashlib.sha256(half).digest()))
        error = await error_of(b.stub.Generate(again))
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert (await beside)[-1].finish.attempts == 1
        assert list(b.sessions()) == [session]
        await b.empty()


async def test_call_of_unread_client_ends_at_once() -> None:
    """An operator ends the call, or its client resumes elsewhere; otherwise it would hold the tenant's place."""
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    unread: dict[str, Any] = {"max_unread_tokens": 1 << 30, "slow_client_timeout_s": 0.0}
    async with bench(worker, admin_port=0, **unread) as b, b.another_client(SMALL_WINDOW) as client:
        admin = await admin_of(b)
        for n in (1, 2):
            slow = client.Generate(request(request_id="slow", params={"max_tokens": 60_000, "n": n}))
            await slow.read()
            await until(lambda: not b.workers[0].running)
            assert b.router.requests.in_flight == n
            await admin.CancelRequest(apb.CancelRequestRequest(request_id="slow"))
            await b.empty()
            slow.cancel()


async def test_partly_sent_answers_end_together_with_router() -> None:
    """One answer has finished and one waits. The waiting one alone could be retried, but the call as a whole cannot."""
    worker = FakeWorker(FILES, step_s=0.01, room_seqs=1)
    async with bench(worker, drain_timeout_s=0.0) as b:
        call = b.stub.Generate(request(params={"max_tokens": 20, "n": 2}))
        part: Any = await call.read()
        worker.room_seqs, worker.decoding = 0, 1
        while not part.HasField("finish"):
            part = await call.read()
        assert len(worker.submitted) == 1
        ending = asyncio.ensure_future(b.router.stop())
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.ABORTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "ROUTER_ENDING"
        await ending


async def test_unary_answers_restart_when_weights_roll() -> None:
    """One answer has tokens and one waits when weights change: both are computed with the new weights."""
    old = FakeWorker(FILES, step_s=0.01, room_seqs=1)
    new = FakeWorker(FILES, worker_id="w1", answer=by_choice)
    new.description = {"weights_digest": "xx", "numerics": "n2", "state": wpb.WORKER_STATE_STARTING}
    async with bench(old, new, start=False) as b:
        await b.ready(1)
        call = asyncio.ensure_future(b.stub.GenerateOnce(request(params={"max_tokens": 64, "n": 2})))
        await until(lambda: old.running)
        await asyncio.sleep(0.05)
        # Its answer does not end before the others have taken over.
        old.step_s = 60.0
        del new.description["state"]
        await b.ready(2)
        await old.stop()
        whole = await call
        assert [answer.text for answer in whole.answers] == ["a", "ab"]
        assert {(a.finish.weights_digest, a.finish.attempts, a.finish.exact) for a in whole.answers} == {
            ("xx", 1, True)
        }
        await b.empty()


async def test_resume_without_text_goes_to_weights_of_request_id() -> None:
    """While weights roll, a client repeats the request with `resume` but does not know the weights."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", description={"weights_digest": f"x{i}"}) for i in range(2)]
    async with bench(*workers) as b:
        seen = set[str]()
        for i in range(8):
            asked = request(request_id=f"r{i}", params={"max_tokens": 1})
            (first,) = await collect(b.stub.Generate(asked))
            asked.resume.answers.add(index=0)
            (again,) = await collect(b.stub.Generate(asked))
            assert again.finish.weights_digest == first.finish.weights_digest
            seen.add(first.finish.weights_digest)
        assert seen == {"x0", "x1"}
        await b.empty()


async def listed(admin: Any, **fields: Any) -> apb.ListRequestsResponse:
    """Requests in flight, as the operator sees them."""
    answer: apb.ListRequestsResponse = await admin.ListRequests(apb.ListRequestsRequest(**fields))
    return answer


async def admin_of(b: Bench) -> Any:
    """A client of the router's AdminService."""
    assert b.router.admin is not None
    return AdminServiceStub(grpc.aio.insecure_channel(b.router.admin.address))


async def test_resumed_stream_without_tokens_is_not_streaming() -> None:
    async with bench(FakeWorker(FILES, step_s=60), admin_port=0) as b:
        asked = request(request_id="r", params={"max_tokens": 40})
        asked.resume.answers.add(index=0).token_ids.ids.extend(letters(wpb.SubmitSequence())[:5])
        call = b.stub.Generate(asked)
        admin = await admin_of(b)
        seen: list[apb.RequestState.ValueType] = []
        async with asyncio.timeout(60):
            while apb.REQUEST_STATE_SUBMITTED not in seen:
                seen += (one.state for one in (await listed(admin)).requests)
                assert apb.REQUEST_STATE_STREAMING not in seen
                await asyncio.sleep(0.01)
        call.cancel()
        await b.empty()


async def test_admin_lists_requests_and_cancels_one() -> None:
    async with bench(FakeWorker(FILES, step_s=0.01, room_seqs=2, decoding=0), admin_port=0) as b:
        admin = await admin_of(b)
        running = []
        for i in range(2):
            running.append(b.stub.Generate(request(request_id=f"r{i}", params={"max_tokens": 4000})))
            await running[i].read()
        seen = (await listed(admin)).requests
        assert [one.request_id for one in seen] == ["r0", "r1"]
        assert {(one.method, one.state, one.worker_id, one.attempts, one.prompt_tokens) for one in seen} == {
            ("Generate", apb.REQUEST_STATE_STREAMING, "w0", 1, 3)
        }
        assert all(one.output_tokens and to_seconds(one.age) > 0 for one in seen)
        page = await listed(admin, page_size=1)
        assert [one.request_id for one in page.requests] == ["r0"]
        with pytest.raises(grpc.aio.AioRpcError, match="page_token"):
            await listed(admin, page_token="MDAw")
        rest = await listed(admin, page_size=1, page_token=page.next_page_token)
        assert ([one.request_id for one in rest.requests], rest.next_page_token) == (["r1"], "")
        assert not (await listed(admin, tenant="nobody")).requests
        await admin.CancelRequest(apb.CancelRequestRequest(request_id="r0"))
        error = await error_of(running[0])
        assert error.code() is grpc.StatusCode.CANCELLED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "CANCELLED_BY_OPERATOR"
        assert [one.request_id for one in (await listed(admin)).requests] == ["r1"]
        error = await error_of(admin.CancelRequest(apb.CancelRequestRequest(request_id="r0")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        running[1].cancel()
        await b.empty()


async def test_operator_cancels_waiting_request() -> None:
    async with bench(FakeWorker(FILES, room_seqs=0, decoding=1), admin_port=0) as b:
        admin = await admin_of(b)
        call = b.stub.Generate(request(request_id="waits"))
        answer = asyncio.ensure_future(error_of(call))
        await until(lambda: b.workers[0].lanes and b.workers[0].lanes[-1].seqs)
        assert [one.state for one in (await listed(admin)).requests] == [apb.REQUEST_STATE_QUEUED]
        await admin.CancelRequest(apb.CancelRequestRequest(request_id="waits"))
        assert (await answer).code() is grpc.StatusCode.CANCELLED
        await b.empty()


async def test_get_server_info_describes_router() -> None:
    async with bench(admin_port=0) as b:
        admin = await admin_of(b)
        info = await admin.GetServerInfo(apb.GetServerInfoRequest())
        assert (info.address, info.in_flight, info.config_version) == (b.router.server.address, 0, 1)
        assert re.fullmatch(r"[0-9a-f]{16}", info.router_id)
        assert info.options["queue-size"] == "4096"
        assert info.options["worker-wait"] == "5s"
        assert not [name for name in info.options if "key" in name or "security" in name]
        assert to_seconds(info.uptime) >= 0
        assert info.start_time.seconds > 1_700_000_000


def test_error_reasons_match_published_ones() -> None:
    """The reasons in the sources equal those in errors.proto."""
    sources = [path for part in ("router", "worker", "common") for path in (ROOT / part).rglob("*.py")]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    used = set(re.findall(r'reason="([A-Z_]+)"', text)) | set(
        re.findall(r'(?:UnauthenticatedError|PermissionDeniedError)\(\s*"([A-Z_]+)"', text)
    )
    published = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert used == published
