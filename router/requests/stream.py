"""A request after validation: its parameters, and the stream of its answer that its handler reads."""

from __future__ import annotations

import asyncio
import hashlib
import string
import struct
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import grpc
from fissile.receipts import RequestDigest
from fissile.worker.v1 import worker_pb2 as wpb

from common.constraints.library import ENGINE
from common.errors import ApiError, NoWorkerError, SlowClientError
from common.limits import HEARTBEAT_S
from common.params.pooling import MEAN, Pooling
from common.params.sampling_params import SamplingParams
from common.telemetry.ledger import Ledger
from common.telemetry.names import Stage
from common.telemetry.request_record import shown
from common.telemetry.trace_context import trace_id_of
from common.text.detokenizer import TokenBytes
from common.wire.adoption import delivered_digest
from common.wire.heads import worker_pooling
from common.wire.sampling_protos import sampling_to_proto
from router.answers.channel_reader import ChannelTerms
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import StreamChunk, WorkerReport
from router.scheduling.failover import Attempts
from router.scheduling.lane_waits import QueueWait
from router.scheduling.queued_request import PlacementChoice, QueuedRequest
from router.workers.session import Session
from router.workers.session_state import Adoption, RouterSession, Submission

# Gets a worker's id, and why the placement chose it.
SubmitListener: TypeAlias = Callable[[str, PlacementChoice | None], None]
_CALL_ID_CHARS: Final = string.ascii_letters + string.digits


class ReplacedError(NoWorkerError):
    """The weights that a waiting request was prepared for are gone, and its model is served with other weights.

    Its handler prepares the request again; clients never see this error.
    """

    def __init__(self, model: str) -> None:
        super().__init__(f"model {model!r} has other weights now")


