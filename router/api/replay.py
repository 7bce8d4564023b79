"""Replays: a finished request is run again, and what comes of it is compared with its receipt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fissile.receipts import VERSION, contradiction, output_sha256
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError, NoWorkerError, OtherModelStateError, WorkerLostError, at_path
from router.answers.logit_digests import Finding, compare_answer, compare_request
from router.answers.stream_assembly import StreamAssembly
from router.api.asked import AnswerRequest, Asked, Kind
from router.api.in_flight import InFlightCall
from router.api.receipts import receipt_of
from router.api.request_builder import RequestBuilder
from router.model_registry import ModelRegistry, ServedModel
from router.requests.request_router import RequestRouter
from router.requests.stream import RequestStream, RoutedRequest


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a run: the generated tokens, their receipt, and the worker."""

    token_ids: tuple[int, ...]
    receipt: pb.Receipt
    worker_id: str


def check_replay(request: pb.ReplayRequest) -> AnswerRequest:
    """The request to run, as it was sent but for its seed, which is the one in force.

    Raises:
        InvalidFieldError: something is missing, or cannot be replayed.
    """
    if not request.HasField("receipt"):
        raise InvalidFieldError("receipt", "is missing", "the receipt of the answer")
    if request.receipt.version != VERSION:
        raise InvalidFieldError("receipt.version", f"is {request.receipt.version}", f"{VERSION}")
    kind = request.WhichOneof("request")
    if kind is None:
        raise InvalidFieldError("request", "is missing", "one of generate, chat")
    given: AnswerRequest = request.generate if kind == "generate" else request.chat
    with at_path(kind):
        if given.HasField("resume"):
            raise InvalidFieldError("resume", "is set", "the request as it was sent at first, without resume")
        if not given.request_id and not given.sampling_params.HasField("seed"):
            raise InvalidFieldError("request_id", "is empty", "the id that the request had in the end, or a seed")
    again = copy.deepcopy(given)
    if not given.sampling_params.HasField("seed"):
        again.sampling_params.seed = derive_seed(given.request_id)
    # Nobody reads them.
    again.output_options.ClearField("logprobs")
    again.output_options.ClearField("logprob_token_ids")
    again.output_options.ClearField("logprobs_kind")
    again.output_options.ClearField("prompt_logprobs")
    again.output_options.ClearField("prompt_logprobs_start")
    again.output_options.receipt.SetInParent()
    return again


def contradiction_of(request: pb.ReplayRequest) -> pb.ReplayResponse | None:
    """The response to a receipt that contradicts itself; None where it does not.

    Raises:
        InvalidFieldError: the receipt is whole, and the answer beside it is not the one that it is of.
    """
    problem = contradiction(request.receipt)
    if problem:
        return pb.ReplayResponse(verdict=pb.REPLAY_VERDICT_BAD_RECEIPT, detail=problem)
    ids = request.token_ids.ids
    if request.HasField("token_ids") and output_sha256(ids) != request.receipt.output_sha256:
        raise InvalidFieldError("token_ids.ids", "are not those of the receipt", "the ids of the answer, or none")
    return None


class Replayer:
    """Runs requests again.

    Args:
        builder: makes of a request what workers get.
        requests: sends it on its way.
        registry: the models.
    """

    def __init__(self, builder: RequestBuilder, requests: RequestRouter, registry: ModelRegistry) -> None:
        self._builder = builder
        self._requests = requests
        self._registry = registry

    async def replay(self, kind: Kind, asked: Asked, request: pb.ReplayRequest) -> pb.ReplayResponse:
        """Runs a request again that `check_replay` has made of `request`, and compares.

        Raises:
            ApiError: it cannot be run here now, or has failed.
        """
        receipt = request.receipt
        model = self._model(asked.request, receipt)
        asked.record.model = asked.call.model = model.name
        only_worker = self._address(request.worker_id, model, receipt.numerics)
        model.check_generates()
        with at_path("generate" if kind.continues else "chat"):
            routed = await self._builder.prepare(kind, asked, model)
        assert routed.receipt is not None
        if routed.receipt.template_sha256 != receipt.template_sha256:
            raise OtherModelStateError("template_sha256", receipt.template_sha256, routed.receipt.template_sha256)
        found = compare_request(receipt, routed.receipt.request, routed.params.n)
        if found is not None:
            return _response(found)
        terms = replace(routed.receipt, logits_every=receipt.logits_every)
        pinned = replace(routed, resumed_from=receipt.numerics, only_worker=only_worker)
        again = replace(pinned, choice=receipt.index, receipt=terms)
        replayed = await self.run(again, self._builder.assembly(kind, again, model), asked.call)
        asked.record.worker_id, asked.record.completion_tokens = replayed.worker_id, len(replayed.token_ids)
        found = compare_answer(receipt, request.token_ids.ids, replayed.receipt, replayed.token_ids)
        return _response(found, replayed)

    async def run(
        self, request: RoutedRequest, assembly: StreamAssembly, call: InFlightCall | None = None
    ) -> ReplayResult:
        """Runs a request to its end.

        Args:
            request: the request, with the terms of a receipt.
            assembly: takes its answer.
            call: for whom; None for the router itself.

        Raises:
            ApiError: it has failed; UNAVAILABLE if its worker was lost.
        """
        stream = self._requests.open(request, assembly, _nobody)
        try:
            if call is not None:
                call.streams = (stream,)
            await _read_to_the_end(stream)
            receipt = receipt_of(stream, request.receipt)
            if receipt is None:
                raise OtherModelStateError("receipt.logits_every", "above 0", "0: the worker digests no logits")
            return ReplayResult(tuple(assembly.token_ids), receipt, assembly.worker_id)
        except WorkerLostError as error:
            raise NoWorkerError(f"the replay is not whole: {error}") from None
        finally:
            self._requests.close(stream)

    def _model(self, request: AnswerRequest, receipt: pb.Receipt) -> ServedModel:
        """The model with the weights of a receipt, and with its tokenizer, by which stop strings are searched."""
        model = self._registry.resumable(request.model, receipt.weights_digest, receipt.numerics)
        # There "" stands for any. A receipt without them is of a worker that has none, or was forged.
        if model.weights_digest != receipt.weights_digest:
            raise OtherModelStateError("weights_digest", "none", model.weights_digest)
        if not (receipt.numerics or self._requests.running.workers_of(model.identity, "")):
            raise OtherModelStateError("numerics", "none", "that of every worker")
        if model.tokenizer_sha256 != receipt.tokenizer_sha256:
            raise OtherModelStateError("tokenizer_sha256", receipt.tokenizer_sha256, model.tokenizer_sha256)
        return model

    def _address(self, worker_id: str, model: ServedModel, numerics: str) -> str:
        """Address of the worker that is asked for; "" for any."""
        if not worker_id:
            return ""
        of_class: Mapping[str, str] = self._requests.running.workers_of(model.identity, numerics)
        if worker_id not in of_class:
            known = ", ".join(sorted(of_class))
            raise InvalidFieldError("worker_id", f"is {worker_id!r}", f"a worker of class {numerics}: {known}")
        return of_class[worker_id]


async def _read_to_the_end(stream: RequestStream) -> None:
    while (await stream.next()).ending is None:
        pass


def _nobody(worker_id: str) -> None:
    """Is told of a submission."""


def _response(found: Finding, replayed: ReplayResult | None = None) -> pb.ReplayResponse:
    return pb.ReplayResponse(
        verdict=found.verdict,
        position=found.position,
        detail=found.detail,
        receipt=None if replayed is None else replayed.receipt,
        worker_id="" if replayed is None else replayed.worker_id,
    )
