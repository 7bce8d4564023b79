"""The audit: finished answers are computed again on other workers in the background; who was wrong is taken out.

`router.scheduling.audit` decides. Audits run at the lowest priority, one at a time, with cache salts of their own, and
on nobody's account. What comes when as many wait as may is not audited, nor is an answer that several workers have
made, or that a client has brought in parts: it is none of a worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import structlog
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.protobuf import json_format

from common.errors import ApiError, NoWorkerError
from common.limits import AUDIT_TIMEOUT_S, CONNECT_TIMEOUT_S, MAX_AUDITS_WAITING
from common.process.tasks import keep_running
from common.receipts import compare_answer
from common.rpc.tls import Dialer
from router.api.answering import Answering, AnswerRequest, Asked, Kind, receipt_terms
from router.api.receipts import receipt_of
from router.api.replaying import Replayed, Replaying
from router.model_registry import ServedModel
from router.requests.running import RunningRequests
from router.requests.stream import RequestStream, RoutedRequest
from router.scheduling.audit import Ask, AuditCase, AuditSampler, Passed, Run, Unanswered, Wrong
from router.scheduling.fair_queue import LOW
from router.text.prompts import Prompt

_SALT_BYTES: Final = 16
# Names of what came of answers that were chosen.
PASSED, FAILED, SUSPECTED = "passed", "failed", "suspected"
UNANSWERED, DROPPED, ERROR = "unanswered", "dropped", "error"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer that a client has got.

    Attributes:
        asked: the request, as it came.
        request: the request, as workers get it, with the terms of a receipt.
        kind: of the request.
        model: its model.
        prompt: makes its prompt for another cache salt.
        replayed: what the client has got.
    """

    asked: AnswerRequest
    request: RoutedRequest
    kind: Kind
    model: ServedModel
    prompt: Callable[[bytes], Awaitable[Prompt]]
    replayed: Replayed

    def proof(self) -> pb.ReplayRequest:
        """Request, receipt and token ids, for `fissile verify` to find the difference again."""
        proof = pb.ReplayRequest(receipt=self.replayed.receipt, worker_id=self.replayed.worker_id)
        proof.token_ids.ids.extend(self.replayed.token_ids)
        given = proof.chat if isinstance(self.asked, pb.ChatRequest) else proof.generate
        given.MergeFromString(self.asked.SerializeToString())
        given.request_id = self.request.request_id
        # They may depend on the router and on its workers.
        given.sampling_params.max_tokens = self.request.params.max_tokens
        given.sampling_params.min_tokens = self.request.params.min_tokens
        return proof


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Fraction of the answers that are audited, from 0 to 1, and the folder for wrong ones, None for none.

    Named as the options of the command, under which an operator sees them.
    """

    audit: float = 0.0
    audit_dir: Path | None = None


class Auditor:
    """Audits a fraction of the answers of one router.

    Args:
        options: which answers, and where wrong ones are kept.
        answering: makes what takes an answer.
        replaying: runs requests again.
        running: knows the workers.
        dialer: opens channels to them.

    Attributes:
        counts: answers that were chosen, by what came of it.
    """

    def __init__(
        self,
        options: AuditOptions,
        answering: Answering,
        replaying: Replaying,
        running: RunningRequests,
        dialer: Dialer,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._sampler = AuditSampler(options.audit, secrets.token_bytes(16))
        self._folder = options.audit_dir
        self._answering = answering
        self._replaying = replaying
        self._running = running
        self._dialer = dialer
        self._waiting: deque[FinishedAnswer] = deque()
        self._has_work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def answered(self, kind: Kind, asked: Asked, model: ServedModel, streams: Sequence[RequestStream]) -> None:
        """Chooses among the answers to a request; those are audited when their turn comes."""
        if asked.request.HasField("resume"):
            return
        for stream in streams:
            request = stream.request
            is_one_workers = len(stream.attempts) == 1 and stream.attempts.exact
            if not (is_one_workers and self._sampler.wants(request.request_id, request.choice)):
                continue
            terms = request.receipt or receipt_terms(
                kind, asked.request, model, request.token_ids, request.params, request.seed
            )
            receipt = receipt_of(stream, terms)
            if receipt is not None:
                got = Replayed(tuple(stream.assembly.token_ids), receipt, stream.assembly.worker_id)
                prompt = partial(asked.encode, model, "")
                self._take(FinishedAnswer(asked.request, replace(request, receipt=terms), kind, model, prompt, got))

    def _take(self, answer: FinishedAnswer) -> None:
        if len(self._waiting) >= MAX_AUDITS_WAITING:
            self.counts[DROPPED] += 1
            return
        self._waiting.append(answer)
        self._has_work.set()
        if self._task is None:
            self._task = asyncio.create_task(keep_running("audit", self._work), name="audit")

    async def stop(self) -> None:
        """Ends the audit under way, and begins none."""
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
                    # It says nothing of any worker: one has gone, or none has room.
                    self.counts[ERROR] += 1
                    log.info("audit broke off", request_id=answer.request.request_id, why=str(error) or "timeout")
            await self._has_work.wait()

    async def _audit(self, answer: FinishedAnswer) -> None:
        case = AuditCase(Run(answer.replayed.worker_id, answer.replayed.receipt.receipt_sha256))
        runs: list[Replayed] = []
        while isinstance(decision := case.next(self._workers(answer)), Ask):
            runs.append(await self._run(answer, decision.worker_id))
            case.runs.append(Run(decision.worker_id, _output(answer, runs[-1])))
        await self._conclude(answer, decision, runs)

    def _addresses(self, answer: FinishedAnswer) -> dict[str, str]:
        return self._running.workers_of(answer.request.identity, answer.replayed.receipt.numerics)

    def _workers(self, answer: FinishedAnswer) -> list[str]:
        """Workers that could compute an answer, in an order of its own, so that each audits all others."""
        workers = list(self._addresses(answer))
        secrets.SystemRandom().shuffle(workers)
        return workers

    async def _run(self, answer: FinishedAnswer, worker_id: str) -> Replayed:
        """Has a worker compute an answer from its beginning."""
        address = self._addresses(answer).get(worker_id)
        if address is None:
            raise NoWorkerError(f"worker {worker_id} takes no work any more")
        # A salt of its own: nothing comes from a cache, in which a fault may be.
        salt = secrets.token_bytes(_SALT_BYTES)
        prompt = await answer.prompt(salt)
        request = replace(
            answer.request,
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
            resumed_from=answer.replayed.receipt.numerics,
        )
        return await self._replaying.run(request, self._answering.assembly(answer.kind, request, answer.model))

    async def _conclude(
        self, answer: FinishedAnswer, decision: Passed | Unanswered | Wrong, runs: Sequence[Replayed]
    ) -> None:
        if not isinstance(decision, Wrong):
            result = {Passed: PASSED, Unanswered: UNANSWERED}[type(decision)]
            self.counts[result] += 1
            log.debug("audit", result=result, request_id=answer.request.request_id)
            return
        self.counts[FAILED if decision.is_certain else SUSPECTED] += 1
        others = {run.worker_id: run for run in runs}
        found = compare_answer(answer.replayed.receipt, answer.replayed.token_ids, runs[0].receipt, runs[0].token_ids)
        log.error(
            "audit: a worker gives wrong answers" if decision.is_certain else "audit: two workers differ",
            worker_id=decision.worker_id,
            answered_by=answer.replayed.worker_id,
            asked=sorted(others),
            request_id=answer.request.request_id,
            position=found.position,
            difference=found.detail,
            file=await self._write(answer),
        )
        await self._take_out(answer, decision)

    async def _write(self, answer: FinishedAnswer) -> str:
        """Writes what is needed to find the difference again. Returns the file, "" for none."""
        if self._folder is None:
            return ""
        path = self._folder / f"audit-{answer.replayed.receipt.receipt_sha256.hex()[:16]}.json"
        text = json_format.MessageToJson(answer.proof(), preserving_proto_field_name=True, indent=1)
        try:
            await asyncio.to_thread(_write_private, path, text + "\n")
        except OSError as error:
            log.error("audit: the answer cannot be written", file=str(path), why=error.strerror)
            return ""
        return str(path)

    async def _take_out(self, answer: FinishedAnswer, decision: Wrong) -> None:
        """Has a worker take no more work, but for the last one that serves the model.

        What runs there moves elsewhere if it is certain that the worker is wrong.
        """
        addresses = self._addresses(answer)
        address = addresses.get(decision.worker_id)
        if address is None or len(addresses) < 2:
            log.error(
                "audit: the worker is not cordoned: it is gone, or nobody else is there", worker_id=decision.worker_id
            )
            return
        intake = wpb.INTAKE_EVICTING if decision.is_certain else wpb.INTAKE_CORDONED
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with self._dialer.channel(address) as channel:
                wanted = wpb.SetIntakeRequest(intake=intake)
                await WorkerServiceStub(channel).SetIntake(wanted, timeout=CONNECT_TIMEOUT_S)
                log.error("audit: worker cordoned", worker_id=decision.worker_id, evicted=decision.is_certain)


def _output(answer: FinishedAnswer, run: Replayed) -> bytes:
    """Stands for what came out: that of the answer where the two are equal, else the run's own."""
    found = compare_answer(answer.replayed.receipt, answer.replayed.token_ids, run.receipt, run.token_ids)
    is_equal = found.verdict == pb.REPLAY_VERDICT_EQUAL
    return answer.replayed.receipt.receipt_sha256 if is_equal else _identity(run.receipt)


def _identity(receipt: pb.Receipt) -> bytes:
    """Equal for runs with the same tokens and logits."""
    return receipt.output_sha256 + b"".join(digest.to_bytes(8, "little") for digest in receipt.logit_digests)


def _write_private(path: Path, text: str) -> None:
    """Writes a file for this user alone: it has a client's prompt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
