"""The audit of KV blocks: digests of workers are compared, and a worker whose digest is wrong is taken out.

`router.audit.kv_check` compares the digests, and `router.audit.decide` decides which worker was wrong: by a third
worker's digest of the block, or by having workers compute the block again. That needs a request with the block's
tokens, one of the newest that this router had answered. If another router had the request, only a third worker's digest
decides. One dispute is settled at a time. Others that arise meanwhile most likely have the same cause, and arise again
if not.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, NoWorkerError
from common.limits import AUDIT_TIMEOUT_S, KV_DIGEST_WAIT_S, MAX_RECENT_REQUESTS, MAX_RECENT_TOKENS
from common.wire.kv_digests import block_names
from router.api.answers import AnswerRequest
from router.api.request_builder import receipt_terms
from router.audit.answer_auditor import ERROR, FAILED, SUSPECTED, UNANSWERED
from router.audit.decide import Ask, AuditRun, ConfirmedAnswer, OpenVerdict, Wrong
from router.audit.kv_check import Dispute, KvCheck, Witness
from router.audit.rerun import FinishedRequest, Rerunner
from router.audit.verdicts import Verdicts
from router.model_registry import ServedModel
from router.requests.stream import RequestStream
from router.workers.session import Session

_LABEL_BYTES: Final = 8

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Recent:
    """A request, with the tokens of its prompt and of one answer."""

    finished: FinishedRequest
    token_ids: array[int]

    def tokens_of(self, name: bytes) -> array[int] | None:
        """The tokens up to the end of a block, None if the request does not have the block."""
        size = self.finished.model.block_size
        names = block_names(self.token_ids, size, self.finished.model.hash_seed)
        return next((self.token_ids[: (i + 1) * size] for i, each in enumerate(names) if each == name), None)


class RecentRequests:
    """The newest answered requests: at most MAX_RECENT_REQUESTS, with MAX_RECENT_TOKENS tokens together."""

    def __init__(self) -> None:
        self._kept: deque[_Recent] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, finished: FinishedRequest, token_ids: array[int]) -> None:
        """Keeps a request, with the tokens of its prompt and of one answer."""
        self._kept.append(_Recent(finished, token_ids))
        self._num_tokens += len(token_ids)
        while len(self._kept) > MAX_RECENT_REQUESTS or self._num_tokens > MAX_RECENT_TOKENS:
            self._num_tokens -= len(self._kept.popleft().token_ids)

    async def find(self, dispute: Dispute) -> tuple[FinishedRequest, array[int]] | None:
        """A request that has the block of a dispute, and its tokens up to the block's end."""
        kept = [
            each
            for each in reversed(self._kept)
            if (each.finished.routed.identity, each.finished.numerics) == dispute.kv_class
        ]
        return await asyncio.to_thread(_find, kept, dispute.name)


