"""Calls to a worker without a router."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fissile.seed import derive_seed
from fissile.worker.v1 import worker_pb2 as wpb

from tests.e2e.worker_bench import ENDLESS, REFERENCE, Site, folder, options, request, running, site, status_of
from tests.e2e.worker_client import VOCAB_SIZE
from worker.server import Worker

__all__ = ["folder", "site"]

pytestmark = pytest.mark.usefixtures("stays_frozen")


async def test_direct_call_streams_start_tokens_and_end(site: Site) -> None:
    answers = [answer async for answer in site.stub.Generate(request(20))]
    assert [token for answer in answers for token in answer.token_ids] == REFERENCE.reference([1, 2, 3], 20, seed=4)
    assert [answer.HasField("start") for answer in answers] == [True] + [False] * (len(answers) - 1)
    assert [answer.HasField("end") for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].end.reason == wpb.END_REASON_LENGTH


async def test_direct_call_without_seed_derives_seed_from_id(site: Site) -> None:
    """Former fault: the seed was 0, so that one prompt had one "random" answer for all callers."""
    call = request(20, request_id="mine")
    call.ClearField("seed")
    first, again = [[answer async for answer in site.stub.Generate(call)] for _ in range(2)]
    tokens = [[token for answer in answers for token in answer.token_ids] for answers in (first, again)]
    assert tokens == [REFERENCE.reference([1, 2, 3], 20, seed=derive_seed("mine"))] * 2
    assert [answer.HasField("seed") for answer in first] == [True] + [False] * (len(first) - 1)
    call.request_id = ""
    first, again = [[answer async for answer in site.stub.Generate(call)] for _ in range(2)]
    assert first[0].seed != again[0].seed
    call.seed = 0
    answers = [answer async for answer in site.stub.Generate(call)]
    assert answers[0].seed == 0


async def test_direct_calls_beyond_limit_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: any number of direct calls could wait, each with its prompt."""
    monkeypatch.setattr("worker.session.service.MAX_WAITING_CALLS", 2)
    given = options(folder)
    async with running(Worker(replace(given, config=replace(given.config, max_num_seqs=1)))) as site:
        calls = [site.stub.Generate(request(ENDLESS)) for _ in range(3)]
        await asyncio.wait([asyncio.ensure_future(call.read()) for call in calls], return_when="FIRST_COMPLETED")
        while site.worker.engine.num_live < 3:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        refused = site.stub.Generate(request())
        assert await status_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "queue is full" in str(await refused.details())
        for call in calls:
            call.cancel()


async def test_cancelled_direct_call(site: Site) -> None:
    call = site.stub.Generate(request(ENDLESS))
    await call.read()
    call.cancel()
    await site.until_free()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in site.stub.Generate(request(ENDLESS), timeout=0.3):
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await site.until_free()


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        (request(token_ids=[]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        (request(token_ids=[1, VOCAB_SIZE]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids[1]"),
        (request(token_ids=[1] * 4096), grpc.StatusCode.OUT_OF_RANGE, "token_ids"),
        (request(0), grpc.StatusCode.INVALID_ARGUMENT, "params.max_tokens"),
        (wpb.GenerateRequest(token_ids=[1]), grpc.StatusCode.INVALID_ARGUMENT, "params.top_p"),
        (request(request_id="x" * 129), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (
            request(params=wpb.SamplingParams(top_p=1, max_tokens=1, repetition_penalty=101)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "params.repetition_penalty",
        ),
    ],
)
async def test_bad_direct_call_names_field(
    site: Site, bad: wpb.GenerateRequest, code: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await site.stub.Generate(bad).read()
    assert raised.value.code() is code
    assert str(raised.value.details()).startswith(f"{field} ")
