"""The Session with one worker: the shell that dials, writes frames and reads them (docs/explanation/architecture.md).

Each stream has one writer task and one reader task, because gRPC ends a call with two writers. `RouterSession`
decides which frames are written. `SessionEvents` receives the frames that are read, and how a stream ended (`Fault`).
That decides whether the next stream resumes its sequences (rules S4, S7) or they move to other workers.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
import structlog
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.limits import CONNECT_TIMEOUT_S, HEARTBEAT_S, LEASE_S, MISSED_HEARTBEATS, REDIAL_S
from common.rpc.tls import Dialer
from common.wire.protocol import ADOPTION_MINOR, DECODE_FEATURE, PREFILL_FEATURE
from router.answers.stream_assembly import GapError
from router.model_registry import ServedModel, WorkerRefusedError, describe
from router.prompts.tokenizer_store import TokenizerStore
from router.workers.session_state import ProtocolError, RouterSession

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

log = structlog.get_logger(__name__)

NO_DESCRIPTORS = os.strerror(errno.EMFILE)

_SessionCall = grpc.aio.StreamStreamCall[wpb.SessionRequest, wpb.SessionResponse]
# Each dial has a separate channel, so that the back-off of an earlier attempt does not delay a worker that has just
# started.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # As long as gRPC tries to connect, also after the channel was closed: by default a dial of a port that says nothing
    # keeps its socket for 20 s.
    ("grpc.min_reconnect_backoff_ms", round(CONNECT_TIMEOUT_S * 1000)),
)


class Fault(enum.Enum):
    """Why a Session ended or could not start."""

    BROKEN = enum.auto()
    """The stream broke; the worker may be well (rule S7)."""
    VIOLATION = enum.auto()
    """The worker broke the protocol, or sent tokens that do not continue a sequence."""
    REFUSED = enum.auto()
    """Nothing listens at the address."""
    UNREADY = enum.auto()
    """The worker says that it accepts no work now, or may not be used."""
    SILENT = enum.auto()
    """No frame for several heartbeats (rule S10)."""
    STALLED = enum.auto()
    """The worker's engine step has been running for too long (rule S10)."""
    SHUTDOWN = enum.auto()
    """The router stops."""


class WorkerState(enum.Enum):
    """State of a worker toward new requests of this router."""

    SERVING = enum.auto()
    CORDONED = enum.auto()
    """An operator has cordoned it."""
    DRAINING = enum.auto()
    """It announced its end."""
    LEAVING = enum.auto()
    """It has left this router's list of workers."""
    UNCONNECTED = enum.auto()
    """There is no connection."""


class CordonState(enum.Enum):
    """A serving worker's report about accepting new work."""

    OPEN = enum.auto()
    CORDONED = enum.auto()
    """No new work; running requests stay."""
    EVICTING = enum.auto()
    """No new work; running requests move to other workers if possible."""


class SessionLostError(Exception):
    """The Session ended or could not start; the message says why in one line."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault = fault


class SessionEvents(Protocol):
    """Receiver of a Session's events. Called on the event loop, never concurrently."""

    def session_opening(self, session: Session) -> None:
        """The worker was described; an earlier stream's sequences may be resumed.

        Raises:
            WorkerRefusedError: the worker must not get a Hello.
        """

    def session_closed(self, session: Session, fault: Fault) -> None:
        """The session is over, with or without a stream. Called exactly once."""

    def session_up(self, session: Session, welcome: wpb.Welcome) -> None:
        """The worker said Welcome.

        Raises:
            WorkerRefusedError: the worker cannot be used.
            SessionLostError: the worker is stalled.
        """

    def step_output(self, session: Session, step: wpb.StepOutput) -> None:
        """Handles tokens, ends and load. Raises GapError or ProtocolError if the Session must be closed."""

    def heartbeat(self, session: Session, heartbeat: wpb.Heartbeat) -> None:
        """Handles the load of a worker without output. Raises SessionLostError if it is stalled."""

    def kv_events(self, session: Session, events: wpb.KvEvents) -> None:
        """Handles changes of the worker's prefix cache. Raises SessionLostError if events are missing."""

    def draining(self, session: Session) -> None:
        """The worker drains: it accepts no new work."""

    def orphans_named(self, session: Session, orphans: wpb.Orphans) -> None:
        """The worker still runs sequences of a router that is gone."""

    def session_down(self, session: Session, fault: Fault, why: str) -> None:
        """The stream ended. Called exactly once for each `session_up` that returned."""

    def unusable(self, session: Session, why: str) -> None:
        """The worker could not be reached or was lost; it will be dialled again."""


