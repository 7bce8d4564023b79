"""Replay through a router and scripted workers: every verdict, every refusal, and the worker that is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fissile.receipts import sealed
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from router.scheduling.failover import FailoverOptions
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, bench, collect, detail, error_of, request, until
from tests.e2e.test_contract import by_choice
from tests.e2e.test_receipts import asked_for, receipts

EQUAL, CHOICE, OTHER, BAD = (
    pb.REPLAY_VERDICT_EQUAL,
    pb.REPLAY_VERDICT_CHOICE_DIFFERS,
    pb.REPLAY_VERDICT_OTHER_REQUEST,
    pb.REPLAY_VERDICT_BAD_RECEIPT,
)


async def proven(b: Any, index: int = 0, **params: Any) -> pb.ReplayRequest:
    """A request that has been answered, to be replayed."""
    asked = asked_for(request(request_id="r", params=params))
    parts = await collect(b.stub.Generate(asked))
    ids = [i for part in parts for i in part.token_ids if part.index == index]
    return pb.ReplayRequest(receipt=receipts(parts)[index], generate=asked, token_ids=pb.TokenIds(ids=ids))


@pytest.mark.proto_field(
    "ReplayRequest.receipt",
    "ReplayRequest.generate",
    "ReplayRequest.worker_id",
    "ReplayResponse.verdict",
    "ReplayResponse.receipt",
    "ReplayResponse.worker_id",
)
async def test_replay_on_other_worker_is_equal_without_cache() -> None:
    workers = [FakeWorker(FILES, worker_id=f"w{i}", answer=short) for i in range(3)]
    async with bench(*workers) as b:
        replay = await proven(b, max_tokens=64, temperature=0.7)
        for worker in workers:
            worker.submitted.clear()
            replay.worker_id = worker.worker_id
            answer = await b.stub.Replay(replay)
            assert (answer.verdict, answer.worker_id) == (EQUAL, worker.worker_id)
            assert not answer.HasField("position")
            assert answer.receipt == replay.receipt
            (submitted,) = worker.submitted
            assert submitted.cache_salt
        await b.empty()


@pytest.mark.proto_field(
    "ReplayRequest.chat",
)
async def test_one_answer_of_several_and_chat_are_replayed_alone() -> None:
    worker = FakeWorker(FILES, answer=by_choice)
    async with bench(worker) as b:
        replay = await proven(b, index=2, max_tokens=64, n=3)
        worker.submitted.clear()
        assert (await b.stub.Replay(replay)).verdict == EQUAL
        assert [each.choice for each in worker.submitted] == [2]
        chat = asked_for(pb.ChatRequest(request_id="r", messages=[pb.ChatMessage(role="user", content="hi")]))
        answer = (await b.stub.ChatOnce(chat)).answers[0]
        assert (await b.stub.Replay(pb.ReplayRequest(receipt=answer.finish.receipt, chat=chat))).verdict == EQUAL
        await b.empty()


@pytest.mark.parametrize("knows_tokens", [True, False])
@pytest.mark.proto_field(
    "ReplayRequest.token_ids",
    "ReplayResponse.position",
    "ReplayResponse.detail",
)
async def test_wrong_answer_is_reported_with_first_token(knows_tokens: bool) -> None:
    worker = FakeWorker(FILES, answer=letters)
    async with bench(worker) as b:
        replay = await proven(b, max_tokens=9)
        right = letters(wpb.SubmitSequence())
        worker.answer = lambda _: [*right[:4], right[4] + 1, *right[5:]]
        if not knows_tokens:
            replay.ClearField("token_ids")
        answer = await b.stub.Replay(replay)
        assert answer.verdict == CHOICE
        assert answer.HasField("position") == knows_tokens
        if knows_tokens:
            assert answer.position == 4
            assert str(right[4] + 1) in answer.detail
        assert answer.receipt.output_sha256 != replay.receipt.output_sha256


async def test_differing_logits_and_differing_choice_are_distinguished() -> None:
    worker = FakeWorker(FILES, answer=letters)
    async with bench(worker) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 9}))
        asked.output_options.receipt.logits_every = 2
        parts = await collect(b.stub.Generate(asked))
        ids = pb.TokenIds(ids=[i for part in parts for i in part.token_ids])
        replay = pb.ReplayRequest(receipt=receipts(parts)[0], generate=asked, token_ids=ids)
        answer = await b.stub.Replay(replay)
        assert (answer.verdict, answer.receipt) == (EQUAL, replay.receipt)
        # The prompt has three tokens: position 8 is generated token 5, which is not digested, and 9 the next one.
        worker.logits = lambda position: 7 * position + (position >= 8)
        answer = await b.stub.Replay(replay)
        assert (answer.verdict, answer.position) == (pb.REPLAY_VERDICT_LOGITS_DIFFER, 6)
        right = letters(wpb.SubmitSequence())
        worker.answer = lambda _: [*right[:5], right[5] + 1, *right[6:]]
        answer = await b.stub.Replay(replay)
        assert (answer.verdict, answer.position) == (CHOICE, 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: setattr(r.generate, "text", "ask"), "prompt"),
        (lambda r: setattr(r.generate, "text", "sayy"), "prompt has"),
        (lambda r: setattr(r.generate, "request_id", "other"), "seed"),
        (lambda r: setattr(r.generate.sampling_params, "seed", 3), "seed"),
        (lambda r: setattr(r.generate.sampling_params, "top_k", 3), "parameters"),
        (lambda r: r.generate.sampling_params.stop_strings.append("zz"), "parameters"),
    ],
)
async def test_verify_reports_other_request_without_running(
    change: Callable[[pb.ReplayRequest], None], said: str
) -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        replay = await proven(b, max_tokens=9)
        worker.submitted.clear()
        change(replay)
        answer = await b.stub.Replay(replay)
        assert answer.verdict == OTHER
        assert said in answer.detail
        assert not worker.submitted
        assert not answer.HasField("receipt")
        await b.empty()


async def test_replay_ignores_fields_that_do_not_affect_answer() -> None:
    async with bench(FakeWorker(FILES)) as b:
        replay = await proven(b, max_tokens=9)
        generate = replay.generate
        generate.priority, generate.session_id, generate.cache_salt = pb.PRIORITY_LOW, "s", "c"
        generate.ClearField("output_options")
        generate.sampling_params.n = 2
        generate.sampling_params.top_p = 1.0
        assert (await b.stub.Replay(replay)).verdict == EQUAL


async def test_altered_receipt_differs_from_wrong_answer() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        replay = await proven(b, max_tokens=9)
        worker.submitted.clear()
        replay.receipt.output_tokens += 1
        answer = await b.stub.Replay(replay)
        assert answer.verdict == BAD
        assert "receipt_sha256" in answer.detail
        assert not worker.submitted


def other(replay: pb.ReplayRequest, **fields: Any) -> None:
    """Alters the receipt, and makes it whole again."""
    replay.receipt.MergeFrom(pb.Receipt(**fields))
    sealed(replay.receipt)


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        (lambda r: r.ClearField("receipt"), "INVALID_ARGUMENT", "receipt"),
        (lambda r: setattr(r.receipt, "version", 2), "INVALID_ARGUMENT", "receipt.version"),
        (lambda r: r.ClearField("generate"), "INVALID_ARGUMENT", "request"),
        (lambda r: r.generate.ClearField("request_id"), "INVALID_ARGUMENT", "generate.request_id"),
        (lambda r: r.generate.resume.SetInParent(), "INVALID_ARGUMENT", "generate.resume"),
        (
            lambda r: setattr(r.generate.sampling_params, "top_p", 0),
            "INVALID_ARGUMENT",
            "generate.sampling_params.top_p",
        ),
        (lambda r: r.generate.ClearField("text"), "INVALID_ARGUMENT", "generate.prompt"),
        (lambda r: r.token_ids.ids.append(1), "INVALID_ARGUMENT", "token_ids.ids"),
        (lambda r: setattr(r, "worker_id", "w9"), "INVALID_ARGUMENT", "worker_id"),
        (
            lambda r: setattr(r.generate.sampling_params, "best_of", 2),
            "UNIMPLEMENTED",
            "generate.sampling_params.best_of",
        ),
        (lambda r: other(r, weights_digest="xx"), "FAILED_PRECONDITION", ""),
        (lambda r: other(r, numerics="xx"), "FAILED_PRECONDITION", ""),
        (lambda r: other(r, tokenizer_sha256="xx"), "FAILED_PRECONDITION", ""),
    ],
)
async def test_unreplayable_request_is_refused_by_name(change: Any, status: str, field: str) -> None:
    async with bench() as b:
        replay = await proven(b, max_tokens=9)
        change(replay)
        error = await error_of(b.stub.Replay(replay))
        assert error.code().name == status
        if field:
            assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == field
        await b.empty()


async def test_replay_waits_for_and_ends_with_its_named_worker() -> None:
    """Other workers of the class could continue the replay, but it asks about this worker."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(2)]
    async with bench(*workers, failover=FailoverOptions(worker_wait_s=0.3)) as b:
        replay = await proven(b, max_tokens=300)
        workers[0].submitted.clear()
        replay.worker_id = "w1"
        workers[1].step_s = 0.01
        call = asyncio.ensure_future(error_of(b.stub.Replay(replay)))
        await until(lambda: workers[1].running)
        await workers[1].stop()
        assert (await call).code() is grpc.StatusCode.UNAVAILABLE
        assert not workers[0].submitted
        await b.empty()
