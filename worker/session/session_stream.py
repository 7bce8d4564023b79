"""I/O of a Session: one task reads frames, one writes them, one watches the lease.

WorkerSession decides. The fate of the router's sequences depends on how the stream ended: a router that closes it is
done with them, a broken stream may be resumed (`StreamEnd`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError, NoWorkerError
from worker.session.fleet_backlog import FleetLanes
from worker.session.router_state import RouterSequences, SessionEngine
from worker.session.session import WorkerSession
from worker.session.worker_info import WorkerFacts

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# After a pause of this process, the router's frames may have arrived without being read.
_LEASE_GRACE_S = 0.05
_GOODBYE_GRACE_S = 0.05


class StreamEnd(enum.Enum):
    """End of a stream."""

    OVER = enum.auto()
    """The router closed it, broke the protocol or let its lease end, or the worker has finished: nothing is kept."""
    BREAK = enum.auto()
    """Anything else: the router may come back for its sequences within the lease (S4)."""
    FENCED = enum.auto()
    """A newer stream of the router has taken its place, and the sequences with it."""


class SessionStream:
    """I/O of one router's stream.

    Attributes:
        state: decides.
        ending: how the stream ended; BREAK until then.
    """

    def __init__(
        self,
        hello: wpb.Hello,
        sequences: RouterSequences,
        facts: WorkerFacts,
        engine: SessionEngine,
        lanes: FleetLanes,
        clock: Callable[[], float] = time.monotonic,
        intake: wpb.Intake.ValueType = wpb.INTAKE_OPEN,
    ) -> None:
        self._clock = clock
        self._to_write = asyncio.Event()
        self._finishing = False
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ending = StreamEnd.BREAK
        self.state = WorkerSession(hello, sequences, facts, engine, lanes, clock(), self._to_write.set, intake)

    async def run(self, context: Context) -> None:
        """Serves until the router ends the stream, or until `finish` or `fence`.

        Raises:
            ApiError: the status that the stream must end with.
        """
        work = (self._read(context), self._write(context), self._watch_lease(), self._stopped)
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self.ending = StreamEnd.OVER
        except ApiError:
            if self.ending is StreamEnd.BREAK:
                self.ending = StreamEnd.OVER
            raise
        finally:
            self.state.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self) -> None:
        """Ends the stream with OK when everything has been written."""
        self._finishing = True
        self._to_write.set()

    def fence(self) -> None:
        """Ends the stream because its router has opened a newer one. It reads and writes nothing from now on (S4)."""
        self.ending = StreamEnd.FENCED
        message = f"router {self.state.router_id} has opened a newer session"
        self._stop(ApiError(grpc.StatusCode.ABORTED, message, reason="FENCED"))

    def cut(self) -> None:
        """Ends the stream at once, with unwritten output, because its engine has failed."""
        self.ending = StreamEnd.OVER
        self._stop(NoWorkerError("the engine has failed, and another one starts"))

    def _stop(self, error: ApiError) -> None:
        self.state.close()
        if not self._stopped.done():
            self._stopped.set_exception(error)

    async def _read(self, context: Context) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            self.state.receive(frame, self._clock())
        # A broken connection may look like a goodbye at first; this task is cancelled then.
        await asyncio.sleep(_GOODBYE_GRACE_S)

    async def _write(self, context: Context) -> None:
        while True:
            self._to_write.clear()
            now = self._clock()
            frame = self.state.next_frame(now)
            if frame is not None:
                await context.write(frame)
            elif self._finishing or self.state.is_closed:
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.state.silent_for(now)):
                        await self._to_write.wait()

    async def _watch_lease(self) -> None:
        state = self.state
        while True:
            await asyncio.sleep(state.lease_left(self._clock()))
            if state.lease_left(self._clock()) > 0:
                continue
            await asyncio.sleep(_LEASE_GRACE_S)
            if state.lease_left(self._clock()) <= 0:
                message = f"no frame for {state.lease_s:g} s: the router's sequences are cancelled"
                raise ApiError(grpc.StatusCode.ABORTED, message, reason="LEASE_EXPIRED")
