"""Receipts of real routers in the client library, and their verification."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from fissile.client import AsyncClient, Client, ReceiptError, ReceiptPart, Result
from fissile.receipts import sealed
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from tests.e2e.fake_worker import FakeWorker, letters
from tests.e2e.router_bench import FILES, bench

ASKED: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_k": 7,
    "stop_strings": ["zz"],
    "logit_bias": {3: 1.0},
    "receipt": True,
}


def receipts_of(result: Result) -> list[bool | None]:
    """For each answer: True if its receipt is said to be of the request; None without a receipt."""
    return [None if answer.receipt is None else answer.receipt.is_of_request for answer in result.answers]


@pytest.mark.slow
async def test_router_receipts_match_requests() -> None:
    """Requests by text, token ids, conversation and for several answers; with echo, special tokens and a seed."""
    async with bench(FakeWorker(FILES)) as b, AsyncClient(b.router.server.address) as client:
        results = [
            await client.generate("say", **ASKED),
            await client.generate([5, 6, 7], **ASKED, seed=5),
            await client.generate("say", **ASKED, output_options={"echo": True}),
            await client.chat("hi", **ASKED, n=2, output_options={"keep_special_tokens": True}),
        ]
        assert [receipts_of(result) for result in results] == [[True], [True], [True], [True, True]]
        # Which the model's length has clipped, and which the router has filled in.
        for max_tokens in (10**6, None):
            clipped = await client.generate("say", receipt=True, max_tokens=max_tokens)
            assert receipts_of(clipped) == [True]
        assert receipts_of(await client.generate("say", max_tokens=9)) == [None]
        with Client(b.router.server.address) as sync:
            result = await asyncio.to_thread(lambda: sync.generate("say", **ASKED))
            assert receipts_of(result) == [True]
            assert result.receipt is not None
            assert (await asyncio.to_thread(sync.verify, result.receipt)).is_equal
        await b.empty()


async def test_verify_accepts_answer_and_rejects_other() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b, AsyncClient(b.router.server.address) as client:
        receipt = (await client.generate("say", **ASKED)).receipt
        assert receipt is not None
        found = await client.verify(receipt, worker_id="w0")
        assert (found.is_equal, found.worker_id) == (True, "w0")
        right = letters(wpb.SubmitSequence())
        worker.answer = lambda _: [*right[:6], right[6] + 1, *right[7:]]
        found = await client.verify(receipt.proof)
        assert (found.verdict, found.position) == (pb.REPLAY_VERDICT_CHOICE_DIFFERS, 6)
        submitted = len(worker.submitted)
        forged = copy.deepcopy(receipt.proof)
        forged.receipt.seed = "1"
        assert (await client.verify(forged)).verdict == pb.REPLAY_VERDICT_BAD_RECEIPT
        altered = copy.deepcopy(receipt.proof)
        altered.token_ids.ids[0] += 1
        with pytest.raises(ReceiptError) as caught:
            await client.verify(altered)
        assert caught.value.part is ReceiptPart.OUTPUT
        assert len(worker.submitted) == submitted
        await b.empty()


@pytest.mark.parametrize("part", list(ReceiptPart))
async def test_router_with_altered_receipt_is_detected(part: ReceiptPart, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream fails, and stays failed."""

    def wrong(receipt: pb.Receipt) -> pb.Receipt:
        if part is ReceiptPart.RECEIPT:
            receipt.receipt_sha256 = bytes(32)
            return receipt
        if part is ReceiptPart.OUTPUT:
            receipt.output_sha256 = bytes(32)
        else:
            receipt.request_sha256 = bytes(32)
        return sealed(receipt)

    monkeypatch.setattr("router.api.receipts.sealed", wrong)
    async with bench(FakeWorker(FILES)) as b, AsyncClient(b.router.server.address) as client:
        stream = client.generate_stream("say", **ASKED)
        for _ in range(2):
            with pytest.raises(ReceiptError) as caught:
                await stream.result()
            assert caught.value.part is part
        await b.empty()
