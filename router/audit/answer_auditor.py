"""The audit of answers: other workers compute finished answers again in the background; wrong workers are taken out.

`router.audit.decide` decides. Audits run one at a time, at the lowest priority, with their own cache salts, and count
for no tenant. An answer is not audited if too many wait, if several workers generated it, or if the client resumed it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError
from common.limits import AUDIT_TIMEOUT_S, MAX_AUDITS_WAITING
from common.process.tasks import keep_running
from router.answers.logit_digests import compare_answer
from router.api.answers import AnswerRequest
from router.api.receipts import receipt_of
from router.api.replay import ReplayResult
from router.api.request_builder import receipt_terms
from router.audit.decide import Ask, AuditCase, AuditRun, AuditSampler, ConfirmedAnswer, OpenVerdict, Wrong
from router.audit.rerun import FinishedRequest, Rerunner
from router.audit.verdicts import Verdicts
from router.model_registry import ServedModel
from router.requests.stream import RequestStream

# Results of audits.
PASSED, FAILED, SUSPECTED = "passed", "failed", "suspected"
UNANSWERED, DROPPED, ERROR = "unanswered", "dropped", "error"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer that a client received, and its request with the terms of a receipt."""

    finished: FinishedRequest
    replayed: ReplayResult


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of the audits, with the names of the command's options.

    Attributes:
        audit: fraction of the answers that are computed again, from 0 to 1.
        audit_dir: folder for proofs that a worker was wrong, None for none.
        audit_kv: True if digests of KV blocks are compared.
    """

    audit: float = 0.0
    audit_dir: Path | None = None
    audit_kv: bool = True


class AnswerAuditor:
    """Audits a fraction of the answers of one router.

    Args:
        fraction: fraction of the answers.
        rerunner: runs requests again.
        verdicts: acts on workers that were wrong.

    Attributes:
        counts: chosen answers, by result.
    """

    def __init__(self, fraction: float, rerunner: Rerunner, verdicts: Verdicts) -> None:
        # With zeros, because the first failure must be seen as an increase.
        self.counts = Counter(dict.fromkeys((PASSED, FAILED, SUSPECTED, UNANSWERED, DROPPED, ERROR), 0))
        self._sampler = AuditSampler(fraction, secrets.token_bytes(16))
        self._rerunner = rerunner
        self._verdicts = verdicts
        self._waiting: deque[FinishedAnswer] = deque()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def answered(self, request: AnswerRequest, model: ServedModel, streams: Sequence[RequestStream]) -> None:
        """Chooses among the answers to a request; the chosen ones wait for their audit."""
        if request.HasField("resume"):
            return
        for stream in streams:
            routed = stream.request
            has_one_worker = len(stream.attempts) == 1 and stream.attempts.exact
            if not (has_one_worker and self._sampler.wants(routed.request_id, routed.choice)):
                continue
            terms = routed.receipt or receipt_terms(
                request, model, routed.token_ids, routed.params, routed.seed, routed.reading
            )
            receipt = receipt_of(stream, terms)
            if receipt is not None:
                got = ReplayResult(tuple(stream.assembly.token_ids), receipt, stream.assembly.worker_id)
                finished = FinishedRequest(request, replace(routed, receipt=terms), model, receipt.numerics)
                self._take(FinishedAnswer(finished, got))

    def _take(self, answer: FinishedAnswer) -> None:
        if len(self._waiting) >= MAX_AUDITS_WAITING:
            self.counts[DROPPED] += 1
            return
        self._waiting.append(answer)
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(keep_running("audit", self._work), name="audit")

    async def stop(self) -> None:
        """Ends the audits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            self._has_work.clear()
            while self._waiting:
                answer = self._waiting.popleft()
                try:
                    async with asyncio.timeout(AUDIT_TIMEOUT_S):
                        await self._audit(answer)
                except (ApiError, TimeoutError) as error:
                    # No worker is to blame: one is gone, or none has room.
                    self.counts[ERROR] += 1
                    log.info(
                        "audit broke off", request_id=answer.finished.routed.request_id, why=str(error) or "timeout"
                    )
            await self._has_work.wait()

    async def _audit(self, answer: FinishedAnswer) -> None:
        finished, got = answer.finished, answer.replayed
        case = AuditCase(AuditRun(got.worker_id, got.receipt.receipt_sha256))
        runs: list[ReplayResult] = []
        while isinstance(
            decision := case.next(self._rerunner.workers(finished.routed.identity, finished.numerics)), Ask
        ):
            runs.append(await self._rerunner.answer(finished, decision.worker_id))
            case.runs.append(AuditRun(decision.worker_id, _output(answer, runs[-1])))
        await self._conclude(answer, decision, runs)

    async def _conclude(
        self, answer: FinishedAnswer, decision: ConfirmedAnswer | OpenVerdict | Wrong, runs: Sequence[ReplayResult]
    ) -> None:
        if not isinstance(decision, Wrong):
            result = {ConfirmedAnswer: PASSED, OpenVerdict: UNANSWERED}[type(decision)]
            self.counts[result] += 1
            log.debug("audit", result=result, request_id=answer.finished.routed.request_id)
            return
        self.counts[FAILED if decision.is_certain else SUSPECTED] += 1
        others = {run.worker_id: run for run in runs}
        found = compare_answer(answer.replayed.receipt, answer.replayed.token_ids, runs[0].receipt, runs[0].token_ids)
        log.error(
            "audit: a worker gives wrong answers" if decision.is_certain else "audit: two workers differ",
            worker_id=decision.worker_id,
            answered_by=answer.replayed.worker_id,
            asked=sorted(others),
            request_id=answer.finished.routed.request_id,
            position=found.position,
            difference=found.detail,
            file=await self._verdicts.write(
                f"audit-{answer.replayed.receipt.receipt_sha256.hex()[:16]}", answer.finished.proof(answer.replayed)
            ),
        )
        await self._verdicts.take_out(decision, answer.finished.routed.identity, answer.finished.numerics)


def _output(answer: FinishedAnswer, run: ReplayResult) -> bytes:
    """Digest of a run's output: the digest of the answer if the two are equal, else the run's own."""
    found = compare_answer(answer.replayed.receipt, answer.replayed.token_ids, run.receipt, run.token_ids)
    is_equal = found.verdict == pb.REPLAY_VERDICT_EQUAL
    return answer.replayed.receipt.receipt_sha256 if is_equal else _identity(run.receipt)


def _identity(receipt: pb.Receipt) -> bytes:
    """A digest that is equal for runs with the same tokens and logits."""
    return receipt.output_sha256 + b"".join(digest.to_bytes(8, "little") for digest in receipt.logit_digests)
