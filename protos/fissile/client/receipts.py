"""Checks receipts against the request and the answer. Pure: the caller makes whatever calls a check needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fissile.client.errors import ReceiptError, ReceiptPart
from fissile.client.messages import Request, Unary
from fissile.receipts import (
    NEUTRAL,
    RequestDigest,
    canonical_params,
    confining,
    contradiction,
    output_sha256,
)
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, repr=False)
class Receipt:
    """The receipt of one answer, checked against the received answer.

    Examples:
        ```python
        with Client("10.0.0.1:50051") as client:
            result = client.chat("Tell me a story.", receipt=True, max_tokens=32)
            print(client.verify(result.receipt).is_equal)
        ```

    Attributes:
        message: as received.
        request: the request with its id, which a replay runs again.
        token_ids: the answer.
        is_of_request: True if its digest of the request equals one computed from the request; False if that cannot be
            computed, usually because the request has no `max_tokens`.
    """

    message: pb.Receipt
    request: Request
    token_ids: tuple[int, ...]
    is_of_request: bool = False

    def __repr__(self) -> str:
        """Shows the first digits of the receipt's digest, and the number of tokens."""
        digest = self.message.receipt_sha256.hex()[:16]
        return f"Receipt({digest}, {len(self.token_ids)} tokens, is_of_request={self.is_of_request})"

    @property
    def proof(self) -> pb.ReplayRequest:
        """All that a replay needs, also by another program: `fissile verify` reads its JSON."""
        return proof_of(self.message, self.request, self.token_ids)


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Result of a verification.

    Attributes:
        verdict: of `pb.ReplayVerdict`.
        detail: the difference, in a sentence.
        position: the first generated token that differs, if known.
        worker_id: the worker that ran it, "" if it did not run.
    """

    verdict: pb.ReplayVerdict.ValueType
    detail: str
    position: int | None = None
    worker_id: str = ""

    def __repr__(self) -> str:
        """Shows the name of the verdict, its detail, the position and the worker."""
        verdict = pb.ReplayVerdict.Name(self.verdict).removeprefix("REPLAY_VERDICT_")
        place = "" if self.position is None else f", position={self.position}"
        return f"Verification({verdict}, {self.detail!r}{place}, worker_id={self.worker_id!r})"

    @property
    def is_equal(self) -> bool:
        """True if the answer came out again, to the bit."""
        return self.verdict == pb.REPLAY_VERDICT_EQUAL


def proof_of(receipt: pb.Receipt, request: Request, token_ids: Sequence[int]) -> pb.ReplayRequest:
    """The request that has a receipt verified."""
    proof = pb.ReplayRequest(receipt=receipt, token_ids=pb.TokenIds(ids=token_ids))
    if isinstance(request, pb.ChatRequest):
        proof.chat.CopyFrom(request)
    else:
        proof.generate.CopyFrom(request)
    return proof


def replay(proof: pb.ReplayRequest, worker_id: str) -> Unary[Verification]:
    """Asks for a replay on a worker; "" is any."""
    asked = pb.ReplayRequest()
    asked.CopyFrom(proof)
    asked.worker_id = worker_id
    return Unary("Replay", asked, _verification)


def contradiction_of(proof: pb.ReplayRequest) -> Verification | None:
    """The result for a receipt that contradicts itself; None if it must be run.

    Raises:
        ReceiptError: the receipt is consistent, but the token ids are not those of its answer.
    """
    problem = contradiction(proof.receipt)
    if problem:
        return Verification(pb.REPLAY_VERDICT_BAD_RECEIPT, problem)
    if proof.HasField("token_ids") and output_sha256(proof.token_ids.ids) != proof.receipt.output_sha256:
        raise ReceiptError.of(ReceiptPart.OUTPUT, "its token ids are not those of the receipt")
    return None


def ask_for_receipt(request: Request) -> None:
    """Makes a request ask for receipts, and for everything that they are checked against."""
    request.output_options.receipt.SetInParent()
    request.output_options.return_token_ids = True


class ReceiptCheck:
    """Checks the receipts of one request's answers.

    Args:
        request: as it is sent at first, with its id.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        params = request.sampling_params
        self._seed = params.seed if params.HasField("seed") else derive_seed(request.request_id)

    def of_answer(self, index: int, token_ids: Sequence[int], finish: pb.Finish) -> Receipt | None:
        """The receipt of an answer that has ended; None if it has none, like an answer that is not `exact`.

        Raises:
            ReceiptError: it belongs to another answer, or to another request.
        """
        if not finish.HasField("receipt"):
            return None
        receipt = finish.receipt
        if problem := contradiction(receipt):
            raise ReceiptError.of(ReceiptPart.RECEIPT, problem)
        # An echoed prompt is not part of the answer.
        own = tuple(token_ids[receipt.prompt_tokens if self._request.output_options.echo else 0 :])
        if receipt.output_sha256 != output_sha256(own) or receipt.output_tokens != len(own):
            raise ReceiptError.of(
                ReceiptPart.OUTPUT, f"the {len(own)} tokens that have come are not those of the receipt"
            )
        said = {"index": (receipt.index, index), "seed": (receipt.seed, str(self._seed))}
        for name, (of_receipt, expected) in said.items():
            if of_receipt != expected:
                raise ReceiptError.of(ReceiptPart.REQUEST, f"{name} is {of_receipt}, and was {expected}")
        return Receipt(receipt, self._request, own)

    @property
    def questions(self) -> list[Unary[Any]]:
        """Calls that return what the request's digest covers: the model, and the token ids of a text prompt."""
        request = self._request
        model = Unary("GetModel", pb.GetModelRequest(model=request.model), _model_of)
        if isinstance(request, pb.ChatRequest):
            return [model, Unary("RenderPrompt", pb.RenderPromptRequest(chat=request), _ids_of)]
        if request.HasField("token_ids"):
            return [model]
        return [model, Unary("Tokenize", pb.TokenizeRequest(model=request.model, text=request.text), _ids_of)]

    def of_request(
        self, receipt: Receipt, finish: pb.Finish, model: pb.Model, prompt: Sequence[int] | None = None
    ) -> Receipt:
        """The receipt, marked as belonging to this request if that can be computed.

        Args:
            receipt: of `of_answer`.
            finish: of the same answer.
            model: the model.
            prompt: the prompt's token ids; None for those of the request.

        Raises:
            ReceiptError: it belongs to another request.
        """
        message, params = receipt.message, self._request.sampling_params
        # Others have served it: other defaults, or other tokens of the same text.
        is_same = (model.weights_digest, model.tokenizer_sha256) == (message.weights_digest, message.tokenizer_sha256)
        ids = self._given_ids if prompt is None else prompt
        room = max(1, model.max_model_len - len(ids))
        is_told = params.HasField("max_tokens") and params.max_tokens <= room
        tries = {min(params.max_tokens, room) if params.HasField("max_tokens") else room}
        if finish.reason == pb.FINISH_REASON_LENGTH:
            tries.add(message.output_tokens)
        if any(self._digest(model, ids, most, message.index) == message.request_sha256 for most in tries):
            return replace(receipt, is_of_request=True)
        if not (is_same and is_told):
            return receipt
        detail = "the prompt's tokens or the sampling parameters are not those that were asked for"
        raise ReceiptError.of(ReceiptPart.REQUEST, detail)

    @property
    def _given_ids(self) -> Sequence[int]:
        request = self._request
        return request.token_ids.ids if isinstance(request, pb.GenerateRequest) else ()

    def _digest(self, model: pb.Model, prompt: Sequence[int], max_tokens: int, index: int) -> bytes:
        given = self._request.sampling_params
        params = pb.SamplingParams()
        for name, off in NEUTRAL.items():
            setattr(params, name, off)
        params.MergeFrom(model.default_sampling_params)
        params.MergeFrom(given)
        params.max_tokens, params.min_tokens = max_tokens, min(given.min_tokens, max_tokens)
        digest = RequestDigest(
            prompt,
            canonical_params(params, params),
            self._seed,
            continues=isinstance(self._request, pb.GenerateRequest),
            keeps_special_tokens=self._request.output_options.keep_special_tokens,
            keeps_delimiters=_sees_delimiters(given) and _has_channels(self._request, model),
            ends_with_first_call=_ends_with_first_call(self._request),
            confined_by=confining(self._request),
        )
        return digest.of_answer(index)


