"""Runs finished requests again for audits: at the lowest priority, without a tenant, on a given worker.

Each run has its own cache salt, so that no block comes from a cache, which may be where the fault is.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, replace
from typing import Final

from fissile.v1 import inference_pb2 as pb

from common.errors import NoWorkerError
from common.params.sampling_params import SamplingParams
from router.api.answers import AnswerRequest
from router.api.replay import Replayer, ReplayResult
from router.api.request_builder import RequestBuilder, receipt_terms
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt, given_prompt
from router.requests.running import RunningRequests
from router.requests.stream import RoutedRequest
from router.scheduling.queued_request import LOW

_SALT_BYTES: Final = 16
# More than one token: a step after the one that fills a block digests it.
_PROBE: Final = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that was answered.

    Attributes:
        request: the request, as the client sent it.
        routed: what workers got of it.
        model: its model.
        numerics: class of the workers that answered it.
    """

    request: AnswerRequest
    routed: RoutedRequest
    model: ServedModel
    numerics: str

    def proof(self, replayed: ReplayResult) -> pb.ReplayRequest:
        """Request, receipt and token ids of an answer, for `fissile verify` to find a difference again."""
        proof = pb.ReplayRequest(receipt=replayed.receipt, worker_id=replayed.worker_id)
        proof.token_ids.ids.extend(replayed.token_ids)
        given = proof.chat if isinstance(self.request, pb.ChatRequest) else proof.generate
        given.MergeFromString(self.request.SerializeToString())
        given.request_id = self.routed.request_id
        # Their defaults may depend on the router and on its workers.
        given.sampling_params.max_tokens = self.routed.params.max_tokens
        given.sampling_params.min_tokens = self.routed.params.min_tokens
        return proof


class Rerunner:
    """Runs finished requests again.

    Args:
        builder: makes prompts and assemblies.
        replayer: runs requests.
        running: knows the workers.
    """

    def __init__(self, builder: RequestBuilder, replayer: Replayer, running: RunningRequests) -> None:
        self._builder = builder
        self._replayer = replayer
        self._running = running

    def workers(self, identity: str, numerics: str) -> list[str]:
        """Ids of the workers that take work of a model and numerics class.

        The order is random, so that each worker audits all others.
        """
        workers = list(self._running.workers_of(identity, numerics))
        secrets.SystemRandom().shuffle(workers)
        return workers

    async def answer(self, finished: FinishedRequest, worker_id: str) -> ReplayResult:
        """Has a worker compute an answer from its beginning. `finished.routed` has the terms of a receipt.

        Raises:
            ApiError: the run failed, or the worker takes no more work.
        """
        salt = secrets.token_bytes(_SALT_BYTES)
        prompt = await self._builder.prompt(finished.request, finished.model, "", salt)
        return await self._run(finished, finished.routed, prompt, salt, worker_id)

    async def prefix(self, finished: FinishedRequest, token_ids: array[int], worker_id: str) -> bytes:
        """Has a worker compute a prompt and generate a few tokens. Returns the cache salt.

        Raises:
            ApiError: the run failed, the prompt fills the model's length, or the worker takes no more work.
        """
        salt, model = secrets.token_bytes(_SALT_BYTES), finished.model
        room = model.max_model_len - len(token_ids)
        if room < 1:
            raise NoWorkerError("there is no room behind the prefix")
        params = replace(_PROBE, max_tokens=min(_PROBE.max_tokens, room))
        terms = replace(receipt_terms(finished.request, model, token_ids, params, 0, None), logits_every=0)
        routed = replace(finished.routed, params=params, seed=0, choice=0, receipt=terms, reading=None)
        await self._run(finished, routed, given_prompt(token_ids, model, salt), salt, worker_id)
        return salt

    async def _run(
        self, finished: FinishedRequest, routed: RoutedRequest, prompt: Prompt, salt: bytes, worker_id: str
    ) -> ReplayResult:
        address = self._running.workers_of(routed.identity, finished.numerics).get(worker_id)
        if address is None:
            raise NoWorkerError(f"worker {worker_id} takes no work any more")
        again = replace(
            routed,
            token_ids=prompt.token_ids,
            only_worker=address,
            cache_salt=salt,
            chain_hash=prompt.chain_hash,
            granules=prompt.granules,
            priority=LOW,
            tenant="",
            session_id="",
            deadline=None,
            traceparent="",
            tracestate="",
            resumed_from=finished.numerics,
        )
        return await self._replayer.run(again, self._builder.assembly(finished.request, again, finished.model))
