"""Replay: a finished request is run again, and the result is compared with its receipt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fissile.receipts import VERSION, contradiction, output_sha256
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError, NoWorkerError, OtherModelStateError, WorkerLostError, at_path
from router.answers.logit_digests import ReplayComparison, compare_answer, compare_request
from router.answers.stream_assembly import StreamAssembly
from router.api.answers import AnswerRequest, field_of, request_of
from router.api.in_flight import InFlightCall
from router.api.receipts import receipt_of
from router.api.request_builder import RequestBuilder
from router.model_registry import ModelRegistry, ServedModel
from router.requests.request_router import RequestRouter
from router.requests.stream import RequestStream, RoutedRequest
from router.scheduling.queued_request import PlacementChoice


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a run: the generated tokens, their receipt, and the worker."""

    token_ids: tuple[int, ...]
    receipt: pb.Receipt
    worker_id: str


def check_replay(request: pb.ReplayRequest) -> AnswerRequest:
    """The request to run: as it was sent, with the seed that was in force and without logprobs.

    Raises:
        InvalidFieldError: something is missing, or cannot be replayed.
    """
    if not request.HasField("receipt"):
        raise InvalidFieldError("receipt", "is missing", "the receipt of the answer")
    if request.receipt.version != VERSION:
        raise InvalidFieldError("receipt.version", f"is {request.receipt.version}", f"{VERSION}")
    given = request_of(request)
    with at_path(field_of(given)):
        if given.HasField("resume"):
            raise InvalidFieldError("resume", "is set", "the request as it was sent at first, without resume")
        if not given.request_id and not given.sampling_params.HasField("seed"):
            raise InvalidFieldError("request_id", "is empty", "the id that the request had in the end, or a seed")
    again = copy.deepcopy(given)
    if not given.sampling_params.HasField("seed"):
        again.sampling_params.seed = derive_seed(given.request_id)
    # The comparison does not read logprobs.
    again.output_options.ClearField("logprobs")
    again.output_options.ClearField("logprob_token_ids")
    again.output_options.ClearField("logprobs_kind")
    again.output_options.ClearField("prompt_logprobs")
    again.output_options.ClearField("prompt_logprobs_start")
    again.output_options.receipt.SetInParent()
    return again


def contradiction_of(request: pb.ReplayRequest) -> pb.ReplayResponse | None:
    """The response to a receipt that contradicts itself; None if it does not.

    Raises:
        InvalidFieldError: the receipt is whole, and the given token ids are those of another answer.
    """
    problem = contradiction(request.receipt)
    if problem:
        return pb.ReplayResponse(verdict=pb.REPLAY_VERDICT_BAD_RECEIPT, detail=problem)
    ids = request.token_ids.ids
    if request.HasField("token_ids") and output_sha256(ids) != request.receipt.output_sha256:
        raise InvalidFieldError("token_ids.ids", "are not those of the receipt", "the ids of the answer, or none")
    return None


class Replayer:
    """Runs finished requests again.

    Args:
        builder: builds what workers get of a request.
        requests: runs requests on workers.
        registry: the models.
    """

    def __init__(self, builder: RequestBuilder, requests: RequestRouter, registry: ModelRegistry) -> None:
        self._builder = builder
        self._requests = requests
        self._registry = registry

    async def replay(self, call: InFlightCall, again: AnswerRequest, request: pb.ReplayRequest) -> pb.ReplayResponse:
        """Runs a request again and compares the result with its receipt.

        Args:
            call: the call of Replay.
            again: the request to run, as of `check_replay`.
            request: the request of Replay.

        Raises:
            ApiError: the request cannot be run here now, or failed.
        """
        receipt = request.receipt
        model = self._model(again, receipt)
        call.record.model = call.model = model.name
        only_worker = self._address(request.worker_id, model, receipt.numerics)
        model.check_generates()
        with at_path(field_of(again)):
            routed = await self._builder.build(call, again, model)
        assert routed.receipt is not None
        if routed.receipt.template_sha256 != receipt.template_sha256:
            raise OtherModelStateError("template_sha256", receipt.template_sha256, routed.receipt.template_sha256)
        found = compare_request(receipt, routed.receipt.request, routed.params.n)
        if found is not None:
            return _response(found)
        terms = replace(routed.receipt, logits_every=receipt.logits_every)
        pinned = replace(routed, resumed_from=receipt.numerics, only_worker=only_worker)
        routed = replace(pinned, choice=receipt.index, receipt=terms)
        replayed = await self.run(routed, self._builder.assembly(again, routed, model), call)
        call.record.worker_id, call.record.completion_tokens = replayed.worker_id, len(replayed.token_ids)
        found = compare_answer(receipt, request.token_ids.ids, replayed.receipt, replayed.token_ids)
        return _response(found, replayed)

    async def run(
        self, request: RoutedRequest, assembly: StreamAssembly, call: InFlightCall | None = None
    ) -> ReplayResult:
        """Runs a request to its end.

        Args:
            request: what workers get, with the terms of a receipt.
            assembly: takes its answer.
            call: the call of Replay; None for a run of the router's own.

        Raises:
            ApiError: the run failed; UNAVAILABLE if its worker was lost.
        """
        stream = self._requests.open(request, assembly, _ignore_submission)
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
        """The model with the weights of a receipt and its tokenizer, which finds stop strings."""
        model = self._registry.resumable(request.model, receipt.weights_digest, receipt.numerics)
        # `resumable` accepts any digest for "". A receipt without digests is forged, or of a worker without digests.
        if model.weights_digest != receipt.weights_digest:
            raise OtherModelStateError("weights_digest", "none", model.weights_digest)
        if not (receipt.numerics or self._requests.running.workers_of(model.identity, "")):
            raise OtherModelStateError("numerics", "none", "that of every worker")
        if model.tokenizer_sha256 != receipt.tokenizer_sha256:
            raise OtherModelStateError("tokenizer_sha256", receipt.tokenizer_sha256, model.tokenizer_sha256)
        return model

    def _address(self, worker_id: str, model: ServedModel, numerics: str) -> str:
        """Address of the worker that the request names; "" for any."""
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


def _ignore_submission(worker_id: str, choice: PlacementChoice | None) -> None:
    """A replay does not trace to which worker it was submitted."""


def _response(found: ReplayComparison, replayed: ReplayResult | None = None) -> pb.ReplayResponse:
    return pb.ReplayResponse(
        verdict=found.verdict,
        position=found.position,
        detail=found.detail,
        receipt=None if replayed is None else replayed.receipt,
        worker_id="" if replayed is None else replayed.worker_id,
    )
