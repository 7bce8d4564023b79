"""Requests that no worker has yet: one bounded FIFO.

Invariants: a key is in the queue at most once; the number of waiting requests never exceeds `capacity`, except by
requests that have come back from a worker, because those were accepted before. Classes and tenants come with a later
issue.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import QueueFullError

QUEUE_RETRY_S = 1.0
# Removed requests leave their entry in the heap of deadlines; it is rebuilt when that many are stale.
_STALE_DEADLINES = 1024


@dataclass(slots=True)
class QueuedRequest:
    """What the dispatcher knows about a request.

    Attributes:
        key: number of the request in this router.
        model: identity of the model that must serve it.
        tokens: tokens to compute before the next one: the prompt, and what an earlier attempt has generated.
        arrival: monotonic seconds of its arrival.
        deadline: monotonic seconds after which it is dropped, None for never.
        lane: the worker it will go to as things stand, None when there is none; nothing is promised before its release.
        numerics: class that the worker must be of, None for any.
        parked: monotonic seconds since when there has been no worker for it, None while there is one.
    """

    key: int
    model: str
    tokens: int
    arrival: float
    deadline: float | None = None
    lane: str | None = None
    numerics: str | None = None
    parked: float | None = None


class RequestQueue:
    """The waiting requests in order of service."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._requests.values())

    def push(self, request: QueuedRequest) -> None:
        """Appends a request.

        Raises:
            QueueFullError: `capacity` requests wait already.
        """
        if len(self._requests) >= self._capacity:
            raise QueueFullError(len(self._requests), QUEUE_RETRY_S)
        self._requests[request.key] = request
        self._note_deadline(request)

    def push_front(self, request: QueuedRequest) -> None:
        """Puts back a request that had been accepted and released: returned (rule S9), or its worker was lost."""
        self._requests[request.key] = request
        self._requests.move_to_end(request.key, last=False)
        self._note_deadline(request)

    def remove(self, key: int) -> QueuedRequest | None:
        """Takes a request out; None when it does not wait."""
        request = self._requests.pop(key, None)
        if len(self._deadlines) > len(self._requests) + _STALE_DEADLINES:
            self._deadlines = [(r.deadline, r.key) for r in self if r.deadline is not None]
            heapq.heapify(self._deadlines)
        return request

    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request, monotonic seconds."""
        self._drop_stale_deadlines()
        return self._deadlines[0][0] if self._deadlines else None

    def pop_expired(self, now: float) -> list[QueuedRequest]:
        """Takes out the requests whose deadline has passed, earliest deadline first."""
        found: list[QueuedRequest] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            found.append(self._requests.pop(heapq.heappop(self._deadlines)[1]))
        return found

    def _note_deadline(self, request: QueuedRequest) -> None:
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.key))

    def _drop_stale_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