@dataclass(frozen=True, slots=True)
class ReceiptTerms:
    """The part of a receipt that is known before the answer.

    Attributes:
        request: digest of the canonical request.
        tokenizer_sha256: digest of the model's tokenizer files.
        template_sha256: digest of the chat template that made the prompt, "" for none.
        logits_every: digest the logits of every n-th token, 0 for none.
    """

    request: RequestDigest
    tokenizer_sha256: str
    template_sha256: str
    logits_every: int = 0


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request that has passed validation.

    Attributes:
        model: name of its model.
        request_id: the client's id, or a generated one.
        identity: `ServedModel.identity` of the model that the prompt was made for.
        weights_digest: digest of the weights that answer it.
        token_ids: the prompt, uint32.
        params: canonical parameters.
        seed: the seed in use, uint64.
        chain_hash: hash of the prompt's last full block, 0 when it has none.
        cache_salt: salt of the prefix cache; requests with different salts share no KV.
        priority: its class, here and in the worker's scheduler; the same numbers in both protos.
        tenant: its tenant; "" for none.
        session_id: the client's session, "" for none.
        granules: names of the prompt's granules (`prefix_index`), of `granule_tokens` tokens each.
        arrival: monotonic seconds of its arrival at the router.
        deadline: monotonic seconds of the client's deadline, None for none.
        traceparent: W3C trace context of the router's span, "" for none.
        tracestate: W3C trace state.
        choice: number of the answer, if the request has several.
        resumed_from: see `Attempts`.
        prompt_text: text to send before the answer; None for none.
        keeps_special_tokens: True if special tokens are part of the text.
        token_bytes: bytes of the tokens of logprobs; None if they are not requested.
        shows_prompt_ids: True if the client gets the prompt's token ids.
        receipt: first part of the answer's receipt; None for no receipt.
        only_worker: address of the one worker that may serve it, "" for any.
        pooling: how the prompt becomes a vector; None for generation.
        reading: how the answer is split into channels; None for content alone.
        adoption_key: key with which another router may adopt its sequence; empty for none.
        ledger: its call's time so far, by stage; None begins with its arrival.
    """

    model: str
    identity: str
    token_ids: array[int]
    params: SamplingParams
    seed: int
    chain_hash: int
    arrival: float
    request_id: str = ""
    cache_salt: bytes = b""
    priority: int = wpb.PRIORITY_NORMAL
    tenant: str = ""
    session_id: str = ""
    granules: Sequence[int] = ()
    granule_tokens: int = 0
    deadline: float | None = None
    traceparent: str = ""
    tracestate: str = ""
    weights_digest: str = ""
    choice: int = 0
    resumed_from: str | None = None
    prompt_text: str | None = None
    keeps_special_tokens: bool = False
    token_bytes: TokenBytes | None = None
    shows_prompt_ids: bool = False
    receipt: ReceiptTerms | None = None
    only_worker: str = ""
    pooling: Pooling | None = None
    reading: ChannelTerms | None = None
    adoption_key: bytes = b""
    ledger: Ledger | None = None

    @property
    def ids(self) -> dict[str, str]:
        """Fields that identify the request in a log line."""
        trace_id = trace_id_of(self.traceparent)
        return {"request_id": shown(self.request_id), **({"trace_id": trace_id} if trace_id else {})}

    @property
    def logits_every(self) -> int:
        """Interval of the tokens whose logits are digested, 0 for none."""
        return 0 if self.receipt is None else self.receipt.logits_every

    def call_id(self, call: int) -> str:
        """Id of a tool call: nine letters and digits, as the strictest chat templates require.

        It depends on seed and prompt, so that it differs between the turns of a conversation.
        """
        place = struct.pack("<QII", self.seed, self.choice, call)
        number = int.from_bytes(hashlib.blake2b(self.token_ids.tobytes(), key=place, digest_size=8).digest())
        return "".join(_CALL_ID_CHARS[number // len(_CALL_ID_CHARS) ** i % len(_CALL_ID_CHARS)] for i in range(9))

    def queued(self, key: int) -> QueuedRequest:
        """The request for the dispatcher, with the router's number `key`."""
        return QueuedRequest(
            key,
            self.identity,
            len(self.token_ids),
            self.arrival,
            self.deadline,
            tenant=self.tenant,
            priority=self.priority,
            session=self.session_id,
            # Mean pooling computes all tokens, even cached ones.
            granules=() if self.pooling == MEAN else self.granules,
            granule_tokens=self.granule_tokens,
            most_tokens=len(self.token_ids) + self.params.max_tokens,
            numerics=self.resumed_from or None,
            grammar_engine=ENGINE if self.params.grammar else "",
            only_worker=self.only_worker,
            shared_tokens=self._shared_tokens,
            wait=self.wait(),
        )

    def wait(self) -> QueueWait:
        """A wait in the router's queue that begins now."""
        return QueueWait(self.request_id, self.tenant, len(self.token_ids))

    @property
    def _shared_tokens(self) -> int:
        """Prompt tokens without the last one, which every answer computes itself."""
        return len(self.token_ids) - 1

    def to_record(
        self, rid: int, *, must_keep: bool, has_generated: bool, may_adopt: bool = False
    ) -> wpb.SubmitSequence:
        """The request's record for a worker, without the fields that depend on the frame.

        Args:
            rid: id of the attempt.
            must_keep: True if the worker must not return it.
            has_generated: True if an earlier attempt generated a token, after the logprobs of the given tokens.
            may_adopt: True if the worker supports adoption.
        """
        params = self.params.without_given_logprobs if has_generated else self.params
        return wpb.SubmitSequence(
            rid=rid,
            prompt_len=len(self.token_ids),
            params=sampling_to_proto(params),
            seed=self.seed,
            choice=self.choice,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
            chain_hash=self.chain_hash,
            cache_salt=self.cache_salt,
            priority=wpb.Priority.ValueType(self.priority),
            keep=must_keep,
            logits_every=self.logits_every,
            shares_prompt=self.params.n > 1,
            pooling=worker_pooling(self.pooling),
            adoption_key=self.adoption_key if may_adopt else b"",
        )


