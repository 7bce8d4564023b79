"""Executors of batches: on the caller's thread, or on one of their own (deferred output).

Processes of their own, the ranks, are in worker.ranks.rank_client. All compute one batch at a time, in the order in
which they were submitted.

On a GPU a step is launched while the one before it still runs, so that the device never waits for Python
(PipelinedExecutor): that one's tokens go from step to step on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput

Forward = Callable[[ScheduledBatch], ScheduledBatchOutput]
# Waits for the tokens of a step that has begun.
Tokens = Callable[[], ScheduledBatchOutput]
# Begins a step.
Launch = Callable[[ScheduledBatch], Tokens]


class Executed(NamedTuple):
    """A step's output, and how long it took in seconds."""

    output: ScheduledBatchOutput
    duration_s: float


class Launched(NamedTuple):
    """A step that has begun, and when: seconds of a monotonic clock."""

    begin: float
    tokens: Tokens


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


class TokenWaiter:
    """Waits for the tokens of launched steps on a thread of its own, so that the next step is launched meanwhile.

    A step counts from its launch, or from the end of the one before it if that came later: so durations of steps that
    follow each other add up to the time that has passed.

    Args:
        clock: monotonic seconds.
        prepare: called once on the thread, which has a current device of its own.
    """

    def __init__(self, clock: Callable[[], float], prepare: Callable[[], object] = lambda: None) -> None:
        self._clock = clock
        self._ended = -math.inf
        self._pool = ThreadPoolExecutor(1, "waiter", initializer=prepare)

    def submit(self, launched: Callable[[], Launched]) -> Future[Executed]:
        """Waits for a step after those submitted before; the future raises what its launch or its tokens raise.

        Args:
            launched: gives the step; called on the thread.
        """
        return self._pool.submit(self._wait, launched)

    def drain(self, timeout_s: float) -> bool:
        """Waits until the futures of all steps are done and have called back; True if they were within the time."""
        try:
            # Submitted after them, since a future is done before it calls back.
            last = self._pool.submit(lambda: None)
        except RuntimeError:
            # The thread could not begin, or has ended, and so have the futures.
            return True
        return not wait((last,), timeout_s).not_done

    def close(self) -> None:
        """Lets the thread end after the steps that it has."""
        self._pool.shutdown(wait=False)

    def _wait(self, launched: Callable[[], Launched]) -> Executed:
        begin, tokens = launched()
        output = tokens()
        begin, self._ended = max(begin, self._ended), self._clock()
        return Executed(output, self._ended - begin)


class PipelinedExecutor:
    """Launches on one thread, and waits for tokens on another (TokenWaiter).

    Args:
        launch: begins a step.
        clock: monotonic seconds.
        prepare: called once on each of the threads, which have current devices of their own.
    """

    def __init__(
        self, launch: Launch, clock: Callable[[], float], prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._launch = launch
        self._clock = clock
        self._launching = ThreadPoolExecutor(1, "launcher", initializer=prepare)
        self._waiter = TokenWaiter(clock, prepare)

    def submit(self, batch: ScheduledBatch) -> Future[Executed]:
        """Returns at once."""
        return self._waiter.submit(self._launching.submit(self._begin, batch).result)

    def failure(self) -> Exception | None:
        """Nothing fails by itself here."""
        return None

    def close(self) -> None:
        """Lets the threads end after the batches that they have."""
        self._launching.shutdown(wait=False)
        self._waiter.close()

    def _begin(self, batch: ScheduledBatch) -> Launched:
        return Launched(self._clock(), self._launch(batch))


def _execute(forward: Forward, batch: ScheduledBatch, clock: Callable[[], float]) -> Executed:
    start = clock()
    output = forward(batch)
    return Executed(output, clock() - start)
