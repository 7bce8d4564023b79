"""The Session with one worker: the shell that dials, writes frames and reads them (design-details section 2).

One writer task and one reader task per stream: two writers on one call would end it. In this version a broken stream
ends its requests; the rules that reconcile them come with failover. `Link` decides what is written; `SessionEvents`
takes what is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
import structlog
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.limits import CONNECT_TIMEOUT_S, HEARTBEAT_S, LEASE_S, MISSED_HEARTBEATS, REDIAL_S
from router.assembly import GapError
from router.link import Link, ProtocolError
from router.model_registry import ServedModel, WorkerRefusedError, describe
from router.tokenizer_store import TokenizerStore

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

log = structlog.get_logger(__name__)

_SessionCall = grpc.aio.StreamStreamCall[wpb.SessionRequest, wpb.SessionResponse]
# A channel of its own per dial: no back-off of an earlier attempt delays a worker that has just come up.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)


class SessionLostError(Exception):
    """The Session has ended, or could not begin; the message says why in one line."""


class WorkerNotReadyError(SessionLostError):
    """The worker answers, and says itself that it takes no work now: nothing is wrong."""


class SessionEvents(Protocol):
    """Who takes what a Session reads. Called on the event loop, never concurrently."""

    def session_opening(self, session: Session) -> None:
        """The worker has been described. Raises WorkerRefusedError when it must not get a Hello."""
        ...

    def session_closed(self, session: Session) -> None:
        """The session's life is over, whatever came of it. Called exactly once."""
        ...

    def session_up(self, session: Session, welcome: wpb.Welcome) -> None:
        """The worker takes work. Raises WorkerRefusedError when it can not be used."""
        ...

    def step_output(self, session: Session, step: wpb.StepOutput) -> None:
        """Tokens, ends and load. Raises GapError or ProtocolError when the Session must be closed."""
        ...

    def heartbeat(self, session: Session, heartbeat: wpb.Heartbeat) -> None:
        """The load, from a worker that had nothing else to say."""
        ...

    def renew_lease(self, session: Session) -> None:
        """The worker must hear from this router; a Lane frame does it (rule S6)."""
        ...

    def draining(self, session: Session) -> None:
        """The worker takes no new work."""
        ...

    def session_down(self, session: Session, why: str) -> None:
        """The stream has ended. Called exactly once for each `session_up` that returned."""
        ...


