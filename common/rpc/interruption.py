"""Work that another task can interrupt: like `asyncio.timeout` without a time, for a quarter of its cost."""

from __future__ import annotations

import asyncio
from types import TracebackType


class InterruptedWorkError(Exception):
    """Another task has interrupted the work."""


class Interruptible:
    """Context manager around what one task awaits, which `interrupt` ends.

    After an interruption, leaving the block raises InterruptedWorkError; other cancellations pass through unchanged.
    """

    __slots__ = ("_cancelling", "_is_interrupted", "_task")

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Interrupts the work where it waits; one call is enough."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tells an interruption from a cancellation."""
        if not self._is_interrupted:
            return
        # As in asyncio.Timeout, a cancellation by another task takes precedence.
        if self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise InterruptedWorkError from error