# At 30 to 60 us per write this is about half a millisecond.
STREAMS_PER_TURN: Final = 12


class WritePacer:
    """Wakes streams with new output in their order, `per_turn` of them in each turn of the event loop.

    One step of a worker has output for hundreds of streams, and a write to a client costs tens of microseconds. Woken
    together, the streams would hold the loop for many milliseconds, and frames of workers would be read only after all
    of them. If a router has more to write than it can, a stream whose turn comes late finds more tokens, and sends them
    in one message.
    """

    def __init__(self, per_turn: int = STREAMS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, future: asyncio.Future[None]) -> None:
        """Queues `future` to be resolved in its turn; a cancelled future takes no turn."""
        self._waiting.append(future)
        if len(self._waiting) == 1:
            future.get_loop().call_soon(self._next)

    def _next(self) -> None:
        woken = 0
        while self._waiting and woken < self._per_turn:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                woken += 1
        if self._waiting:
            self._waiting[0].get_loop().call_soon(self._next)


class RequestStream:
    """A request from its arrival to its last message, as its RPC handler sees it.

    Only that handler calls `next`.

    Attributes:
        on_submit: called with the worker's id, and why it was chosen, at every submission.
        session: the session it runs on, None while it is queued.
        rid: id of the current attempt.
        written_tokens: tokens written to the client.
        written_reasoning_tokens: reasoning tokens among them.
        attempts: its attempts on workers.
        was_returned: True if a worker has returned it for lack of room.
        refused_by: address of the worker that refused it last, "" for none.
        worker_version: Fissile version of the worker that it was last submitted to.
        is_adopted: True if the current attempt adopts a sequence of another router, or tries to.
        ledger: the request's time by stage.
    """

    def __init__(
        self,
        queued: QueuedRequest,
        request: RoutedRequest,
        assembly: StreamAssembly,
        on_submit: SubmitListener,
        pacer: WritePacer,
    ) -> None:
        self.queued = queued
        self.request = request
        self.assembly = assembly
        self.on_submit = on_submit
        self.session: Session | None = None
        self.rid = 0
        self.written_tokens = self.written_reasoning_tokens = 0
        self.attempts = Attempts(request.resumed_from)
        self.was_returned = False
        self.refused_by = ""
        self.worker_version = ""
        self.is_adopted = False
        self.ledger = Ledger(Stage.QUEUE, request.arrival) if request.ledger is None else request.ledger.fork()
        # When it left its worker, whose last frame has the text of all its tokens then.
        self._left = 0.0
        # Parts of the current attempt that count as recovery.
        self._recovery: Mapping[Stage, float] = {}
        self._pacer = pacer
        # Future of the handler that waits for output, until the pacer has it.
        self._waiter: asyncio.Future[None] | None = None
        # The task that writes, or waits for the call's lock.
        self._writer: asyncio.Task[object] | None = None
        self._is_writing = False
        # When the current write was first seen to wait.
        self._waits_since: float | None = None

    @property
    def arrival(self) -> float:
        """Monotonic seconds of the request's arrival."""
        return self.request.arrival

    def follow(self, earlier: RequestStream) -> None:
        """Takes over the attempts of an earlier stream of the same request that generated no token."""
        self.attempts, self.was_returned, self.refused_by = earlier.attempts, earlier.was_returned, earlier.refused_by
        self.ledger = earlier.ledger

    async def next(self) -> StreamChunk:
        """Waits for the next part of the answer, and for this stream's turn to write it.

        Raises:
            ApiError: the request has failed.
        """
        has_turn = not self._pacer
        while True:
            if has_turn and (part := self.assembly.next_chunk()) is not None:
                return part
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            if not has_turn:
                self.wake()
            await waiter
            has_turn = True

    async def written(self, write: Awaitable[None]) -> None:
        """Waits until a message has been written or the client is dropped.

        A client that reads nothing would otherwise hold the handler, its request id and its tenant's place for ever.

        Raises:
            ApiError: the client was dropped.
        """
        self._waits_since = None
        self._is_writing = True
        try:
            await self._unless_dropped(write)
        except grpc.aio.InternalError:
            # gRPC raises it if the client goes while the write waits.
            raise asyncio.CancelledError from None
        finally:
            self._is_writing = False

    def note_written(self) -> None:
        """Counts the tokens that the handler has taken as written."""
        self.written_tokens, self.written_reasoning_tokens = self.assembly.written_tokens()

    async def turn(self, lock: asyncio.Lock) -> None:
        """Acquires the lock that the writers of one call share, or raises if the client is dropped meanwhile.

        The holder of the lock may wait for the client for ever.

        Raises:
            ApiError: the client was dropped.
        """
        await self._unless_dropped(lock.acquire())

    async def _unless_dropped(self, work: Awaitable[object]) -> None:
        writer = self._writer = asyncio.current_task()
        try:
            await work
        except asyncio.CancelledError:
            # Another task cancelled it too, not `wake` alone.
            if self._writer is not None or writer is None or writer.uncancel() or self.assembly.error is None:
                raise
            raise self.assembly.error from None
        finally:
            self._writer = None

    def wake(self) -> None:
        """Wakes the handler, because the assembly has changed."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._pacer.join(waiter)
        if self._writer is not None and self.assembly.is_dropped:
            self._writer.cancel()
            self._writer = None

    def drop_if_stuck(self, now: float, timeout_s: float) -> None:
        """Drops the client if the same write has been waiting for `timeout_s` since an earlier call."""
        if not self._is_writing:
            return
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since >= timeout_s:
            self.assembly.drop(SlowClientError(self.assembly.unread.num_tokens, now - self._waits_since))
            self.wake()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error."""
        self.assembly.fail(error)
        self.wake()

    def drop(self, error: ApiError) -> None:
        """Ends the stream with an error, even while a write waits for the client."""
        self.assembly.drop(error)
        self.wake()

    def begin(self, session: Session, rid: int, now: float, *, must_keep: bool) -> Submission:
        """Starts an attempt on a worker with the prompt and the tokens so far (rule S5)."""
        expects_kv = self.attempts.is_handed_over
        self._begin_attempt(session, rid, now)
        request, generated = self.request, self.assembly.token_ids
        token_ids = request.token_ids + generated if generated else request.token_ids
        has_generated, may_adopt = self.assembly.has_generated, session.may_adopt
        record = request.to_record(rid, must_keep=must_keep, has_generated=has_generated, may_adopt=may_adopt)
        record.request_id, record.tenant, record.expects_kv = request.request_id, request.tenant, expects_kv
        return Submission(record, token_ids, self, request.deadline)

    def begin_adoption(self, session: Session, rid: int, now: float) -> Adoption:
        """Starts an attempt that adopts another router's sequence after the tokens so far (rule S12)."""
        self._begin_attempt(session, rid, now)
        self.is_adopted = True
        frame = wpb.Adopt(
            rid=rid,
            key=self.request.adoption_key,
            have=self.assembly.num_tokens,
            digest=delivered_digest(self.assembly.token_ids),
        )
        return Adoption(frame, self, self.request.deadline)

    def _begin_attempt(self, session: Session, rid: int, now: float) -> None:
        self.session, self.rid, self.is_adopted = session, rid, False
        self._account_submission(now)
        alone, have = self.queued.alone, self.assembly.num_tokens
        self.attempts.begin(session.worker_id, session.numerics, have, now, alone=alone)
        self.assembly.worker_id = session.worker_id
        self.worker_version = session.version
        self.on_submit(session.worker_id, self.queued.choice)
        self.assembly.begin_attempt()

    # Accounts.

    def _account_submission(self, now: float) -> None:
        """Notes that a worker gets the request; time after a loss counts as recovery until the next token."""
        if self.ledger.stage is not Stage.RECOVERING:
            self._account_wait(Stage.UNEXPLAINED, now)

    def _account_wait(self, stage: Stage, now: float) -> None:
        """Divides the wait in the router's queue by its causes, and starts `stage`."""
        wait = self.queued.wait
        self.ledger.enter(stage, now, wait.shares())
        if wait.blame is not None:
            self.ledger.blame(*wait.blame)

    def account_return(self, now: float) -> None:
        """Notes that the request is queued again, because its worker had no room or never got it."""
        if self.ledger.stage is not Stage.RECOVERING:
            self.ledger.enter(Stage.QUEUE, now, {Stage.WORKER_QUEUE: now - self.ledger.since})
        self.queued.wait = self.request.wait()

    def account_leave(self, session: RouterSession, now: float) -> None:
        """Notes that the request leaves its worker; without an end of the worker, the session's sums divide its time.

        A worker that is silent longer than its heartbeats are apart is stalled, or the way to it is broken.
        """
        self._left, times = now, self.assembly.times
        if times.report is not None or session.sums is None:
            return
        if times.phase is None:
            report = WorkerReport(self.ledger.since, {}, {}, Stage.WORKER_QUEUE)
        else:
            report = times.phase.report(session.sums, session.told)
        if self.assembly.is_closed and self.assembly.error is None:
            report = replace(report, stage=None)
        elif now - session.heard > 2 * HEARTBEAT_S:
            report = replace(report, stage=Stage.STALL)
        times.report = report

    def account_loss(self) -> None:
        """Notes that the current attempt is lost: its recovery begins with its last token, or with itself."""
        self._account_recovery()
        last = self.assembly.last_token_time
        has_begun = self.attempts.has_begun(self.assembly.num_tokens)
        if self.ledger.stage is Stage.UNEXPLAINED and has_begun and last is not None:
            self.ledger.enter(Stage.RECOVERING, last, self._shares(last))
        else:
            self.ledger.enter(Stage.RECOVERING, self.ledger.since)
        self.queued.wait = self.request.wait()

    def account_end(self, now: float, written: float) -> None:
        """Divides the time until `now`, when the last message is made; `written` is the end of the write before it.

        Time on a worker that does not report its parts stays unexplained. Time after a loss is recovery.
        """
        if self.attempts.is_lost:
            return
        if self.ledger.stage is Stage.QUEUE:
            self._account_wait(Stage.QUEUE, now)
        self._account_recovery()
        report, ledger = self.assembly.times.report, self.ledger
        ended = self.assembly.last_token_time if report is None else report.time
        if ledger.stage is not Stage.UNEXPLAINED or ended is None:
            return
        left = max(ended, self._left)
        ledger.enter((report and report.stage) or Stage.DETOKENIZE, ended, self._shares(ended))
        ledger.enter(Stage.CLIENT_WAIT, left)
        ledger.enter(Stage.DELIVERY, max(left, written))
        ledger.enter(Stage.CLIENT_WAIT, now)

    def _shares(self, until: float) -> dict[Stage, float]:
        """Parts of the time on the worker until `until`, and of the way there and back; takes over its blames."""
        report, ledger = self.assembly.times.report, self.ledger
        if report is None or not report.parts:
            return {}
        for stage, blame in report.blames.items():
            ledger.blame(stage, blame)
        parts = {stage: seconds - self._recovery.get(stage, 0.0) for stage, seconds in report.parts.items()}
        return {Stage.WIRE: max(0.0, until - ledger.since - sum(parts.values())), **parts}

    def _account_recovery(self) -> None:
        """Ends the recovery with the first token of the current attempt, if that has come."""
        self._recovery = {}
        if self.ledger.stage is Stage.RECOVERING and self.attempts.has_begun(self.assembly.num_tokens):
            self.ledger.enter(Stage.UNEXPLAINED, self.assembly.start.time)
            decode = self.assembly.times.decode
            self._recovery = {} if decode is None else decode.parts
