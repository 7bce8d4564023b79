"""Calls of ranks that are in flight, and the answers that each still lacks.

Invariant: every call ends, with all answers that it waits for or with the error of the group; after that error none
begins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from worker.ranks.rank_peers import RankLostError


@dataclass(slots=True)
class RankCall:
    """A call in flight; `began` is the time at which it became the oldest call."""

    serial: int
    name: str
    missing: set[int]
    future: Future[dict[int, Any]] = field(default_factory=Future)
    began: float = 0.0
    answers: dict[int, Any] = field(default_factory=dict)


class RankCalls:
    """Calls in flight, oldest first. Safe for any threads.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._calls: deque[RankCall] = deque()
        self._error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def error(self) -> Exception | None:
        """The error that has ended all calls."""
        return self._error

    def begin(self, call: RankCall) -> None:
        """Adds a call before it is sent.

        Raises:
            Exception: the error that has ended all calls.
        """
        call.began = self._clock()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._calls.append(call)

    def answered(self, rank: int, serial: int, answer: Any) -> None:
        """Notes the answer of a rank.

        Raises:
            RankLostError: it was not asked.
        """
        with self._lock:
            call = next((call for call in self._calls if call.serial == serial), None)
            if call is None or rank not in call.missing:
                raise RankLostError(f"rank {rank} answered what it was not asked")
            call.missing.discard(rank)
            call.answers[rank] = answer
            if call.missing:
                return
            self._calls.remove(call)
            if self._calls:
                self._calls[0].began = self._clock()
        call.future.set_result(call.answers)

    def oldest(self) -> RankCall | None:
        """The oldest call in flight; None without calls."""
        with self._lock:
            return self._calls[0] if self._calls else None

    def fail(self, error: Exception) -> None:
        """Ends all calls. Only the first error counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            lost = list(self._calls)
            self._calls.clear()
        for call in lost:
            call.future.set_exception(error)
