"""A request on its way: what was asked, where it is, and what its RPC handler reads."""

from __future__ import annotations

import asyncio
import hashlib
import string
import struct
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from fissile.receipts import RequestDigest
from fissile.worker.v1 import worker_pb2 as wpb

from common.constraints.library import ENGINE
from common.errors import ApiError, NoWorkerError, SlowClientError
from common.params.pooling import MEAN, Pooling
from common.params.sampling_params import SamplingParams
from common.telemetry.request_record import shown
from common.telemetry.tracing import trace_id_of
from common.wire.adoption import delivered_digest
from common.wire.pooling_protos import worker_pooling
from common.wire.sampling_protos import sampling_to_proto
from router.answers.reading import ChannelTerms
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import StreamChunk
from router.scheduling.failover import Attempts
from router.scheduling.queued_request import QueuedRequest
from router.workers.session import Session
from router.workers.session_state import Adoption, Submission

_CALL_ID_CHARS: Final = string.ascii_letters + string.digits


class ReplacedError(NoWorkerError):
    """No worker has the weights any more that a waiting request was prepared for, and others of its model's name serve.

    Its handler prepares it again; a client never sees this.
    """

    def __init__(self, model: str) -> None:
        super().__init__(f"model {model!r} has other weights now")


@dataclass(frozen=True, slots=True)
class ReceiptTerms:
    """The part of a receipt that is known before the answer.

    Attributes:
        request: digests the canonical request.
        tokenizer_sha256: of the model's tokenizer files.
        template_sha256: of the chat template that made the prompt, "" for none.
        logits_every: the logits of every n-th token are digested, 0 for none.
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
        request_id: the client's, or the one that was made for it.
        identity: `ServedModel.identity` of the model that the prompt was made for.
        weights_digest: of the weights that answer it.
        token_ids: the prompt, uint32.
        params: canonical parameters.
        seed: seed in force (uint64).
        chain_hash: hash of the prompt's last full block, 0 when it has none.
        cache_salt: of the prefix cache; requests of different salts share nothing.
        priority: its class, here and in the worker's scheduler; the same numbers in both protos.
        tenant: who it is for; "" for nobody in particular.
        session_id: the client's session, "" for none.
        granules: of the prompt, for the placement (`prefix_index`), of `granule_tokens` tokens each.
        arrival: monotonic seconds of its arrival at the router.
        deadline: monotonic seconds of the client's deadline, None for none.
        traceparent: W3C trace context of the router's span, "" for none.
        tracestate: W3C trace state.
        choice: which of the request's answers.
        resumed_from: as of `Attempts`.
        prompt_text: text that the client wants in front of the answer; None where it does not.
        keeps_special_tokens: True if special tokens are part of the text.
        receipt: content of the answer's receipt; None where it has none.
        only_worker: address of the one worker that it may go to, "" for any.
        pooling: how the prompt becomes a vector; None for one that is answered.
        reading: terms on which the answer is read in channels; None where it is content alone.
        adoption_key: under which its sequence may be adopted by another router; empty for none.
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
    receipt: ReceiptTerms | None = None
    only_worker: str = ""
    pooling: Pooling | None = None
    reading: ChannelTerms | None = None
    adoption_key: bytes = b""

    @property
    def ids(self) -> dict[str, str]:
        """Fields that name it in a log line, on whatever task the line is written."""
        trace_id = trace_id_of(self.traceparent)
        return {"request_id": shown(self.request_id), **({"trace_id": trace_id} if trace_id else {})}

    @property
    def logits_every(self) -> int:
        """The logits of every n-th token are digested, 0 for none."""
        return 0 if self.receipt is None else self.receipt.logits_every

    def call_id(self, call: int) -> str:
        """Id of a call of a tool: nine letters and digits, as the strictest templates want it.

        A function of seed and prompt: the latter makes it another one in each turn of a conversation.
        """
        place = struct.pack("<QII", self.seed, self.choice, call)
        number = int.from_bytes(hashlib.blake2b(self.token_ids.tobytes(), key=place, digest_size=8).digest())
        return "".join(_CALL_ID_CHARS[number // len(_CALL_ID_CHARS) ** i % len(_CALL_ID_CHARS)] for i in range(9))

    def queued(self, key: int) -> QueuedRequest:
        """The request as the dispatcher knows it, under the number `key` of this router."""
        return QueuedRequest(
            key,
            self.identity,
            len(self.token_ids),
            self.arrival,
            self.deadline,
            tenant=self.tenant,
            priority=self.priority,
            session=self.session_id,
            # All of a mean's tokens are computed, wherever some are cached.
            granules=() if self.pooling == MEAN else self.granules,
            granule_tokens=self.granule_tokens,
            most_tokens=len(self.token_ids) + self.params.max_tokens,
            numerics=self.resumed_from or None,
            grammar_engine=ENGINE if self.params.grammar else "",
            only_worker=self.only_worker,
            shared_tokens=self._shared_tokens,
        )

    @property
    def _shared_tokens(self) -> int:
        """Tokens of the prompt but the last one, which every answer computes."""
        return len(self.token_ids) - 1

    def to_record(
        self, rid: int, *, must_keep: bool, has_generated: bool, may_adopt: bool = False
    ) -> wpb.SubmitSequence:
        """The request as the worker gets it, without what depends on the frame.

        Args:
            rid: of the attempt.
            must_keep: whether the worker may not give it back.
            has_generated: whether an earlier attempt has brought a token, and before it the logprobs of given ones.
            may_adopt: whether the worker lets other routers adopt it.
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
    """Futures that are resolved in order of their coming, `per_turn` of them in each turn of the event loop."""

    def __init__(self, per_turn: int = STREAMS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, future: asyncio.Future[None]) -> None:
        """Resolves `future` when its turn comes; one that is cancelled meanwhile takes no turn."""
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
    """A request on its way, as its RPC handler sees it.

    Attributes:
        on_submit: told the worker's id at every submission.
        session: where it runs, None while it is queued.
        rid: of the attempt under way.
        written_tokens: tokens that have been written to the client.
        written_reasoning_tokens: those of reasoning among them.
        attempts: the workers it was submitted to.
        was_returned: whether a worker has given it back for lack of room.
        refused_by: the address of the worker that has refused it last, "" for none.
        worker_version: version of Fissile on the worker that it was submitted to last.
        is_adopted: whether its attempt goes on with a sequence of another router, or asks for one.

    One handler calls `next`, and nobody else.
    """

    def __init__(
        self,
        queued: QueuedRequest,
        request: RoutedRequest,
        assembly: StreamAssembly,
        on_submit: Callable[[str], None],
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
        self._pacer = pacer
        # Future of the handler that waits for news, until it has been given its turn.
        self._waiter: asyncio.Future[None] | None = None
        # Who writes, or waits for its turn to write.
        self._writer: asyncio.Task[object] | None = None
        self._is_writing = False
        # When the message that is being written was first seen to wait.
        self._waits_since: float | None = None

    def follow(self, earlier: RequestStream) -> None:
        """Goes on for a stream of the same request that has not begun."""
        self.attempts, self.was_returned, self.refused_by = earlier.attempts, earlier.was_returned, earlier.refused_by

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
        """Waits until a message has gone out, or the client is dropped: one that reads nothing would hold its handler,
        and with it its request id and its tenant's place, for ever.

        Raises:
            ApiError: the client has been dropped.
        """
        self._waits_since = None
        self._is_writing = True
        try:
            await self._unless_dropped(write)
        except grpc.aio.InternalError:
            # Raised by gRPC when the client has gone while the write waited for it.
            raise asyncio.CancelledError from None
        finally:
            self._is_writing = False

    def note_written(self) -> None:
        """Counts as written what has been taken."""
        self.written_tokens, self.written_reasoning_tokens = self.assembly.written_tokens()

    async def turn(self, lock: asyncio.Lock) -> None:
        """Takes a lock that the writers of one call share, or ends like `written` when the client is dropped meanwhile:
        who has it may wait for the client for ever.

        Raises:
            ApiError: the client has been dropped.
        """
        await self._unless_dropped(lock.acquire())

    async def _unless_dropped(self, work: Awaitable[object]) -> None:
        writer = self._writer = asyncio.current_task()
        try:
            await work
        except asyncio.CancelledError:
            # It was not `wake`, or not `wake` alone.
            if self._writer is not None or writer is None or writer.uncancel() or self.assembly.error is None:
                raise
            raise self.assembly.error from None
        finally:
            self._writer = None

    def wake(self) -> None:
        """The assembly has changed."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._pacer.join(waiter)
        if self._writer is not None and self.assembly.is_dropped:
            self._writer.cancel()
            self._writer = None

    def drop_if_stuck(self, now: float, timeout_s: float) -> None:
        """Drops the client if a message has waited for it since an earlier look, for `timeout_s` or longer."""
        if not self._is_writing:
            return
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since >= timeout_s:
            self.assembly.drop(SlowClientError(self.assembly.unread.num_tokens, now - self._waits_since))
            self.wake()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with a status."""
        self.assembly.fail(error)
        self.wake()

    def drop(self, error: ApiError) -> None:
        """Ends the stream with a status, also where a message waits for its client."""
        self.assembly.drop(error)
        self.wake()

    def begin(self, session: Session, rid: int, now: float, *, must_keep: bool) -> Submission:
        """A new attempt on a worker: the prompt, and behind it what has come so far (rule S5)."""
        self._begin_attempt(session, rid, now)
        request, generated = self.request, self.assembly.token_ids
        token_ids = request.token_ids + generated if generated else request.token_ids
        has_generated, may_adopt = self.assembly.has_generated, session.may_adopt
        record = request.to_record(rid, must_keep=must_keep, has_generated=has_generated, may_adopt=may_adopt)
        return Submission(record, token_ids, self, request.deadline)

    def begin_adoption(self, session: Session, rid: int, now: float) -> Adoption:
        """An attempt that goes on with the sequence of another router, behind what has come so far (rule S12)."""
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
        alone, have = self.queued.alone, self.assembly.num_tokens
        self.attempts.begin(session.worker_id, session.numerics, have, now, alone=alone)
        self.assembly.worker_id = session.worker_id
        self.worker_version = session.version
        self.on_submit(session.worker_id)
        self.assembly.begin_attempt()
