"""Gives the doors of a worker its engine: requests, embeddings, aborts by id, load, state and facts.

All doors of a worker share one adapter, so an id can be aborted through any of them. A servicer uses it so:

    async with adapter.scope(context):                        # an ApiError becomes the call's status
        async with adapter.call(DOOR, request, context) as call:  # checks, admits and submits: acceptance
            while not call.is_done:
                for event in await call.next_events():        # raises ApiError if an answer fails
                    await context.write(...)

Leaving the block ends in the engine what still runs, so a peer's reset of the stream or its deadline cancels. The log
line of the RPC says what the request was and how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar, cast

import grpc
import structlog
from fissile.seed import derive_seed
from fissile.worker.v1 import worker_pb2 as wpb

from common.config import Config
from common.errors import (
    ApiError,
    DuplicateRequestError,
    EngineError,
    InvalidFieldError,
    NoOutputHeadError,
    UnknownModelError,
)
from common.limits import MAX_ANSWERS, MAX_ENDED_IDS, MAX_REQUEST_ID_BYTES, TOKENIZE_THREADS
from common.params.pooling import EMBED_PARAMS, LAST, VECTORS, Pooling, Vectors, finished
from common.telemetry.request_record import current_record
from common.telemetry.trace_context import traceparent_of
from common.text.answer_text import AnswerText
from common.text.tokenizer import Tokenizer
from common.wire.heads import OUTPUT_HEAD
from common.wire.ids import check_id
from worker.config.model_config import ModelConfig
from worker.doors.block_follower import BlockFollower
from worker.doors.door_call import DoorAnswer, DoorCall
from worker.doors.door_request import AbortResult, DoorLoad, DoorRequest, DoorState, EmbeddingRequest, EngineDoor
from worker.doors.door_text import DoorText, PreparedRequest, salt_bytes
from worker.engine.sequence import Sequence
from worker.session.engine_loop import EngineLoop
from worker.session.kv_session import KvSession, new_session
from worker.session.service import WorkerService
from worker.session.worker_info import WorkerFacts

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger(__name__)

_STATES = {
    wpb.WORKER_STATE_STARTING: DoorState.STARTING,
    wpb.WORKER_STATE_SERVING: DoorState.READY,
    wpb.WORKER_STATE_DRAINING: DoorState.DRAINING,
    wpb.WORKER_STATE_FAILED: DoorState.FAILED,
}


class DoorAdapter:
    """The engine as doors see it.

    Args:
        service: admits direct calls, and knows the worker's state.
        engine: runs the sequences.
        tokenizer: of the model; None without one.
        config: of the engine; its `model` is the checkpoint's folder.
        model_config: of the model.
        files: the tokenizer's files, by name.
        clock: monotonic seconds.

    Attributes:
        engine, config, model_config, files: as given.
    """

    def __init__(
        self,
        service: WorkerService,
        engine: EngineLoop,
        tokenizer: Tokenizer | None,
        config: Config,
        model_config: ModelConfig,
        files: Mapping[str, bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.config = config
        self.model_config = model_config
        self.files = files
        self._service = service
        self._tokenizer = tokenizer
        self._clock = clock
        self._threads = ThreadPoolExecutor(TOKENIZE_THREADS, "door-text")
        self._text: DoorText | None = None
        self._live: dict[str, DoorCall] = {}
        # Ids of ended requests, and of their KV sessions, the oldest first.
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ended_sessions: OrderedDict[str, None] = OrderedDict()
        # Doors, and what the log has said about their peers.
        self._said: set[tuple[str, str]] = set()

    # Facts.

    @property
    def facts(self) -> WorkerFacts:
        """The worker's description; `max_model_len` is 0 until the model is loaded."""
        return self._service.facts

    def check_model(self, model: str) -> None:
        """Checks a request's model: its name, the checkpoint's folder, or "" for the only one there is.

        Raises:
            UnknownModelError: another model is named.
        """
        if model not in ("", self.facts.model, self.config.model):
            raise UnknownModelError(model, [self.facts.model])

    @property
    def text(self) -> DoorText:
        """The text side of the loaded model."""
        if self._text is None or self._text.facts is not self.facts:
            self._text = DoorText(self._tokenizer, self.model_config, self.facts)
        return self._text

    @property
    def state(self) -> DoorState:
        """State of the worker."""
        state = _STATES[self._service.state]
        return DoorState.CORDONED if state is DoorState.READY and self._service.is_cordoned else state

    @property
    def load(self) -> DoorLoad:
        """Load of the engine; all 0 before its start."""
        report, figures = self.engine.load, self.engine.figures
        if report is None or figures is None:
            return DoorLoad()
        return DoorLoad(
            running_seqs=figures.running,
            decoding_seqs=report.decoding_seqs,
            waiting_seqs=report.waiting_seqs,
            waiting_tokens=report.waiting_tokens,
            used_blocks=report.total_blocks - report.free_blocks,
            total_blocks=report.total_blocks,
            busy_s=self.engine.busy_s(self._clock()),
        )

    @property
    def default_pooling(self) -> Pooling:
        """Pooling of a request that gives none."""
        own = self.facts.default_pooling
        return LAST if own is None or own not in VECTORS else own

    async def flush_cache(self) -> int:
        """Drops the cached blocks that no sequence holds. Returns their number.

        Raises:
            EngineError: the engine does not run.
        """
        return await self.engine.flush()

    # Requests.

    def scope(self, context: Context) -> AbstractAsyncContextManager[None, None]:
        """Spans an RPC: counts it for the drain, and turns an ApiError into its status."""
        # Its type does not say that no error is swallowed.
        return cast("AbstractAsyncContextManager[None, None]", self._service.scope(context))

    @asynccontextmanager
    async def call(self, door: EngineDoor, request: DoorRequest, context: Context) -> AsyncIterator[DoorCall]:
        """Accepts a request, and ends it with the block.

        Raises:
            ApiError: on entry, the request is not accepted; fields have the peer's names.
        """
        with self._place(request):
            try:
                self._require_head()
                request_id = self._new_id(request.request_id)
                work = self.text.prepare
                prepared = work(request) if DoorText.is_quick(request) else await self._in_thread(work, request)
            except ApiError as error:
                raise door.renamed(error) from None
            self._say_missing(door, context)
            if request.session is not None and not prepared.expects_kv:
                self._say_once(door, "a KV session is of other weights, numerics or tiers: its prompt is computed")
            async with self._running(request, request_id, prepared, context) as call:
                yield call

    async def embed(self, door: EngineDoor, request: EmbeddingRequest, context: Context) -> tuple[Vectors, int]:
        """The vector of a prompt, float32, and the number of its tokens.

        Raises:
            ApiError: the request is not accepted, with the peer's names of fields, or it failed.
        """
        plain = DoorRequest((), cache_salt=request.cache_salt, returns_text=False)
        with self._place(plain):
            try:
                pooling, size = self._checked_pooling(request), self.facts.hidden_size
                request_id = self._new_id(request.request_id)
                salt_bytes(request.cache_salt)
                token_ids = await self._in_thread(self.text.prompt_ids, request.prompt)
            except ApiError as error:
                raise door.renamed(error) from None
            self._say_missing(door, context)
            prepared = PreparedRequest(token_ids, EMBED_PARAMS)
            async with self._running(plain, request_id, prepared, context, pooling) as call:
                states = await call.pooled()
        if not states:
            raise EngineError("the model gives no numbers for this prompt")
        return finished(states, request.dimensions or size, normalize=request.normalize), len(token_ids)

    def follow_blocks(self, start: int, *, wants_snapshot: bool) -> BlockFollower:
        """A subscriber's view of the cached blocks from batch `start` on; 0 for the next batch.

        Args:
            start: number of the first wanted batch.
            wants_snapshot: True to begin with all blocks if `start` is 0.
        """
        return BlockFollower(self.engine, start, wants_snapshot=wants_snapshot)

    def abort(self, request_id: str) -> AbortResult:
        """Ends a request; its stream ends with finishes of FinishKind.ABORTED."""
        call = self._live.get(request_id)
        if call is None:
            return AbortResult.ALREADY_FINISHED if request_id in self._ended else AbortResult.UNKNOWN
        if call.is_over:
            return AbortResult.ALREADY_FINISHED
        call.abort()
        return AbortResult.ABORTED

    def abort_session(self, session_id: str) -> AbortResult:
        """Ends the requests of a KV session. Their blocks stay in the tiers, where any prompt may find them."""
        calls = [call for call in self._live.values() if call.session is not None]
        found = [call.request_id for call in calls if call.session and call.session.session_id == session_id]
        results = {self.abort(request_id) for request_id in found}
        if AbortResult.ABORTED in results:
            return AbortResult.ABORTED
        is_known = bool(results) or session_id in self._ended_sessions
        return AbortResult.ALREADY_FINISHED if is_known else AbortResult.UNKNOWN

    @property
    def num_sessions(self) -> int:
        """Number of running requests that have a KV session."""
        return sum(call.session is not None for call in self._live.values())

    def abort_all(self) -> int:
        """Ends all requests of all doors. Returns their number."""
        return sum(self.abort(request_id) is AbortResult.ABORTED for request_id in list(self._live))

    # Used by the methods above.

    def _place(self, request: DoorRequest) -> AbstractContextManager[None]:
        """Counts a request's sequences from before it is checked, because it may wait for a thread with its prompt."""
        self._service.require_open()
        given = request.params.get("n", 1)
        return self._service.direct_place(given if isinstance(given, int) and 1 <= given <= MAX_ANSWERS else 1)

    def _require_head(self) -> None:
        if self.facts.head != OUTPUT_HEAD:
            raise NoOutputHeadError(self.facts.model)

    def _checked_pooling(self, request: EmbeddingRequest) -> Pooling:
        pooling, size = request.pooling or self.default_pooling, self.facts.hidden_size
        if pooling not in VECTORS:
            raise InvalidFieldError("pooling", f"is {pooling!r}", " or ".join(VECTORS))
        if request.dimensions is not None and not 1 <= request.dimensions <= size:
            raise InvalidFieldError("dimensions", f"is {request.dimensions}", f"1 to {size}")
        return pooling

    def _new_id(self, given: str) -> str:
        """The request's id, which must not be live."""
        check_id("request_id", given, MAX_REQUEST_ID_BYTES)
        if given in self._live:
            raise DuplicateRequestError(given)
        return given or uuid.uuid4().hex

    async def _in_thread(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    @asynccontextmanager
    async def _running(
        self,
        request: DoorRequest,
        request_id: str,
        prepared: PreparedRequest,
        context: Context,
        pooling: Pooling | None = None,
    ) -> AsyncIterator[DoorCall]:
        """Runs a checked request while the block lasts."""
        # Another call with this id may have come while this one was checked.
        if request_id in self._live:
            raise DuplicateRequestError(request_id)
        arrived, left = self._clock(), context.time_remaining()
        deadline = None if left is None else arrived + left
        session = self._session(request, request_id, prepared)
        call = DoorCall(request_id, prepared.token_ids, self.engine.cancel, session)
        seqs = self._sequences(request, request_id, prepared, pooling, arrived, deadline)
        self._service.note_direct(request_id, len(prepared.token_ids))
        call.begin(
            [
                DoorAnswer(
                    call,
                    seq,
                    AnswerText(None) if pooling else self.text.answer_text(request, prepared),
                    self._service.direct_trace(seq, request_id, context),
                    keeps_stop_token=request.keeps_stop_token,
                )
                for seq in seqs
            ]
        )
        try:
            self._live[request_id] = call
            self.engine.submit(*call.answers)
            yield call
        except asyncio.CancelledError:
            # Peers such as Dynamo leave with the last message, before the status.
            if call.is_done:
                current_record().succeed()
            raise
        finally:
            del self._live[request_id]
            _remember(self._ended, request_id)
            if call.session is not None:
                _remember(self._ended_sessions, call.session.session_id)
            call.close()
            # Observation may fail without failing the request.
            with contextlib.suppress(Exception):
                call.account(current_record(), arrived, self._clock())

    def _sequences(
        self,
        request: DoorRequest,
        request_id: str,
        prepared: PreparedRequest,
        pooling: Pooling | None,
        arrived: float,
        deadline: float | None,
    ) -> list[Sequence]:
        """The sequences of a request, one for each answer."""
        params, salt, limits = prepared.params, salt_bytes(request.cache_salt), self.facts.engine_limits
        seqs = [
            Sequence(
                prepared.token_ids.tolist(),
                limits.block_size,
                # The logprobs of the prompt, which all answers share, come with the first one.
                params if choice == 0 else params.without_given_logprobs,
                seed=derive_seed(request_id) if params.seed is None else params.seed,
                choice=choice,
                arrive_time=arrived,
                deadline=deadline,
                hash_root=limits.hash_root(salt),
                cache_salt=salt,
                priority=request.priority,
                packed_ids=prepared.token_ids.tobytes(),
                shares_prompt=params.n > 1 and request.reads_cache,
                reads_cache=request.reads_cache,
                pooling=pooling,
            )
            for choice in range(params.n)
        ]
        for seq in seqs:
            seq.expects_kv = prepared.expects_kv
        return seqs

    def _session(self, request: DoorRequest, request_id: str, prepared: PreparedRequest) -> KvSession | None:
        """The session that a prefill makes, or that of a request; None without one."""
        if not request.is_context_only:
            return request.session
        facts, rank = self.facts, self.config.parallel_config.data_parallel_rank
        num_blocks = len(prepared.token_ids) // facts.block_size
        return new_session(facts.shared_kv, prepared.kv_name, num_blocks, request_id, rank)

    def _say_missing(self, door: EngineDoor, context: Context) -> None:
        """Logs, once per door, what a peer leaves out although Fissile's own clients and routers send it."""
        has_trace = bool(traceparent_of(context.invocation_metadata()))
        for what, is_there in (("traceparent", has_trace), ("deadline", context.time_remaining() is not None)):
            if not is_there:
                self._say_once(door, f"a peer's call has no {what}")

    def _say_once(self, door: EngineDoor, what: str) -> None:
        if (door.name, what) not in self._said:
            self._said.add((door.name, what))
            log.info(what, door=door.name)


def _remember(ended: OrderedDict[str, None], name: str) -> None:
    """Keeps the id of an ended request or session, so that its abort is told from that of an unknown one."""
    ended[name] = None
    ended.move_to_end(name)
    while len(ended) > MAX_ENDED_IDS:
        ended.popitem(last=False)
