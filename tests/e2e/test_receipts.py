"""Receipts of answers through a router and scripted workers: the same ones whatever has happened in between."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import xxhash
from fissile.receipts import RequestDigest, canonical_params, contradiction, output_sha256
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.rpc import error_details_pb2

from common.params.sampling_params import SamplingParams
from common.text.tokenizer import files_sha256
from router.scheduling.failover import FailoverOptions, FailoverPolicy
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, TOKENIZER, bench, collect, detail, error_of, request, until
from tests.e2e.test_contract import by_choice, resumed


def asked_for(made: Any) -> Any:
    made.output_options.receipt.SetInParent()
    return made


def receipts(parts: list[Any]) -> dict[int, pb.Receipt]:
    return {part.index: part.finish.receipt for part in parts if part.HasField("finish")}


@pytest.mark.proto_field(
    "OutputOptions.receipt",
    "Finish.receipt",
    "Receipt.version",
    "Receipt.request_sha256",
    "Receipt.seed",
    "Receipt.index",
    "Receipt.prompt_tokens",
    "Receipt.output_tokens",
    "Receipt.output_sha256",
    "Receipt.weights_digest",
    "Receipt.numerics",
    "Receipt.tokenizer_sha256",
    "Receipt.router_version",
    "Receipt.worker_version",
    "Receipt.receipt_sha256",
)
async def test_receipt_names_weights_tokenizer_and_numerics() -> None:
    worker = FakeWorker(FILES, answer=short, description={"version": "9.8.7"})
    async with bench(worker) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 64, "temperature": 0.5}))
        parts = await collect(b.stub.Generate(asked))
        ids = [i for part in parts for i in part.token_ids]
        (receipt,) = receipts(parts).values()
        params = canonical_params(asked.sampling_params, SamplingParams(temperature=0.5, max_tokens=64))
        prompt = RequestDigest(TOKENIZER.encode("say"), params, derive_seed("r"), continues=True)
        assert receipt.request_sha256 == prompt.of_answer(0)
        assert (receipt.version, receipt.seed, receipt.index) == (1, str(derive_seed("r")), 0)
        assert (receipt.prompt_tokens, receipt.output_tokens) == (3, len(ids))
        assert receipt.output_sha256 == output_sha256(ids)
        assert (receipt.weights_digest, receipt.numerics) == ("ww", "nn")
        assert (receipt.tokenizer_sha256, receipt.template_sha256) == (files_sha256(FILES), "")
        assert receipt.router_version
        assert receipt.worker_version == "9.8.7"
        assert (receipt.logits_every, list(receipt.logit_digests)) == (0, [])
        assert contradiction(receipt) == ""

        plain = await collect(b.stub.Generate(request(request_id="r")))
        assert not plain[-1].finish.HasField("receipt")


@pytest.mark.proto_field(
    "Receipt.template_sha256",
)
async def test_receipt_of_chat_differs_from_receipt_of_its_prompt() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        chat = pb.ChatRequest(request_id="r", messages=[pb.ChatMessage(role="user", content="hi")])
        asked_for(chat)
        (of_chat,) = receipts(await collect(b.stub.Chat(chat))).values()
        once = await b.stub.ChatOnce(chat)
        rendered = await b.stub.RenderPrompt(pb.RenderPromptRequest(chat=chat))
        by_ids = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=rendered.token_ids))
        (of_ids,) = receipts(await collect(b.stub.Generate(asked_for(by_ids)))).values()
        model = await b.stub.GetModel(pb.GetModelRequest())
    assert once.answers[0].finish.receipt == of_chat
    assert of_chat.template_sha256 == model.model.template_sha256 != ""
    assert pb.CAPABILITY_RECEIPTS in model.model.capabilities
    assert of_chat.output_sha256 == of_ids.output_sha256
    assert of_chat.request_sha256 != of_ids.request_sha256


async def test_receipt_of_each_answer_equals_receipt_alone() -> None:
    async with bench(FakeWorker(FILES, answer=by_choice)) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 64, "n": 3}))
        streamed = receipts(await collect(b.stub.Generate(asked)))
        once = await b.stub.GenerateOnce(asked)
        asked.sampling_params.n = 1
        alone = receipts(await collect(b.stub.Generate(asked)))
    assert sorted(streamed) == [0, 1, 2]
    assert {answer.index: answer.finish.receipt for answer in once.answers} == streamed
    assert alone[0] == streamed[0]
    assert len({receipt.output_sha256 for receipt in streamed.values()}) == 3


def digested(made: Any, every: int) -> Any:
    made.output_options.receipt.logits_every = every
    return made


def chain(positions: range) -> list[int]:
    """Running digests of the scripted workers' rows: of eight bytes each, little endian."""
    running = [0]
    for position in positions:
        row = (7 * position).to_bytes(8, "little")
        running.append(xxhash.xxh3_64(row, seed=running[-1]).intdigest())
    return running[1:]


