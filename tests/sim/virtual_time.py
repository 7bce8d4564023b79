"""An event loop whose time is virtual: it jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(Exception):
    """Every task waits, and no timer is set."""


class _Selector(selectors.SelectSelector):
    """Advances the clock by each requested wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError("nothing is scheduled, and the simulation has not ended")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs a simulation as fast as it computes. No sockets, threads or subprocesses."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._virtual.now

    def advance(self, seconds: float) -> None:
        """Lets time pass while the caller computes, as a busy processor does."""
        self._virtual.now += seconds


def run(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on `loop` and closes it. Tasks that a failure has left are cancelled first."""
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        with contextlib.suppress(StuckError):
            if left:
                loop.run_until_complete(asyncio.wait(left))
        loop.close()
