"""Work that others may break off: what `asyncio.timeout` does without its time, for a quarter of what that costs."""

from __future__ import annotations

import asyncio
from types import TracebackType


class InterruptedWorkError(Exception):
    """Somebody has broken the work off."""


class Interruptible:
    """A context manager around what one task awaits. Where `interrupt` ends that, leaving it raises
    InterruptedWorkError; cancellations by others stay what they are."""

    __slots__ = ("_cancelling", "_is_interrupted", "_task")

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._is_interrupted = False

    def interrupt(self) -> None:
        """Breaks the work off where it waits; once is enough."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tells an interruption from a cancellation."""
        if not self._is_interrupted:
            return
        # As asyncio.Timeout: somebody else's cancellation counts more.
        if self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise InterruptedWorkError from error