@pytest.mark.parametrize(("every", "per_step"), [(1, 1), (1, 7), (3, 1), (3, 4), (50, 3)])
@pytest.mark.proto_field("ReceiptOptions.logits_every", "Receipt.logits_every", "Receipt.logit_digests")
async def test_logits_of_every_nth_token_are_chained(every: int, per_step: int) -> None:
    async with bench(FakeWorker(FILES, answer=letters, tokens_per_step=per_step)) as b:
        asked = digested(request(request_id="r", params={"max_tokens": 10}), every)
        (receipt,) = receipts(await collect(b.stub.Generate(asked))).values()
        assert receipt.logits_every == every
        assert list(receipt.logit_digests) == chain(range(3, 13, every))
        # What was computed behind a stop string is not in it.
        asked.sampling_params.stop_strings.append("klmn")
        (receipt,) = receipts(await collect(b.stub.Generate(asked))).values()
        assert list(receipt.logit_digests) == chain(range(3, 10, every))
        assert contradiction(receipt) == ""


async def test_logit_digests_survive_failover_and_resume() -> None:
    asked = digested(request(request_id="r", params={"max_tokens": 300}), 2)
    one = FakeWorker(FILES, worker_id="w0", step_s=0.005)
    two = FakeWorker(FILES, worker_id="w1", intake=wpb.INTAKE_CORDONED)
    async with bench(one, two, start=False) as b:
        await b.ready(1)
        call = asyncio.ensure_future(collect(b.stub.Generate(asked)))
        await until(lambda: one.running and next(iter(one.running.values())).sent > 20)
        two.intake = wpb.INTAKE_OPEN
        await one.stop()
        parts = await call
        (moved,) = receipts(parts).values()
        assert list(moved.logit_digests) == chain(range(3, 303, 2))
        for by in ("text", "token_ids"):
            rest = await collect(b.stub.Generate(resumed(asked, parts[:5], by=by)))
            assert receipts(rest) == {0: moved}
            assert "".join(part.text for part in (*parts[:5], *rest)) == "".join(part.text for part in parts)
        again = resumed(asked, parts[:5], by="token_ids")
        again.resume.answers[0].token_ids.ids[-1] += 1
        error = await error_of(b.stub.Generate(again))
        assert error.code() is grpc.StatusCode.DATA_LOSS
        assert detail(error, error_details_pb2.ErrorInfo).reason == "RESUME_MISMATCH"


@pytest.mark.parametrize("by", ["token_ids", "text"])
async def test_resumed_stream_has_receipt_of_unbroken_one(by: str) -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 12}))
        whole = await collect(b.stub.Generate(asked))
        rest = await collect(b.stub.Generate(resumed(asked, whole[:4], by=by)))
        assert receipts(rest) == receipts(whole)


@pytest.mark.parametrize("per_step", [1, 3, 40])
async def test_tokens_after_stop_string_are_not_in_receipt(per_step: int) -> None:
    """The number of tokens in flight when the stop string is found depends on timing."""
    async with bench(FakeWorker(FILES, answer=letters, tokens_per_step=per_step)) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 40, "stop_strings": ["lmn"]}))
        parts = await collect(b.stub.Generate(asked))
        (receipt,) = receipts(parts).values()
        ids = TOKENIZER.encode("hijklmn")
        assert parts[-1].finish.stop.stop_string == "lmn"
        assert (receipt.output_tokens, receipt.output_sha256) == (len(ids), output_sha256(ids))
        assert receipt.output_tokens == parts[-1].finish.usage.completion_tokens


async def test_failover_changes_only_worker_version_in_receipt() -> None:
    async with bench(FakeWorker(FILES)) as b:
        asked = asked_for(request(request_id="r", params={"max_tokens": 300}))
        (undisturbed,) = receipts(await collect(b.stub.Generate(asked))).values()
    one = FakeWorker(FILES, worker_id="w0", step_s=0.005)
    two = FakeWorker(FILES, worker_id="w1", description={"version": "2"}, intake=wpb.INTAKE_CORDONED)
    async with bench(one, two, start=False) as b:
        await b.ready(1)
        call = asyncio.ensure_future(collect(b.stub.Generate(asked)))
        await until(lambda: one.running and next(iter(one.running.values())).sent > 20)
        two.intake = wpb.INTAKE_OPEN
        await one.stop()
        parts = await call
    (moved,) = receipts(parts).values()
    assert parts[-1].finish.attempts == 2
    assert moved.worker_version == "2"
    for receipt in (undisturbed, moved):
        receipt.ClearField("worker_version")
        receipt.ClearField("receipt_sha256")
    assert moved == undisturbed


async def test_answer_of_two_numerics_classes_has_no_receipt() -> None:
    one = FakeWorker(FILES, worker_id="w0", step_s=0.005)
    two = FakeWorker(FILES, worker_id="w1", description={"numerics": "oo"}, intake=wpb.INTAKE_CORDONED)
    async with bench(one, two, start=False, failover=FailoverOptions(policy=FailoverPolicy.ANY)) as b:
        await b.ready(1)
        asked = asked_for(request(request_id="r", params={"max_tokens": 300}))
        call = asyncio.ensure_future(collect(b.stub.Generate(asked)))
        await until(lambda: one.running and next(iter(one.running.values())).sent > 20)
        two.intake = wpb.INTAKE_OPEN
        await one.stop()
        finish = (await call)[-1].finish
    assert not finish.exact
    assert not finish.HasField("receipt")