class Session:
    """One life of the stream with the worker at `address`.

    Attributes:
        address: host:port; the worker's key in the fleet.
        link: what is to be written, and the sequences that run there.
        model: what the worker serves.
        worker_id: the worker's own name.
        instance_id: the worker's process.
        served: whether the worker has taken work in this life.
    """

    def __init__(self, address: str, router_id: str, clock: Callable[[], float]) -> None:
        self.address = address
        self.link = Link(router_id, LEASE_S)
        self.worker_id = ""
        self.instance_id = ""
        self.model: ServedModel | None = None
        self.served = False
        self._clock = clock
        self._to_write = asyncio.Event()
        self._frames_read = 0
        self._announced = 0.0

    def notify(self) -> None:
        """Wakes the writer: `link` has something to write."""
        self._to_write.set()

    async def run(self, store: TokenizerStore, events: SessionEvents) -> NoReturn:
        """Dials, and serves until the stream ends.

        Raises:
            SessionLostError: always, with the reason.
        """
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            try:
                await self._dial(WorkerServiceStub(channel), store, events)
            except grpc.aio.AioRpcError as error:
                raise SessionLostError(f"{error.code().name}: {error.details()}") from None
            except (WorkerRefusedError, GapError, ProtocolError) as error:
                raise SessionLostError(str(error)) from None
            finally:
                events.session_closed(self)
        raise SessionLostError("the worker closed the session")

    async def _dial(self, stub: WorkerServiceAsyncStub, store: TokenizerStore, events: SessionEvents) -> None:
        description = await stub.GetWorker(wpb.GetWorkerRequest(), timeout=CONNECT_TIMEOUT_S)
        if description.state != wpb.WORKER_STATE_SERVING:
            state = wpb.WorkerState.Name(description.state).removeprefix("WORKER_STATE_").lower()
            raise WorkerNotReadyError(f"the worker is {state}")
        self.worker_id, self.instance_id = description.worker_id, description.instance_id
        # Before the Hello: a second one of this router would end the stream that the first one opened.
        events.session_opening(self)
        self.model = describe(description, await store.assets(description, stub))
        call: _SessionCall = stub.Session()
        try:
            welcome = await self._greet(call)
            if welcome.instance_id != self.instance_id:
                raise SessionLostError("the worker was restarted meanwhile")
            events.session_up(self, welcome)
            self.served = True
            await self._serve(call, events)
        finally:
            call.cancel()

    async def _greet(self, call: _SessionCall) -> wpb.Welcome:
        hello = self.link.next_frame(self._clock())
        if hello is None:
            raise ValueError("a Session runs once")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.write(hello)
                first = await call.read()
        except TimeoutError:
            raise SessionLostError("no Welcome in time") from None
        if not isinstance(first, wpb.SessionResponse) or first.WhichOneof("frame") != "welcome":
            raise SessionLostError("the first frame is not a Welcome")
        return first.welcome

    async def _serve(self, call: _SessionCall, events: SessionEvents) -> None:
        why = "the router is shutting down"
        try:
            await _first_of(self._read(call, events), self._write(call), self._watch(events))
            why = "the worker closed the session"
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
            raise
        except (SessionLostError, GapError, ProtocolError) as error:
            why = str(error)
            raise
        finally:
            events.session_down(self, why)

    async def _read(self, call: _SessionCall, events: SessionEvents) -> None:
        # `read`, not `async for`: gRPC forbids a call to mix the two, and the Welcome was read alone.
        while isinstance(frame := await call.read(), wpb.SessionResponse):
            self._frames_read += 1
            kind = frame.WhichOneof("frame")
            if kind == "step_output":
                events.step_output(self, frame.step_output)
            elif kind == "heartbeat":
                events.heartbeat(self, frame.heartbeat)
            elif kind == "draining":
                events.draining(self)
            elif kind == "welcome":
                raise ProtocolError("a second Welcome")

    async def _write(self, call: _SessionCall) -> None:
        while True:
            self._to_write.clear()
            while (frame := self.link.next_frame(self._clock())) is not None:
                if frame.WhichOneof("frame") == "lane":
                    self._announced = self._clock()
                await call.write(frame)
            await self._to_write.wait()

    async def _watch(self, events: SessionEvents) -> None:
        """Renews the lease and finds out that the worker is silent (rule S10).

        Silence is counted in turns of this loop, so that a pause of the router itself is not taken for the worker's.
        """
        seen, silent = self._frames_read, 0
        while silent < MISSED_HEARTBEATS + 1:
            await asyncio.sleep(HEARTBEAT_S)
            silent = silent + 1 if self._frames_read == seen else 0
            seen = self._frames_read
            if self._clock() - self._announced >= LEASE_S / 3:
                events.renew_lease(self)
        raise SessionLostError(f"no frame for {silent * HEARTBEAT_S} s")


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends, ends the others, and raises what that one raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_connected(open_session: Callable[[], Session], store: TokenizerStore, events: SessionEvents) -> NoReturn:
    """Dials a worker for ever, every 250 ms while it can not be used; logs changes only."""
    last = ""
    while True:
        session = open_session()
        tell = log.warning
        try:
            await session.run(store, events)
        except WorkerNotReadyError as error:
            why, tell = str(error), log.info
        except SessionLostError as error:
            why = str(error)
        # A bug in handling one worker must not take the others' requests with it.
        except Exception:
            log.exception("session failed", worker=session.address)
            why = "session failed"
        if session.served or why != last:
            tell("worker not usable", worker=session.address, why=why)
        last = why
        await asyncio.sleep(REDIAL_S)
