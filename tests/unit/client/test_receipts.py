"""The client's check of a receipt against its request and the answer that it received.

These receipts are built as a router builds them, for a spelled-out request. tests/e2e/test_client_receipts.py checks
receipts of real routers.
"""

from __future__ import annotations

from typing import Any

import pytest
from fissile.client import ReceiptError, ReceiptPart
from fissile.client.progress import Progress
from fissile.receipts import VERSION, RequestDigest, output_sha256, sealed
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb

PROMPT, ANSWER = [5, 6, 7], [11, 12, 13]
MODEL = pb.Model(
    max_model_len=100,
    weights_digest="w",
    tokenizer_sha256="t",
    default_sampling_params=pb.SamplingParams(temperature=0.5, top_p=1.0, top_k=0, repetition_penalty=1.0),
)
# The request after the router filled in the model's temperature.
IN_FORCE = pb.SamplingParams(temperature=0.5, max_tokens=9, stop_strings=["END"])


def asked(**fields: Any) -> pb.GenerateRequest:
    given = {"sampling_params": pb.SamplingParams(max_tokens=9, stop_strings=["END"]), **fields}
    return pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(ids=PROMPT), **given)


def receipt(in_force: pb.SamplingParams = IN_FORCE, prompt: list[int] = PROMPT, **fields: Any) -> pb.Receipt:
    seed = derive_seed("r")
    made = pb.Receipt(
        version=VERSION,
        request_sha256=RequestDigest(prompt, in_force, seed, continues=True).of_answer(0),
        seed=str(seed),
        prompt_tokens=len(prompt),
        output_tokens=len(ANSWER),
        output_sha256=output_sha256(ANSWER),
        weights_digest="w",
        tokenizer_sha256="t",
    )
    made.MergeFrom(pb.Receipt(**fields))
    return sealed(made)


def finish(made: pb.Receipt, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP) -> pb.Finish:
    return pb.Finish(reason=reason, exact=True, receipt=made)


def progress(end: pb.Finish, request: pb.GenerateRequest | None = None, ids: list[int] = ANSWER) -> Progress:
    made = Progress(request or asked(), has_receipts=True)
    made.add(pb.GenerateResponse(token_ids=ids[:1], prompt_info=pb.PromptInfo(prompt_tokens=len(PROMPT))))
    made.add(pb.GenerateResponse(token_ids=ids[1:], finish=end))
    return made


def refused(end: pb.Finish, **arguments: Any) -> ReceiptPart:
    with pytest.raises(ReceiptError) as caught:
        progress(end, **arguments).check_request([MODEL])
    return caught.value.part


def is_of_request(end: pb.Finish, request: pb.GenerateRequest | None = None, model: pb.Model = MODEL) -> bool:
    made = progress(end, request)
    made.check_request([model])
    found = made.answers[0].receipt
    assert found is not None
    return found.is_of_request


def test_receipt_is_checked_against_answer_then_request() -> None:
    made = progress(finish(receipt()))
    first = made.answers[0].receipt
    assert first is not None
    assert not first.is_of_request
    assert [question.method for question in made.questions] == ["GetModel"]
    made.check_request([MODEL])
    checked = made.answers[0].receipt
    assert checked is not None
    assert checked.is_of_request
    assert (checked.proof.receipt, checked.proof.generate) == (receipt(), made.request)
    assert list(checked.proof.token_ids.ids) == ANSWER


def test_finish_without_receipt_is_accepted() -> None:
    made = progress(pb.Finish(exact=False))
    assert made.answers[0].receipt is None
    assert not made.questions


@pytest.mark.parametrize("ids", [[11, 12, 14], [11, 12], [11, 12, 13, 13], [13, 12, 11]])
def test_receipt_of_other_tokens_is_refused(ids: list[int]) -> None:
    assert refused(finish(receipt()), ids=ids) is ReceiptPart.OUTPUT


def test_altered_receipt_is_refused() -> None:
    made = receipt()
    made.output_tokens += 1
    assert refused(finish(made)) is ReceiptPart.RECEIPT


@pytest.mark.parametrize(
    "made",
    [
        receipt(prompt=[5, 6, 8]),
        receipt(pb.SamplingParams(temperature=0.7, max_tokens=9, stop_strings=["END"])),
        receipt(pb.SamplingParams(temperature=0.5, max_tokens=8, stop_strings=["END"])),
        receipt(pb.SamplingParams(temperature=0.5, max_tokens=9)),
        receipt(seed="1"),
        receipt(index=1),
    ],
    ids=["prompt", "temperature", "max_tokens", "stop_strings", "seed", "index"],
)
def test_receipt_of_other_request_is_refused(made: pb.Receipt) -> None:
    assert refused(finish(made)) is ReceiptPart.REQUEST


def test_receipt_may_differ_in_router_defaults_and_clipping() -> None:
    """Allowed differences: the router's default max_tokens, its clipping to a longer model, and other weights."""
    no_limit = asked(sampling_params=pb.SamplingParams(stop_strings=["END"]))
    filled_in = pb.SamplingParams(temperature=0.5, max_tokens=20, stop_strings=["END"])
    assert not is_of_request(finish(receipt(filled_in)), no_limit)
    filled_in.max_tokens = 97
    assert is_of_request(finish(receipt(filled_in)), no_limit)
    filled_in.max_tokens = len(ANSWER)
    assert not is_of_request(finish(receipt(filled_in)), no_limit)
    assert is_of_request(finish(receipt(filled_in), pb.FINISH_REASON_LENGTH), no_limit)
    long = asked(sampling_params=pb.SamplingParams(max_tokens=200, stop_strings=["END"]))
    filled_in.max_tokens = 150
    assert not is_of_request(finish(receipt(filled_in)), long)
    other = pb.Model()
    other.CopyFrom(MODEL)
    other.weights_digest, other.default_sampling_params.temperature = "v", 0.9
    assert not is_of_request(finish(receipt()), model=other)


def test_echoed_prompt_is_not_part_of_receipt_answer() -> None:
    request = asked(output_options=pb.OutputOptions(echo=True))
    made = progress(finish(receipt()), request, [*PROMPT, *ANSWER])
    found = made.answers[0].receipt
    assert found is not None
    assert found.token_ids == tuple(ANSWER)


def test_answer_text_is_joined_on_access() -> None:
    made = Progress(pb.ChatRequest())
    for i in range(3):
        made.add(pb.ChatResponse(delta=pb.ChatDelta(content=str(i))))
        assert made.answers[0].text == "012"[: i + 1]
    made.add(pb.ChatResponse(delta=pb.ChatDelta(content="3")))
    made.add(pb.ChatResponse(delta=pb.ChatDelta(content="4")))
    assert made.answers[0].text == "01234"
