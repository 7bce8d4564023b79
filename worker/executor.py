"""Where batches are computed: on the caller's thread, or on one of their own (deferred output).

Processes of their own, the ranks, are in worker.rank_group. All compute one batch at a time, in the order in which they
were submitted.

On a GPU a step is launched while the one before it still runs, so that the device never waits for Python
(PipelinedExecutor): that one's tokens go from step to step on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from worker.batch import ScheduledBatch, ScheduledBatchOutput

Forward = Callable[[ScheduledBatch], ScheduledBatchOutput]
# Begins a step; what it returns waits for the step's tokens.
Launch = Callable[[ScheduledBatch], Callable[[], ScheduledBatchOutput]]


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


class PipelinedExecutor:
    """Launches on one thread, and waits for tokens on another, so that the next step is launched meanwhile.

    A step counts from its launch, or from the end of the one before it if that came later: so durations of steps that
    follow each other add up to the time that has passed.

    Args:
        launch: begins a step.
        clock: monotonic seconds.
        prepare: called once on the thread that launches, which has a current device of its own.
    """

    def __init__(
        self, launch: Launch, clock: Callable[[], float], prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._launch = launch
        self._clock = clock
        self._ended = -math.inf
        self._launching = ThreadPoolExecutor(1, "launcher", initializer=prepare)
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="waiter")

    def submit(self, batch: ScheduledBatch) -> Future[Executed]:
        """Returns at once."""
        return self._waiting.submit(self._wait, self._launching.submit(self._begin, batch))

    def failure(self) -> Exception | None:
        """Nothing fails by itself here."""
        return None

    def close(self) -> None:
        """Lets the threads end after the batches that they have."""
        self._launching.shutdown(wait=False)
        self._waiting.shutdown(wait=False)

    def _begin(self, batch: ScheduledBatch) -> tuple[float, Callable[[], ScheduledBatchOutput]]:
        return self._clock(), self._launch(batch)

    def _wait(self, begun: Future[tuple[float, Callable[[], ScheduledBatchOutput]]]) -> Executed:
        start, tokens = begun.result()
        output = tokens()
        start, self._ended = max(start, self._ended), self._clock()
        return Executed(output, self._ended - start)


def _execute(forward: Forward, batch: ScheduledBatch, clock: Callable[[], float]) -> Executed:
    start = clock()
    output = forward(batch)
    return Executed(output, clock() - start)