def _sees_delimiters(params: pb.SamplingParams) -> bool:
    """True if stop strings, or a constraint, are about text in which delimiters of channels may be."""
    return bool(params.stop_strings) or params.HasField("constraint")


def _has_tools(request: Request) -> bool:
    """True if tools may be called."""
    if isinstance(request, pb.GenerateRequest):
        return False
    return bool(request.tools) and request.tool_choice.mode != pb.TOOL_MODE_NONE


def _has_channels(request: Request, model: pb.Model) -> bool:
    """True if a router tells reasoning or calls from content."""
    if isinstance(request, pb.GenerateRequest) or _has_tools(request):
        return _has_tools(request)
    separates = request.reasoning.separate if request.reasoning.HasField("separate") else True
    return separates and pb.CAPABILITY_REASONING in model.capabilities


def _ends_with_first_call(request: Request) -> bool:
    """True if an answer ends with its first call."""
    if isinstance(request, pb.GenerateRequest) or not _has_tools(request):
        return False
    return request.HasField("parallel_tool_calls") and not request.parallel_tool_calls


def _model_of(answer: Any) -> pb.Model:
    found: pb.Model = answer.model
    return found


def _ids_of(answer: Any) -> Sequence[int]:
    ids: Sequence[int] = answer.token_ids
    return ids


def _verification(answer: pb.ReplayResponse) -> Verification:
    position = answer.position if answer.HasField("position") else None
    return Verification(answer.verdict, answer.detail, position, answer.worker_id)
