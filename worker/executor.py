"""Where batches are computed: on the caller's thread, or on one of their own (deferred output).

Processes of their own, the ranks, are in worker.rank_group. All compute one batch at a time, in the order in which they
were submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from worker.batch import ScheduledBatch, ScheduledBatchOutput

Forward = Callable[[ScheduledBatch], ScheduledBatchOutput]


class Executed(NamedTuple):
    """A step's output, and how long it took in seconds (T12)."""

    output: ScheduledBatchOutput
    duration_s: float


class Executor(Protocol):
    """Computes batches one after the other."""

    def submit(self, batch: ScheduledBatch) -> Future[Executed]:
        """Computes a batch after those submitted before; the future raises what the runner raises."""
        ...

    def failure(self) -> Exception | None:
        """Why no batch can be computed any more; None when nothing is wrong."""
        ...

    def close(self) -> None:
        """Ends what was started for it. May be called twice."""
        ...


class InlineExecutor:
    """Computes at once, on the caller's thread."""

    def __init__(self, forward: Forward, clock: Callable[[], float]) -> None:
        self._forward = forward
        self._clock = clock

    def submit(self, batch: ScheduledBatch) -> Future[Executed]:
        """The future is done, also after an interrupt."""
        future: Future[Executed] = Future()
        try:
            future.set_result(_execute(self._forward, batch, self._clock))
        except BaseException as error:
            future.set_exception(error)
        return future

    def failure(self) -> Exception | None:
        """Nothing fails by itself here."""
        return None

    def close(self) -> None:
        """Nothing was started."""


class ThreadExecutor:
    """Computes on one thread of its own, so that the caller can schedule meanwhile."""

    def __init__(self, forward: Forward, clock: Callable[[], float]) -> None:
        self._forward = forward
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")

    def submit(self, batch: ScheduledBatch) -> Future[Executed]:
        """Returns at once."""
        return self._pool.submit(_execute, self._forward, batch, self._clock)

    def failure(self) -> Exception | None:
        """Nothing fails by itself here."""
        return None

    def close(self) -> None:
        """Lets the thread end after the batch that it is in."""
        self._pool.shutdown(wait=False)


def _execute(forward: Forward, batch: ScheduledBatch, clock: Callable[[], float]) -> Executed:
    start = clock()
    output = forward(batch)
    return Executed(output, clock() - start)
