"""Executors of batches: on the caller's thread, or on a separate one (deferred output).

Executors with processes, the ranks, are in worker.ranks.rank_client. All compute one batch at a time, in the order of
submission.

On a GPU a step is launched while the one before still runs, so that the device never waits for Python
(PipelinedExecutor). Tokens pass from step to step on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput

Forward = Callable[[ScheduledBatch], ScheduledBatchOutput]
# Waits for the tokens of a launched step.
Tokens = Callable[[], ScheduledBatchOutput]
# Launches a step.
Launch = Callable[[ScheduledBatch], Tokens]


class TimedOutput(NamedTuple):
    """Output of a step, and its duration in seconds."""

    output: ScheduledBatchOutput
    duration_s: float


class StepLaunch(NamedTuple):
    """A launched step, and the time of the launch, monotonic seconds."""

    begin: float
    tokens: Tokens


class Executor(Protocol):
    """Computes batches in the order of submission."""

    def submit(self, batch: ScheduledBatch) -> Future[TimedOutput]:
        """Computes a batch after those submitted before; the future raises the runner's error."""
        ...

    def failure(self) -> Exception | None:
        """Error because of which no batch can be computed; None without one."""
        ...

    def close(self) -> None:
        """Ends the executor's threads or processes. May be called twice."""
        ...


class InlineExecutor:
    """Computes batches at once, on the caller's thread."""

    def __init__(self, forward: Forward, clock: Callable[[], float]) -> None:
        self._forward = forward
        self._clock = clock

    def submit(self, batch: ScheduledBatch) -> Future[TimedOutput]:
        """Computes a batch; the future is done, also after an interrupt."""
        future: Future[TimedOutput] = Future()
        try:
            future.set_result(_execute(self._forward, batch, self._clock))
        except BaseException as error:
            future.set_exception(error)
        return future

    def failure(self) -> Exception | None:
        """Always None: this executor fails only by batch."""
        return None

    def close(self) -> None:
        """Does nothing: there is no thread to end."""


class ThreadExecutor:
    """Computes batches on a thread, so that the caller can schedule meanwhile."""

    def __init__(self, forward: Forward, clock: Callable[[], float]) -> None:
        self._forward = forward
        self._clock = clock
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")

    def submit(self, batch: ScheduledBatch) -> Future[TimedOutput]:
        """Returns at once."""
        return self._pool.submit(_execute, self._forward, batch, self._clock)

    def failure(self) -> Exception | None:
        """Always None: this executor fails only by batch."""
        return None

    def close(self) -> None:
        """Ends the thread after its current batch."""
        self._pool.shutdown(wait=False)


class TokenWaiter:
    """Waits for the tokens of launched steps on a thread, so that the next step can be launched meanwhile.

    The duration of a step begins with its launch, or with the end of the step before if that is later. So durations of
    consecutive steps add up to the time passed.

    Args:
        clock: monotonic seconds.
        prepare: called once on the thread, whose current device is separate.
    """

    def __init__(self, clock: Callable[[], float], prepare: Callable[[], object] = lambda: None) -> None:
        self._clock = clock
        self._ended = -math.inf
        self._pool = ThreadPoolExecutor(1, "waiter", initializer=prepare)

    def submit(self, launched: Callable[[], StepLaunch]) -> Future[TimedOutput]:
        """Waits for a step after those submitted before; the future raises the error of its launch or its tokens.

        Args:
            launched: returns the step; called on the thread.
        """
        return self._pool.submit(self._wait, launched)

    def drain(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` until the futures of all steps are done and have called back; True if they are."""
        try:
            # Submitted after them, since a future is done before it calls back.
            last = self._pool.submit(lambda: None)
        except RuntimeError:
            # The thread could not start, or has ended, and so have the futures.
            return True
        return not wait((last,), timeout_s).not_done

    def close(self) -> None:
        """Ends the thread after its submitted steps."""
        self._pool.shutdown(wait=False)

    def _wait(self, launched: Callable[[], StepLaunch]) -> TimedOutput:
        begin, tokens = launched()
        output = tokens()
        begin, self._ended = max(begin, self._ended), self._clock()
        return TimedOutput(output, self._ended - begin)


class PipelinedExecutor:
    """Launches steps on one thread, and waits for their tokens on another (TokenWaiter).

    Args:
        launch: launches a step.
        clock: monotonic seconds.
        prepare: called once on each thread, whose current device is separate.
    """

    def __init__(
        self, launch: Launch, clock: Callable[[], float], prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._launch = launch
        self._clock = clock
        self._launching = ThreadPoolExecutor(1, "launcher", initializer=prepare)
        self._waiter = TokenWaiter(clock, prepare)

    def submit(self, batch: ScheduledBatch) -> Future[TimedOutput]:
        """Returns at once."""
        return self._waiter.submit(self._launching.submit(self._begin, batch).result)

    def failure(self) -> Exception | None:
        """Always None: this executor fails only by batch."""
        return None

    def close(self) -> None:
        """Ends the threads after their submitted batches."""
        self._launching.shutdown(wait=False)
        self._waiter.close()

    def _begin(self, batch: ScheduledBatch) -> StepLaunch:
        return StepLaunch(self._clock(), self._launch(batch))


def _execute(forward: Forward, batch: ScheduledBatch, clock: Callable[[], float]) -> TimedOutput:
    start = clock()
    output = forward(batch)
    return TimedOutput(output, clock() - start)