class Session:
    """One life of the stream with the worker at `address`.

    Attributes:
        address: host:port; the worker's key in the fleet.
        state: frames to write, and the requests that run there.
        model: the model that the worker serves.
        worker_id: the worker's own name.
        instance_id: the worker's process.
        version: the worker's version of Fissile.
        kernels: the worker's kernel back end, with its instruction set.
        speculation: how the worker makes drafts; empty without drafts.
        served: True if the worker said Welcome.
        is_draining: True if the worker announced its end.
        cordon: the worker's last report about new work.
        accepting: True if the worker gets new requests.
        is_parting: True if the stream must end with its last request.
        proto_minor: the worker's protocol version, 0 before Welcome.
        step_tokens: most tokens in one step of the worker, 0 before Welcome.
        lease_s: how long the worker keeps this router's sequences without hearing from it.
    """

    def __init__(
        self,
        address: str,
        router_id: str,
        clock: Callable[[], float],
        dialer: Dialer,
        lease_s: float = LEASE_S,
    ) -> None:
        self.address = address
        self.lease_s = lease_s
        self.state = RouterSession(router_id, lease_s)
        self.worker_id = ""
        self.instance_id = ""
        self.version = ""
        self.kernels = ""
        self.speculation = wpb.Speculation()
        self.model: ServedModel | None = None
        self.served = False
        self.is_draining = False
        self.is_parting = False
        self.cordon = CordonState.OPEN
        self.accepting = False
        self.proto_minor = 0
        self.step_tokens = 0
        self._clock = clock
        self._dialer = dialer
        self._to_write = asyncio.Event()
        self._leaving = False
        self._frames_read = 0
        self._announced = 0.0

    def notify(self) -> None:
        """Wakes the writer, because `state` has changed."""
        if self.is_parting and not self.state.live:
            self._leaving = True
        self._to_write.set()

    @property
    def may_adopt(self) -> bool:
        """True if the worker supports adoption of other routers' sequences."""
        return self.proto_minor >= ADOPTION_MINOR

    @property
    def is_leaving(self) -> bool:
        """True if the stream is being closed."""
        return self._leaving

    @property
    def worker_state(self) -> WorkerState:
        """State of the worker toward new requests."""
        if self.is_draining:
            return WorkerState.DRAINING
        if self.is_parting or self._leaving:
            return WorkerState.LEAVING
        return WorkerState.SERVING if self.cordon is CordonState.OPEN else WorkerState.CORDONED

    @property
    def numerics(self) -> str:
        """Numerics class; unique for a worker that reports none, so that no answer is called exact by mistake."""
        assert self.model is not None
        return self.model.numerics or f"unknown, of instance {self.instance_id}"

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        assert self.model is not None
        return self.model.block_size

    @property
    def role(self) -> str:
        """Half of the work that the worker does: PREFILL_FEATURE, DECODE_FEATURE, or "" for both."""
        assert self.model is not None
        return next((role for role in (PREFILL_FEATURE, DECODE_FEATURE) if role in self.model.features), "")

    def leave(self) -> None:
        """Closes the stream after the last frame, so that the worker does not wait for this router to return."""
        self._leaving = True
        self._to_write.set()

    async def run(self, store: TokenizerStore, events: SessionEvents) -> NoReturn:
        """Dials, and serves until the stream ends.

        Raises:
            SessionLostError: always, with the reason.
        """
        fault = Fault.SHUTDOWN
        async with self._dialer.channel(self.address, _CHANNEL_OPTIONS) as channel:
            try:
                await self._dial(WorkerServiceStub(channel), store, events)
            except (SessionLostError, grpc.aio.AioRpcError, WorkerRefusedError, GapError, ProtocolError) as error:
                lost = _lost(error)
                fault = lost.fault
                raise lost from None
            except Exception:
                fault = Fault.VIOLATION
                raise
            finally:
                events.session_closed(self, fault)
        raise AssertionError("a Session ends with an error")

    async def _dial(self, stub: WorkerServiceAsyncStub, store: TokenizerStore, events: SessionEvents) -> None:
        description = await stub.GetWorker(wpb.GetWorkerRequest(), timeout=CONNECT_TIMEOUT_S)
        # Also for a worker that does not serve: a new instance id proves that the previous process has ended.
        self.worker_id, self.instance_id = description.worker_id, description.instance_id
        self.version, self.kernels = description.version, description.kernels
        self.speculation = description.speculation
        if description.state != wpb.WORKER_STATE_SERVING:
            state = wpb.WorkerState.Name(description.state).removeprefix("WORKER_STATE_").lower()
            raise SessionLostError(Fault.UNREADY, f"the worker is {state}")
        # Before the Hello: a second Hello of this router would end the first one's stream.
        events.session_opening(self)
        self.model = describe(description, await store.assets(description, stub))
        call: _SessionCall = stub.Session()
        try:
            welcome = await self._greet(call)
            if welcome.instance_id != self.instance_id:
                raise SessionLostError(Fault.BROKEN, "the worker was restarted meanwhile")
            events.session_up(self, welcome)
            self.served = True
            await self._serve(call, events)
        finally:
            call.cancel()

    async def _greet(self, call: _SessionCall) -> wpb.Welcome:
        hello = self.state.next_frame(self._clock())
        if hello is None:
            raise ValueError("a Session runs once")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.write(hello)
                first = await call.read()
        except TimeoutError:
            raise SessionLostError(Fault.BROKEN, "no Welcome in time") from None
        if not isinstance(first, wpb.SessionResponse) or first.WhichOneof("frame") != "welcome":
            raise SessionLostError(Fault.BROKEN, "the first frame is not a Welcome")
        return first.welcome

    async def _serve(self, call: _SessionCall, events: SessionEvents) -> None:
        lost = SessionLostError(Fault.SHUTDOWN, "this router has closed the session")
        try:
            await _first_of(self._read(call, events), self._write(call), self._watch())
            if not self._leaving:
                lost = SessionLostError(Fault.BROKEN, "the worker closed the session")
            raise lost
        except (SessionLostError, grpc.aio.AioRpcError, GapError, ProtocolError) as error:
            lost = _lost(error)
            raise
        except Exception:
            lost = SessionLostError(Fault.VIOLATION, "session failed")
            raise
        finally:
            events.session_down(self, lost.fault, str(lost))

    async def _read(self, call: _SessionCall, events: SessionEvents) -> None:
        # `read`, not `async for`: gRPC forbids a call to mix the two, and the Welcome was read alone.
        while isinstance(frame := await call.read(), wpb.SessionResponse):
            self._frames_read += 1
            kind = frame.WhichOneof("frame")
            if kind == "step_output":
                events.step_output(self, frame.step_output)
            elif kind == "heartbeat":
                events.heartbeat(self, frame.heartbeat)
            elif kind == "kv_events":
                events.kv_events(self, frame.kv_events)
            elif kind == "draining":
                events.draining(self)
            elif kind == "orphans":
                events.orphans_named(self, frame.orphans)
            elif kind == "welcome":
                raise ProtocolError("a second Welcome")

    async def _write(self, call: _SessionCall) -> None:
        while True:
            self._to_write.clear()
            while (frame := self.state.next_frame(self._clock())) is not None:
                if frame.WhichOneof("frame") == "lane":
                    self._announced = self._clock()
                try:
                    await call.write(frame)
                except asyncio.InvalidStateError:
                    # The worker ended the stream; the reader finds out how.
                    await asyncio.Event().wait()
            if self._leaving:
                # The worker ends the stream, and the reader notices; no frame may be written now.
                await call.done_writing()
                await asyncio.Event().wait()
            await self._to_write.wait()

    async def _watch(self) -> None:
        """Renews the lease, and detects a silent worker (rule S10).

        Silence is counted in turns of this loop, so that a pause of the router itself does not count.
        """
        seen, silent = self._frames_read, 0
        while silent < MISSED_HEARTBEATS + 1:
            await asyncio.sleep(HEARTBEAT_S)
            silent = silent + 1 if self._frames_read == seen else 0
            seen = self._frames_read
            if self._clock() - self._announced >= self.lease_s / 3:
                self.state.renew_lease()
                self.notify()
        raise SessionLostError(Fault.SILENT, f"no frame for {silent * HEARTBEAT_S} s")


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends, cancels the others, and raises that one's error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _lost(error: Exception) -> SessionLostError:
    """The error as a SessionLostError with its fault."""
    if isinstance(error, SessionLostError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        details = (error.details() or "").removeprefix("failed to connect to all addresses; last error: ")
        if NO_DESCRIPTORS in details:
            # The rest of gRPC's text differs from time to time.
            details = "this process has no file descriptors left; raise its limit of open files (`ulimit -n`)"
        refused = error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in details.lower()
        return SessionLostError(Fault.REFUSED if refused else Fault.BROKEN, f"{error.code().name}: {details}")
    return SessionLostError(Fault.UNREADY if isinstance(error, WorkerRefusedError) else Fault.VIOLATION, str(error))


async def keep_connected(
    open_session: Callable[[], Session],
    store: TokenizerStore,
    events: SessionEvents,
    wanted: Callable[[], bool],
    pause: Callable[[Fault], Awaitable[None]],
) -> None:
    """Dials a worker while `wanted()`: at once after a broken stream, else after a pause. Logs changes only.

    Args:
        open_session: makes the next session.
        store: fetches tokenizers.
        events: receives the sessions' events.
        wanted: False stops the loop.
        pause: waits before the next dial; called with the last session's fault.
    """
    last = ""
    while wanted():
        session, began = open_session(), asyncio.get_running_loop().time()
        fault, why = Fault.VIOLATION, "session failed"
        try:
            await session.run(store, events)
        except SessionLostError as error:
            fault, why = error.fault, str(error)
        # A bug in handling one worker must not take the others' requests with it.
        except Exception:
            log.exception("session failed", worker=session.address)
        if session.served or why != last:
            tell = log.info if fault in (Fault.UNREADY, Fault.SHUTDOWN) else log.warning
            tell("worker not usable", worker=session.address, why=why)
        last = why
        events.unusable(session, why)
        if fault is not Fault.BROKEN or asyncio.get_running_loop().time() - began < REDIAL_S:
            await pause(fault)
