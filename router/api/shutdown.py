"""The end of a router, as its clients see it: each call ends with a status of ours, before the server ends.

gRPC's own end of a call is UNAVAILABLE "Cancelling all calls", whatever the client has got of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from common.errors import RouterEndingError
from common.rpc.interruption import InterruptedWorkError, Interruptible


class OpenCalls:
    """The calls that a router has in hand.

    Attributes:
        has_ended: True when the router takes no more calls.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._held = 0
        self._works: set[Interruptible] = set()
        self._none_held = asyncio.Event()
        self._none_held.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Counts a call that a drain waits for.

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
        """Lets `end` interrupt what is done here, while the client has got nothing of an answer.

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
        """Interrupts what can be, and refuses what comes."""
        self.has_ended = True
        for work in self._works:
            work.interrupt()
