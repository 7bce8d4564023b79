"""The Session's shell: one task reads frames, one writes them, one watches the lease.

What happens is decided in SessionState. A break of the stream, for whatever reason, cancels the router's sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from common.telemetry.tracing import Tracing
from worker.facts import WorkerFacts
from worker.fleet_lanes import FleetLanes
from worker.session_state import Engine, SessionState

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

# After a pause of this process itself, what the router has sent is there but not read yet.
_LEASE_GRACE_S = 0.05


class SessionStream:
    """One router's stream.

    Attributes:
        state: what decides.
    """

    def __init__(
        self,
        hello: wpb.Hello,
        facts: WorkerFacts,
        engine: Engine,
        lanes: FleetLanes,
        tracing: Tracing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._to_write = asyncio.Event()
        self._finishing = False
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.state = SessionState(hello, facts, engine, lanes, tracing, clock(), self._to_write.set)

    async def run(self, context: Context) -> None:
        """Serves until the router ends the stream, `finish` or `end`.

        Raises:
            ApiError: the status that the stream must end with.
        """
        work = (self._read(context), self._write(context), self._watch_lease(), self._ending)
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.state.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self) -> None:
        """Ends the stream with OK when everything has been written."""
        self._finishing = True
        self._to_write.set()

    def end(self, error: ApiError) -> None:
        """Ends the stream with an error."""
        if not self._ending.done():
            self._ending.set_exception(error)

    async def _read(self, context: Context) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            self.state.receive(frame, self._clock())

    async def _write(self, context: Context) -> None:
        while True:
            self._to_write.clear()
            now = self._clock()
            frame = self.state.next_frame(now)
            if frame is not None:
                await context.write(frame)
            elif self._finishing:
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
