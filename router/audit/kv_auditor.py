"""The comparison of KV blocks between workers, and what follows where two differ.

`router.audit.kv_check` compares the digests that workers send, and `router.audit.decide` decides who was
wrong: by a third worker that has the block too, or by having workers compute it again. For that a request is needed
whose tokens are those of the block: one of the last that this router has had answered. Where there is none, as when
another router had it, only a third worker's digest decides. One dispute is settled at a time; those that come meanwhile
are of the same fault, most likely, and come again if not.
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
from router.audit.decide import Ask, Passed, Run, Unanswered, Wrong
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
        """Its tokens up to the end of a block, None where it does not have the block."""
        size = self.finished.model.block_size
        names = block_names(self.token_ids, size, self.finished.model.hash_seed)
        return next((self.token_ids[: (i + 1) * size] for i, each in enumerate(names) if each == name), None)


class RecentRequests:
    """The newest requests that have been answered: at most MAX_RECENT_REQUESTS, of MAX_RECENT_TOKENS together."""

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
        verdicts: what is done about workers that were wrong.

    Attributes:
        check: the digests.
        counts: disputes, by what came of them.
    """

    def __init__(self, rerunner: Rerunner, verdicts: Verdicts) -> None:
        self.check = KvCheck()
        self.counts: Counter[str] = Counter()
        self._rerunner = rerunner
        self._verdicts = verdicts
        self._recent = RecentRequests()
        self._instances: dict[str, str] = {}
        self._came = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Workers that differed when nobody could say which was wrong, and that have been named.
        self._named: set[frozenset[str]] = set()
        self._label_key = secrets.token_bytes(16)

    def answered(self, request: AnswerRequest, model: ServedModel, streams: Sequence[RequestStream]) -> None:
        """Keeps a request for a while: workers may differ about a block of its tokens."""
        for stream in streams[:1]:
            finished = FinishedRequest(request, stream.request, model, stream.attempts.numerics)
            self._recent.add(finished, stream.request.token_ids + array("I", stream.assembly.token_ids))

    def take(self, session: Session, digests: Iterable[wpb.KvDigest]) -> None:
        """Compares what a worker says with what others have said."""
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
        """Ends the dispute under way."""
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
            # It says nothing of any worker: one has gone, or none has room.
            self.counts[ERROR] += 1
            log.info("kv audit broke off", block=self._label(dispute), why=str(error) or "timeout")

    def _label(self, dispute: Dispute) -> str:
        """Stands for the block before operators, who cannot try with it what tokens the block has."""
        return hashlib.blake2b(dispute.name, digest_size=_LABEL_BYTES, key=self._label_key).hexdigest()

    async def _decide(
        self, dispute: Dispute, found: tuple[FinishedRequest, array[int]] | None
    ) -> Wrong | Passed | Unanswered:
        """Has workers compute a block until it is known which one was wrong."""
        case = dispute.case
        if dispute.contradicts_itself:
            return Wrong(case.answer.worker_id, is_certain=True)
        while isinstance(decision := case.next(self._rerunner.workers(*dispute.kv_class)), Ask):
            if found is None:
                return Unanswered()
            case.runs.append(Run(decision.worker_id, await self._ask(dispute, *found, decision.worker_id)))
        return decision

    async def _ask(self, dispute: Dispute, finished: FinishedRequest, token_ids: array[int], worker_id: str) -> bytes:
        """The digest of a block that a worker computes anew.

        Raises:
            ApiError: the worker cannot compute it now, or has sent no digest.
        """
        # The next one is of what it computes now.
        self.check.forget(dispute.kv_class, dispute.name, worker_id)
        # One token behind the block, so that it is computed as any other.
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
        """Takes the worker out, and keeps what shows its fault."""
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
        """Keeps the request with the answer and the digests of all logits of a worker that is not blamed, for
        `fissile verify` to have the blamed one compute them again. Returns the file, "" for none."""
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
        """Says once of two workers that one of them is wrong, when nobody knows which."""
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
