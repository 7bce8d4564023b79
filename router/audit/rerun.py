"""Runs finished requests again, for audits: at the lowest priority, on nobody's account, on a worker that is named.

Each run has a cache salt of its own: nothing comes from a cache, in which a fault may be.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from fissile.v1 import inference_pb2 as pb

from common.errors import NoWorkerError
from common.params.sampling_params import SamplingParams
from router.api.asked import AnswerRequest, Kind
from router.api.replay import Replayer, ReplayResult
from router.api.request_builder import RequestBuilder, receipt_terms
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt, given_prompt
from router.requests.running import RunningRequests
from router.requests.stream import RoutedRequest
from router.scheduling.queued_request import LOW

_SALT_BYTES: Final = 16
# A few steps, since a block is digested by a step after the one that has filled it.
_PROBE: Final = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that has been answered.

    Attributes:
        asked: the request, as it came.
        request: the request, as workers get it.
        kind: of the request.
        model: its model.
        numerics: class of the workers that have answered it.
        prompt: makes its prompt for another cache salt.
    """

    asked: AnswerRequest
    request: RoutedRequest
    kind: Kind
    model: ServedModel
    numerics: str
    prompt: Callable[[bytes], Awaitable[Prompt]]

    def proof(self, replayed: ReplayResult) -> pb.ReplayRequest:
        """Request, receipt and token ids of an answer, for `fissile verify` to find a difference again."""
        proof = pb.ReplayRequest(receipt=replayed.receipt, worker_id=replayed.worker_id)
        proof.token_ids.ids.extend(replayed.token_ids)
        given = proof.chat if isinstance(self.asked, pb.ChatRequest) else proof.generate
        given.MergeFromString(self.asked.SerializeToString())
        given.request_id = self.request.request_id
        # They may depend on the router and on its workers.
        given.sampling_params.max_tokens = self.request.params.max_tokens
        given.sampling_params.min_tokens = self.request.params.min_tokens
        return proof


class Rerunner:
    """Runs requests again.

    Args:
        builder: makes what takes an answer.
        replayer: runs requests.
        running: knows the workers.
    """

    def __init__(self, builder: RequestBuilder, replayer: Replayer, running: RunningRequests) -> None:
        self._builder = builder
        self._replayer = replayer
        self._running = running

    def workers(self, identity: str, numerics: str) -> list[str]:
        """Ids of the workers that take work of a model and numerics class, in an order of its own each time, so that
        each audits all others."""
        workers = list(self._running.workers_of(identity, numerics))
        secrets.SystemRandom().shuffle(workers)
        return workers

    async def answer(self, finished: FinishedRequest, worker_id: str) -> ReplayResult:
        """Has a worker compute an answer from its beginning. The request has the terms of a receipt.

        Raises:
            ApiError: it has failed, or the worker takes no work any more.
        """
        salt = secrets.token_bytes(_SALT_BYTES)
        return await self._run(finished, finished.request, await finished.prompt(salt), salt, worker_id)

    async def prefix(self, finished: FinishedRequest, token_ids: array[int], worker_id: str) -> bytes:
        """Has a worker compute a prompt and a few tokens behind it. Returns the cache salt.

        Raises:
            ApiError: it has failed, there is no room behind the prompt, or the worker takes no work any more.
        """
        salt, model = secrets.token_bytes(_SALT_BYTES), finished.model
        room = model.max_model_len - len(token_ids)
        if room < 1:
            raise NoWorkerError("there is no room behind the prefix")
        params = replace(_PROBE, max_tokens=min(_PROBE.max_tokens, room))
        terms = receipt_terms(finished.kind, finished.asked, model, token_ids, params, 0, None)
        terms = replace(terms, logits_every=0)
        request = replace(finished.request, params=params, seed=0, choice=0, receipt=terms, reading=None)
        await self._run(finished, request, given_prompt(token_ids, model, salt), salt, worker_id)
        return salt

    async def _run(
        self, finished: FinishedRequest, request: RoutedRequest, prompt: Prompt, salt: bytes, worker_id: str
    ) -> ReplayResult:
        address = self._running.workers_of(request.identity, finished.numerics).get(worker_id)
        if address is None:
            raise NoWorkerError(f"worker {worker_id} takes no work any more")
        again = replace(
            request,
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
        return await self._replayer.run(again, self._builder.assembly(finished.kind, again, finished.model))
