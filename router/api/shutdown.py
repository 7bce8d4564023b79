"""The open calls of a router. When the router ends, each gets a status of ours before the gRPC server stops.

gRPC itself would end a call with UNAVAILABLE "Cancelling all calls", even if the client received a part of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from common.errors import RouterEndingError
from common.rpc.interruption import InterruptedWorkError, Interruptible


class OpenCalls:
    """The open calls of one router.

    Attributes:
        has_ended: True once the router refuses new calls.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._held = 0
        self._works: set[Interruptible] = set()
        self._none_held = asyncio.Event()
        self._none_held.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Counts a call while the block runs; a drain waits for it.

        Raises:
            RouterEndingError: the router has ended.
        """
        if self.has_ended:
            raise RouterEndingError
        self._held += 1
        self._none_held.clear()
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._none_held.set()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets `end` interrupt the block. For work before the first message of an answer.

        Raises:
            RouterEndingError: the router has ended.
        """
        if self.has_ended:
            raise RouterEndingError
        work = Interruptible()
        try:
            with work:
                self._works.add(work)
                yield
        except InterruptedWorkError:
            raise RouterEndingError from None
        finally:
            self._works.discard(work)

    async def wait_until_none(self) -> None:
        """Waits until no call is held."""
        await self._none_held.wait()

    def end(self) -> None:
        """Interrupts all interruptible calls and refuses new ones."""
        self.has_ended = True
        for work in self._works:
            work.interrupt()
