"""WorkerService: the engine's RPCs for routers and direct callers."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import grpc
import structlog
from fissile.seed import derive_seed
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceServicer
from google.protobuf.message import DecodeError

from common.errors import (
    ApiError,
    InvalidFieldError,
    MalformedRequestError,
    NoTokenizerError,
    NoWorkerError,
    QueueFullError,
)
from common.limits import (
    LEASE_S,
    MAX_REQUEST_ID_BYTES,
    MAX_ROUTERS,
    MAX_UNOPENED_SESSIONS,
    MAX_WAITING_CALLS,
    TOKENIZER_CHUNK_BYTES,
)
from common.process.tasks import run_guarded
from common.rpc.auth import caller
from common.rpc.errors import abort
from common.rpc.request_reader import NOT_A_MESSAGE, MessageReads
from common.rpc.unsupported_fields import refuse_unserved
from common.telemetry import names
from common.telemetry.logs import current_request_id, current_trace_id
from common.telemetry.request_record import current_record, shown
from common.telemetry.trace_context import trace_id_of
from common.telemetry.tracing import SpanFactory
from common.wire.ids import check_id
from worker.engine.sequence import Sequence
from worker.session import request_validation
from worker.session.adoption import Orphans
from worker.session.direct_call import DirectCall
from worker.session.engine_loop import EngineLoop, EngineState
from worker.session.fleet_backlog import FleetLanes
from worker.session.request_trace import RequestTrace
from worker.session.router_state import RouterSequences
from worker.session.sequence_builder import build_sequence, check_sequence
from worker.session.sequence_span import sequence_span
from worker.session.session import check_bounds, check_hello, check_owner
from worker.session.session_stream import Context, SessionStream, StreamEnd
from worker.session.step_protos import newest_steps, step_proto
from worker.session.worker_info import WorkerFacts

SERVICE = "fissile.worker.v1.WorkerService"

log = structlog.get_logger(__name__)


class WorkerService(WorkerServiceServicer):
    """The gRPC service of one worker.

    The streaming methods write to their context instead of yielding: a generator that is suspended at a yield is not
    closed when its call is cancelled.

    Args:
        facts: the worker's description; the app replaces it when the model is loaded.
        files: the tokenizer's files, by name.
        engine: runs the sequences.
        tracing: makes a span per sequence.
        clock: monotonic seconds.

    Attributes:
        drain_wanted: set by the Drain RPC, with the seconds that it allows (None: the worker's own default).
    """

    def __init__(
        self,
        facts: WorkerFacts,
        files: Mapping[str, bytes],
        engine: EngineLoop,
        tracing: SpanFactory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.drain_wanted: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._files = files
        self._engine = engine
        self._tracing = tracing
        self._clock = clock
        self._lanes = FleetLanes()
        self._hellos = MessageReads(MAX_UNOPENED_SESSIONS)
        self._sessions: dict[str, SessionStream] = {}
        # Routers with a stream, and routers that may come back for their sequences.
        self._routers: dict[str, RouterSequences] = {}
        self._orphans: Orphans[RouterSequences] = Orphans()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls = 0
        # Number of sequences of direct calls.
        self._num_direct = 0
        self._draining = False
        self._intake = wpb.INTAKE_OPEN
        self._refuses_calls = False

    @property
    def state(self) -> wpb.WorkerState.ValueType:
        """State of the worker, as reported to routers."""
        if self._engine.state is EngineState.FAILED:
            return wpb.WORKER_STATE_FAILED
        if self._draining:
            return wpb.WORKER_STATE_DRAINING
        starting = self._engine.state is EngineState.STARTING or not self.facts.max_model_len
        return wpb.WORKER_STATE_STARTING if starting else wpb.WORKER_STATE_SERVING

    def drain(self, timeout_s: float) -> None:
        """Takes no new work of routers from now on, and tells them so; direct calls are still taken."""
        self._draining = True
        for session in self._sessions.values():
            session.state.drain(self._clock() + timeout_s)

    def refuse_calls(self) -> None:
        """Refuses direct calls too, from now on."""
        self._refuses_calls = True

    async def finish(self, timeout_s: float) -> None:
        """Ends each Session when all its output has been written. Waits at most `timeout_s`, for direct calls too."""
        for session in self._sessions.values():
            session.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def break_sessions(self) -> None:
        """Ends the remaining Sessions at once; their routers may open new ones."""
        for session in self._sessions.values():
            session.cut()

    # Direct calls: of this service, and of the doors of other engine protocols (worker/doors).

    @property
    def is_cordoned(self) -> bool:
        """True if the worker takes no new work, and serves on."""
        return self._intake != wpb.INTAKE_OPEN

    def require_open(self) -> None:
        """Refuses a direct call unless new work is taken.

        Raises:
            NoWorkerError: the worker loads, drains, has failed or is cordoned.
        """
        if self.state != wpb.WORKER_STATE_DRAINING or self._refuses_calls:
            self._require_serving()
        if self.is_cordoned:
            raise NoWorkerError(f"worker {self.facts.worker_id} is cordoned")

    @contextlib.contextmanager
    def direct_place(self, num_seqs: int = 1) -> Iterator[None]:
        """Counts the sequences of a direct call while it runs.

        Raises:
            QueueFullError: too many wait, each of which holds its prompt.
        """
        waiting = self._num_direct - self.facts.max_num_seqs
        if waiting >= MAX_WAITING_CALLS:
            raise QueueFullError(waiting, retry_after_s=1.0)
        self._num_direct += num_seqs
        try:
            yield
        finally:
            self._num_direct -= num_seqs

    def note_direct(self, request_id: str, prompt_tokens: int) -> None:
        """Records what is known about a direct call before its answer begins."""
        record = current_record()
        record.generates, record.request_id = True, request_id
        current_trace_id.set(record.trace_id)
        current_request_id.set(shown(request_id))
        record.model, record.worker_id = self.facts.model, self.facts.worker_id
        record.prompt_tokens = prompt_tokens

    def direct_trace(self, seq: Sequence, request_id: str, context: Context) -> RequestTrace:
        """The span and the log line of a direct call's sequence."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        traceparent = metadata.get(names.TRACEPARENT, "")
        span = sequence_span(
            self._tracing,
            traceparent,
            metadata.get(names.TRACESTATE, ""),
            arrived=seq.arrive_time,
            model=self.facts.model,
            request_id=request_id,
            worker_id=self.facts.worker_id,
        )
        return RequestTrace(0, seq.num_prompt_tokens, span, trace_id_of(traceparent), seq.id, self._engine)

    # RPCs.

    async def Session(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        """Serves one router."""
        async with self.scope(context):
            self._require_serving()
            # Sent separately: combined with the first frame the headers would wait for that frame, and a status could
            # not follow.
            await context.send_initial_metadata(())
            session = await self._open_session(context)
            try:
                await session.run(context)
            finally:
                self._close_session(session)

    async def Generate(self, request: wpb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Answers one prompt."""
        async with self.scope(context):
            self.require_open()
            request_id = request.request_id or uuid.uuid4().hex
            seq = self._direct_sequence(request, request_id, context)
            with self.direct_place():
                call = DirectCall(seq, self.direct_trace(seq, request_id, context))
                self.note_direct(request_id, seq.num_prompt_tokens)
                self._engine.submit(call)
                try:
                    ended = False
                    while not ended:
                        response = await call.next_response()
                        await context.write(response)
                        call.written(response)
                        ended = response.HasField("end")
                finally:
                    self._engine.cancel([seq.id])
                    # Observation may fail without failing the request.
                    with contextlib.suppress(Exception):
                        call.account(current_record(), self._clock())

    async def GetWorker(self, request: wpb.GetWorkerRequest, context: Context) -> wpb.GetWorkerResponse:
        """Describes the worker, at any time."""
        return self.facts.to_proto(self.state, self._engine.draft_counts)

    async def GetTokenizer(self, request: wpb.GetTokenizerRequest, context: Context) -> None:  # type: ignore[override]
        """Sends the tokenizer's files, at any time."""
        async with self.scope(context):
            if not self._files:
                raise NoTokenizerError(self.facts.model)
            # One at a time: the files may be large, and many routers may ask at once.
            places = [
                (name, start)
                for name, data in sorted(self._files.items())
                for start in range(0, max(1, len(data)), TOKENIZER_CHUNK_BYTES)
            ]
            for name, start in places:
                data = self._files[name][start : start + TOKENIZER_CHUNK_BYTES]
                digest = self.facts.tokenizer_sha256 if (name, start) == places[-1] else ""
                await context.write(wpb.GetTokenizerResponse(name=name, data=data, sha256=digest))

    async def Drain(self, request: wpb.DrainRequest, context: Context) -> wpb.DrainResponse:
        """Begins to drain; the worker ends when drained."""
        async with self.scope(context):
            refuse_unserved(request, request_validation.DRAIN)
        if not self.drain_wanted.done():
            self.drain_wanted.set_result(request.deadline_ms / 1000 or None)
        return wpb.DrainResponse(sequences=self._engine.num_live)

    async def SetIntake(self, request: wpb.SetIntakeRequest, context: Context) -> wpb.SetIntakeResponse:
        """Takes or refuses new work from now on; the process and its running sequences continue."""
        async with self.scope(context):
            refuse_unserved(request, request_validation.SET_INTAKE)
            if request.intake not in request_validation.INTAKES:
                raise InvalidFieldError("intake", f"is {request.intake}", "INTAKE_OPEN, _CORDONED or _EVICTING")
            if request.intake != self._intake:
                self._intake = request.intake
                log.info("intake changed", intake=wpb.Intake.Name(request.intake).removeprefix("INTAKE_").lower())
                for session in self._sessions.values():
                    session.state.set_intake(request.intake)
        return wpb.SetIntakeResponse(sequences=self._engine.num_live)

    async def FlushCache(self, request: wpb.FlushCacheRequest, context: Context) -> wpb.FlushCacheResponse:
        """Drops the cached blocks that no sequence holds, before the next step."""
        async with self.scope(context):
            refuse_unserved(request)
            blocks = await self._engine.flush()
            log.info("cache flushed", blocks=blocks)
        return wpb.FlushCacheResponse(blocks=blocks)

    async def ListSteps(self, request: wpb.ListStepsRequest, context: Context) -> wpb.ListStepsResponse:
        """Lists the newest steps, at any time."""
        async with self.scope(context):
            refuse_unserved(request, request_validation.LIST_STEPS)
            ring = self._engine.steps
            records = newest_steps(ring, request)
        now = self._clock()
        return wpb.ListStepsResponse(steps=[step_proto(record, now, ring.unix_offset_s) for record in records])

    # Used by the methods above.

    @asynccontextmanager
    async def scope(self, context: Context) -> AsyncIterator[None]:
        """Counts a call, and turns its error into a status."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        except ApiError as error:
            await abort(context, error)
        except DecodeError:
            await abort(context, MalformedRequestError(NOT_A_MESSAGE))
        except grpc.aio.InternalError:
            # gRPC raises this when the peer disconnects during a read or write.
            raise asyncio.CancelledError from None
        except Exception as error:
            current_record().fault(error)
            await abort(context, ApiError(grpc.StatusCode.INTERNAL, "the worker failed", reason="WORKER_ERROR"))
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _require_serving(self) -> None:
        if self.state != wpb.WORKER_STATE_SERVING:
            state = wpb.WorkerState.Name(self.state).removeprefix("WORKER_STATE_").lower()
            raise NoWorkerError(f"worker {self.facts.worker_id} is {state}")

    async def _open_session(self, context: Context) -> SessionStream:
        """Reads Hello and opens the Session. A router's newest stream fences its older ones (S4)."""
        try:
            async with asyncio.timeout(LEASE_S):
                frame = await self._hellos.wait(context.read())
        except TimeoutError:
            raise ApiError(grpc.StatusCode.ABORTED, "no Hello in time", reason="LEASE_EXPIRED") from None
        if frame is grpc.aio.EOF:
            raise InvalidFieldError("frame", "is missing", "a Hello as the first frame")
        check_bounds(frame)
        hello = check_hello(frame)
        self._require_serving()
        sequences, identity = self._routers.get(hello.router_id), caller.get().identity
        if sequences is None:
            if len(self._routers) >= MAX_ROUTERS:
                message = f"this worker has {MAX_ROUTERS} routers, the most that it may have"
                raise ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="TOO_MANY_ROUTERS")
            sequences = RouterSequences(
                hello.router_id, self.facts, self._engine, self._tracing, identity, self._orphans
            )
            self._routers[hello.router_id] = sequences
        check_owner(hello.router_id, sequences.identity, identity)
        if (older := self._sessions.get(hello.router_id)) is not None:
            older.fence()
        session = SessionStream(hello, sequences, self.facts, self._engine, self._lanes, self._clock, self._intake)
        self._sessions[hello.router_id] = session
        log.info("session opened", router=hello.router_id, peer=context.peer(), live=len(hello.live))
        return session

    def _close_session(self, session: SessionStream) -> None:
        """Ends the router's sequences, or keeps them for the rest of its lease (S6)."""
        router_id = session.state.router_id
        log.info("session ended", router=router_id, how=session.ending.name.lower())
        if session.ending is StreamEnd.FENCED:
            return
        del self._sessions[router_id]
        left = session.state.lease_left(self._clock())
        if session.ending is StreamEnd.OVER or left <= 0 or self._routers[router_id].is_empty:
            self._routers.pop(router_id).end()
            return
        self._routers[router_id].detach(self._clock() + left)
        self._end_lease(router_id)

    def _end_lease(self, router_id: str) -> None:
        """Ends a router's sequences if its lease is over; otherwise checks again later."""
        sequences = self._routers.get(router_id)
        # The router may be back.
        if sequences is None or sequences.lease_end is None:
            return
        left = sequences.lease_end - self._clock()
        if left > 0:
            # Timers may fire early by their resolution, so `_end_lease` compares times itself.
            end = partial(run_guarded, "lease", partial(self._end_lease, router_id), router=router_id)
            asyncio.get_running_loop().call_later(left, end)
            return
        log.info("lease ended", router=router_id)
        self._routers.pop(router_id).end()

    def _direct_sequence(self, request: wpb.GenerateRequest, request_id: str, context: Context) -> Sequence:
        refuse_unserved(request, request_validation.GENERATE)
        check_id("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
        if not request.token_ids:
            raise InvalidFieldError("token_ids", "is empty", "at least one token id")
        limits = self.facts.engine_limits
        token_ids, params = check_sequence(request, limits)
        now, left = self._clock(), context.time_remaining()
        seq = build_sequence(
            request,
            token_ids,
            params,
            limits,
            prompt_len=len(token_ids),
            seed=request.seed if request.HasField("seed") else derive_seed(request_id),
            arrived=now,
            deadline=None if left is None else now + left,
        )
        seq.ledger.request_id = request_id
        return seq
