"""Receipts that somebody has made up: each is told, altered by accident or forged with a digest that fits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fissile.receipts import output_sha256, sealed
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from tests.e2e.fake_worker import FakeWorker, letters
from tests.e2e.router_bench import FILES, bench, collect, detail, error_of, request
from tests.e2e.test_receipts import asked_for, receipts

NUM_MANGLED = 400
# A verdict that a forger would like to get.
EQUAL = "EQUAL"
# UNIMPLEMENTED is for fields that there are not.
REFUSED = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED"}

Change = Callable[[pb.Receipt], object]


async def answered(b: Any, every: int = 2) -> pb.ReplayRequest:
    """An answer of nine tokens, to be replayed."""
    asked = asked_for(request(request_id="r", params={"max_tokens": 9}))
    asked.output_options.receipt.logits_every = every
    parts = await collect(b.stub.Generate(asked))
    return pb.ReplayRequest(receipt=receipts(parts)[0], generate=asked)


async def outcome(b: Any, replay: pb.ReplayRequest) -> tuple[str, str]:
    """Verdict and detail; of a refusal the status, and the field or the reason."""
    try:
        found = await b.stub.Replay(replay)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            return error.code().name, detail(error, error_details_pb2.BadRequest).field_violations[0].field
        return error.code().name, detail(error, error_details_pb2.ErrorInfo).reason
    return pb.ReplayVerdict.Name(found.verdict).removeprefix("REPLAY_VERDICT_"), found.detail


def first(values: Any) -> None:
    values[0] ^= 1


# Each field of a receipt, as a forger changes it, and what Replay says. Nothing depends on the versions: another one of
# the same class and weights gives the same answer.
FORGED: dict[str, tuple[Change, str, str]] = {
    "version": (lambda r: setattr(r, "version", 2), "INVALID_ARGUMENT", "receipt.version"),
    "request_sha256": (lambda r: setattr(r, "request_sha256", bytes(32)), "OTHER_REQUEST", "parameters"),
    "seed": (lambda r: setattr(r, "seed", "7"), "OTHER_REQUEST", "seed"),
    "index": (lambda r: setattr(r, "index", 1), "OTHER_REQUEST", "answer 1"),
    "prompt_tokens": (lambda r: setattr(r, "prompt_tokens", 4), "OTHER_REQUEST", "prompt"),
    "output_tokens": (lambda r: setattr(r, "output_tokens", 10), "CHOICE_DIFFERS", ""),
    "output_sha256": (lambda r: setattr(r, "output_sha256", output_sha256([1])), "CHOICE_DIFFERS", ""),
    "weights_digest": (lambda r: setattr(r, "weights_digest", "xx"), "FAILED_PRECONDITION", "OTHER_MODEL_STATE"),
    "numerics": (lambda r: setattr(r, "numerics", "xx"), "FAILED_PRECONDITION", "OTHER_MODEL_STATE"),
    "tokenizer_sha256": (lambda r: setattr(r, "tokenizer_sha256", "x"), "FAILED_PRECONDITION", "OTHER_MODEL_STATE"),
    "template_sha256": (lambda r: setattr(r, "template_sha256", "xx"), "FAILED_PRECONDITION", "OTHER_MODEL_STATE"),
    "router_version": (lambda r: setattr(r, "router_version", "0"), EQUAL, ""),
    "worker_version": (lambda r: setattr(r, "worker_version", "0"), EQUAL, ""),
    "logits_every": (lambda r: setattr(r, "logits_every", 1), "BAD_RECEIPT", "logit_digests"),
    "logit_digests": (lambda r: first(r.logit_digests), "LOGITS_DIFFER", ""),
}


async def test_each_forged_receipt_field_is_reported() -> None:
    """With a new `receipt_sha256` the field is reported; without, the receipt counts as altered."""
    assert set(FORGED) == set(pb.Receipt.DESCRIPTOR.fields_by_name) - {"receipt_sha256"}
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        good = await answered(b)
        assert (await outcome(b, good))[0] == EQUAL
        for name in ("weights_digest", "numerics", "tokenizer_sha256"):
            # Nor may it leave open which: "" stands for any where a stream is resumed.
            bare = pb.ReplayRequest.FromString(good.SerializeToString())
            bare.receipt.ClearField(name)
            sealed(bare.receipt)
            assert await outcome(b, bare) == ("FAILED_PRECONDITION", "OTHER_MODEL_STATE"), name
        for name, (change, verdict, said) in FORGED.items():
            altered = pb.ReplayRequest.FromString(good.SerializeToString())
            change(altered.receipt)
            assert altered.receipt != good.receipt, name
            expected = verdict if name == "version" else "BAD_RECEIPT"
            assert (await outcome(b, altered))[0] == expected, name
            sealed(altered.receipt)
            found = await outcome(b, altered)
            assert found[0] == verdict, (name, found)
            assert said in found[1], (name, found)
        await b.empty()


async def test_resume_with_changed_chat_template_is_refused() -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        chat = asked_for(pb.ChatRequest(request_id="r", messages=[pb.ChatMessage(role="user", content="hi")]))
        chat.sampling_params.max_tokens = 9
        receipt = (await b.stub.ChatOnce(chat)).answers[0].finish.receipt
        assert (await outcome(b, pb.ReplayRequest(receipt=receipt, chat=chat)))[0] == EQUAL
        receipt.template_sha256 = "0" * 64
        found = await outcome(b, pb.ReplayRequest(receipt=sealed(receipt), chat=chat))
        assert found == ("FAILED_PRECONDITION", "OTHER_MODEL_STATE")


def mangled(draw: random.Random, good: pb.Receipt) -> pb.Receipt:
    """A receipt of which some bytes are others, on the wire; of one that cannot be read any more, the next."""
    while True:
        data = bytearray(good.SerializeToString())
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = draw.randrange(len(data))
            data[place] = draw.choice((data[place] ^ 1 << draw.randrange(8), draw.randrange(256)))
        if draw.random() < 0.1:
            del data[draw.randrange(len(data)) :]
        try:
            return pb.Receipt.FromString(bytes(data))
        except (DecodeError, UnicodeDecodeError):
            continue


@pytest.mark.slow
@pytest.mark.parametrize("forged", [False, True])
async def test_mangled_receipt_never_verifies_equal(forged: bool) -> None:
    """With or without a new digest: a verdict with a sentence, or a status that names field or reason."""
    draw, seen = random.Random(forged), Counter[str]()
    fields = set(pb.Receipt.DESCRIPTOR.fields_by_name)
    if forged:
        fields -= {"router_version", "worker_version", "receipt_sha256"}
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        good = await answered(b)
        for _ in range(NUM_MANGLED):
            receipt = mangled(draw, good.receipt)
            if forged:
                sealed(receipt)
            verdict, said = await outcome(b, pb.ReplayRequest(receipt=receipt, generate=good.generate))
            seen[verdict] += 1
            assert said, (verdict, receipt)
            differ = {name for name in fields if getattr(receipt, name) != getattr(good.receipt, name)}
            assert (verdict == EQUAL) == (not differ and verdict != "UNIMPLEMENTED"), (verdict, said, differ)
            if not forged and verdict not in REFUSED:
                assert verdict in {"BAD_RECEIPT", EQUAL}, (verdict, said)
        await b.empty()
    # The draws reach what they are for.
    assert seen["BAD_RECEIPT"] > 2
    assert not forged or min(seen[v] for v in ("OTHER_REQUEST", "LOGITS_DIFFER", "FAILED_PRECONDITION")) > 2, seen


async def test_wrong_answer_and_forged_receipt_are_distinguished() -> None:
    """An altered receipt is found before any replay; a worker that now computes differently only by the replay."""
    worker = FakeWorker(FILES, answer=letters)
    async with bench(worker) as b:
        good = await answered(b)
        altered = pb.ReplayRequest.FromString(good.SerializeToString())
        altered.receipt.output_sha256 = output_sha256([1])
        worker.submitted.clear()
        assert (await outcome(b, altered))[0] == "BAD_RECEIPT"
        assert not worker.submitted
        right = letters(wpb.SubmitSequence())
        worker.answer = lambda _: [*right[:4], right[4] + 1, *right[5:]]
        assert (await outcome(b, good))[0] == "CHOICE_DIFFERS"
        assert len(worker.submitted) == 1


async def test_workers_without_logit_digests_refuse_logit_receipts() -> None:
    """Workers of an older version: the answer has no receipt, and none is compared with theirs."""
    old = FakeWorker(FILES, answer=letters, logits=None)
    async with bench(old) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 9}))
        parts = await collect(b.stub.Generate(asked))
        assert parts[-1].finish.HasField("receipt")
        asked.output_options.receipt.logits_every = 2
        parts = await collect(b.stub.Generate(asked))
        assert parts[-1].finish.usage.completion_tokens == 9
        assert not parts[-1].finish.HasField("receipt")
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        replay = await answered(b)
    async with bench(old) as b:
        assert await outcome(b, replay) == ("FAILED_PRECONDITION", "OTHER_MODEL_STATE")


async def test_replay_needs_ready_worker_of_same_numerics() -> None:
    one = FakeWorker(FILES, worker_id="w0", answer=letters)
    other = FakeWorker(FILES, worker_id="w1", answer=letters, description={"numerics": "others"})
    async with bench(one, other, placement="round_robin") as b:
        for _ in range(2):
            replay = await answered(b)
            named = {"nn": "w0", "others": "w1"}[replay.receipt.numerics]
            replay.worker_id = named
            assert (await b.stub.Replay(replay)).worker_id == named
            replay.worker_id = "w1" if named == "w0" else "w0"
            error = await error_of(b.stub.Replay(replay))
            violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
            assert violation.field == "worker_id"
            assert named in violation.description
    cordoned = FakeWorker(FILES, worker_id="w2", answer=letters, intake=wpb.INTAKE_CORDONED)
    async with bench(one, cordoned, start=False) as b:
        await b.ready(1)
        replay = await answered(b)
        replay.worker_id = "w2"
        assert await outcome(b, replay) == ("INVALID_ARGUMENT", "worker_id")


async def test_receipt_without_max_tokens_depends_on_longest_worker() -> None:
    async with bench(FakeWorker(FILES, answer=letters, max_model_len=40)) as b:
        asked = asked_for(request(request_id="r"))
        asked.sampling_params.ClearField("max_tokens")
        receipt = receipts(await collect(b.stub.Generate(asked)))[0]
        replay = pb.ReplayRequest(receipt=receipt, generate=asked)
        assert (await outcome(b, replay))[0] == EQUAL
    async with bench(FakeWorker(FILES, answer=letters, max_model_len=50)) as b:
        assert (await outcome(b, replay))[0] == "OTHER_REQUEST"
        replay.generate.sampling_params.max_tokens = 37
        assert (await outcome(b, replay))[0] == EQUAL