class KvAuditor:
    """Compares the digests of KV blocks that the workers of one router send.

    Args:
        rerunner: runs requests again.
        verdicts: acts on workers that were wrong.

    Attributes:
        check: the digests.
        counts: disputes, by result.
    """

    def __init__(self, rerunner: Rerunner, verdicts: Verdicts) -> None:
        self.check = KvCheck()
        # With zeros, because the first failure must be seen as an increase.
        self.counts = Counter(dict.fromkeys((FAILED, SUSPECTED, UNANSWERED, ERROR), 0))
        self._rerunner = rerunner
        self._verdicts = verdicts
        self._recent = RecentRequests()
        self._instances: dict[str, str] = {}
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Pairs of workers in a dispute without a decision that were logged.
        self._named: set[frozenset[str]] = set()
        self._label_key = secrets.token_bytes(16)

    def answered(self, request: AnswerRequest, model: ServedModel, streams: Sequence[RequestStream]) -> None:
        """Keeps a request for a while: workers may differ about a block of its tokens."""
        for stream in streams[:1]:
            finished = FinishedRequest(request, stream.request, model, stream.attempts.numerics)
            self._recent.add(finished, stream.request.token_ids + array("I", stream.assembly.token_ids))

    def take(self, session: Session, digests: Iterable[wpb.KvDigest]) -> None:
        """Compares digests of a worker with those of others; a difference starts a dispute."""
        if session.model is None:
            return
        kv_class = (session.model.identity, session.numerics)
        witness = Witness(session.worker_id, session.instance_id, kv_class)
        self._instances[session.worker_id] = session.instance_id
        accepting = self._rerunner.workers(*kv_class)
        for each in digests:
            dispute = self.check.take(witness, each.name, each.digest, accepting)
            if dispute is not None and (self._task is None or self._task.done()):
                self._task = asyncio.create_task(self._settle(dispute), name="kv audit")
        self._came.set()

    async def stop(self) -> None:
        """Ends the current dispute."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _settle(self, dispute: Dispute) -> None:
        try:
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                found = await self._recent.find(dispute)
                decision = await self._decide(dispute, found)
                if isinstance(decision, Wrong):
                    await self._conclude(dispute, decision, None if found is None else found[0])
                else:
                    self._leave_open(dispute)
        except (ApiError, TimeoutError) as error:
            # No worker is to blame: one is gone, or none has room.
            self.counts[ERROR] += 1
            log.info("kv audit broke off", block=self._label(dispute), why=str(error) or "timeout")

    def _label(self, dispute: Dispute) -> str:
        """Name of the block for operators. It is keyed, so that they cannot guess the block's tokens with it."""
        return hashlib.blake2b(dispute.name, digest_size=_LABEL_BYTES, key=self._label_key).hexdigest()

    async def _decide(
        self, dispute: Dispute, found: tuple[FinishedRequest, array[int]] | None
    ) -> Wrong | ConfirmedAnswer | OpenVerdict:
        """Has workers compute a block until one is known to be wrong, or no other worker can compute it."""
        case = dispute.case
        if dispute.contradicts_itself:
            return Wrong(case.answer.worker_id, is_certain=True)
        while isinstance(decision := case.next(self._rerunner.workers(*dispute.kv_class)), Ask):
            if found is None:
                return OpenVerdict()
            case.runs.append(AuditRun(decision.worker_id, await self._ask(dispute, *found, decision.worker_id)))
        return decision

    async def _ask(self, dispute: Dispute, finished: FinishedRequest, token_ids: array[int], worker_id: str) -> bytes:
        """Has a worker compute a block again, and returns the digest.

        Raises:
            ApiError: the worker cannot compute it now, or sent no digest.
        """
        # So that the next digest is of the new computation.
        self.check.forget(dispute.kv_class, dispute.name, worker_id)
        # With a token after it, the block is computed like any other.
        await self._rerunner.prefix(finished, token_ids + token_ids[:1], worker_id)
        witness = Witness(worker_id, self._instances.get(worker_id, ""), dispute.kv_class)
        try:
            async with asyncio.timeout(KV_DIGEST_WAIT_S):
                while (digest := self.check.digest(witness, dispute.name)) is None:
                    self._came.clear()
                    await self._came.wait()
                return digest
        except TimeoutError:
            raise NoWorkerError(f"worker {worker_id} has sent no digest of the block") from None

    async def _conclude(self, dispute: Dispute, decision: Wrong, finished: FinishedRequest | None) -> None:
        """Takes the worker out, and keeps the proof of its fault."""
        self.counts[FAILED if decision.is_certain else SUSPECTED] += 1
        await self._verdicts.take_out(decision, *dispute.kv_class)
        log.error(
            "kv audit: a worker computes wrongly" if decision.is_certain else "kv audit: two workers differ",
            worker_id=decision.worker_id,
            asked=_workers_of(dispute),
            block=self._label(dispute),
            request_id="" if finished is None else finished.routed.request_id,
            file="" if finished is None else await self._keep(dispute, decision, finished),
        )

    async def _keep(self, dispute: Dispute, decision: Wrong, finished: FinishedRequest) -> str:
        """Writes a proof against the blamed worker. Returns the file, "" for none.

        The proof is the request, with the answer and all logit digests of another worker: `fissile verify` has the
        blamed one compute them again.
        """
        others = [worker for worker in self._rerunner.workers(*dispute.kv_class) if worker != decision.worker_id]
        if not others or not self._verdicts.keeps:
            return ""
        routed = finished.routed
        terms = receipt_terms(
            finished.request, finished.model, routed.token_ids, routed.params, routed.seed, routed.reading
        )
        again = replace(finished, routed=replace(routed, receipt=replace(terms, logits_every=1)))
        try:
            right = await self._rerunner.answer(again, others[0])
        except ApiError as error:
            log.info("kv audit: no worker computed the answer again", why=str(error))
            return ""
        proof = again.proof(replace(right, worker_id=decision.worker_id))
        return await self._verdicts.write(f"kv-{self._label(dispute)}", proof)

    def _leave_open(self, dispute: Dispute) -> None:
        """Logs once per pair of workers that one of the two is wrong, but not which."""
        self.counts[UNANSWERED] += 1
        workers = frozenset(_workers_of(dispute))
        if workers not in self._named:
            self._named.add(workers)
            log.warning(
                "kv audit: two workers differ, and no request is known that shows it",
                workers=sorted(workers),
                block=self._label(dispute),
            )


def _find(kept: Sequence[_Recent], name: bytes) -> tuple[FinishedRequest, array[int]] | None:
    found = ((each.finished, each.tokens_of(name)) for each in kept)
    return next(((finished, tokens) for finished, tokens in found if tokens is not None), None)


def _workers_of(dispute: Dispute) -> list[str]:
    return sorted({dispute.case.answer.worker_id, *(run.worker_id for run in dispute.case.runs)})
