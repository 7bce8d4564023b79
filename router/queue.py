"""Requests that no worker has yet, all lanes together: the bound, the deadlines, and how fast they go.

Invariants: a key is in the queue at most once; the number of waiting requests of a class never exceeds `capacity`,
except by requests that have come back from a worker, because those were accepted before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from common.errors import QueueFullError
from common.limits import MAX_QUEUE_RETRY_S, MIN_QUEUE_RETRY_S
from router.earliest import Earliest
from router.fair_queue import CLASS_NAMES, QueuedRequest, TenantShares

__all__ = ["QUEUE_RETRY_S", "QueueSpeed", "QueuedRequest", "RequestQueue"]

# What a refused client is told while no speed is known.
QUEUE_RETRY_S = 1.0
# Departures are forgotten with this time constant, seconds.
_SPEED_MEMORY_S = 5.0


class QueueSpeed:
    """How many requests leave the queue per second, and when those that it refused should ask again.

    Each refused client is given a place of its own in the time to come, one per expected departure: the sooner ones
    first, so that they do not all come back at once for the one place that is free by then.
    """

    def __init__(self) -> None:
        self._count = 0.0
        self._time = 0.0
        self._began: float | None = None
        self._promised = -math.inf

    def departed(self, number: int, now: float) -> None:
        """So many requests have left the queue."""
        self._began = now if self._began is None else self._began
        self._count = self._decayed(now) + number
        self._time = now

    def rate(self, now: float) -> float:
        """Requests per second; 0 when not known."""
        if self._began is None:
            return 0.0
        # Until the memory has filled, what it would have held is not counted.
        seen = _SPEED_MEMORY_S * -math.expm1(-max(now - self._began, 0.1) / _SPEED_MEMORY_S)
        return self._decayed(now) / seen

    def retry_after_s(self, now: float) -> float:
        """Seconds after which one more refused client should ask again."""
        rate = self.rate(now)
        if rate <= 0:
            return QUEUE_RETRY_S
        self._promised = min(max(self._promised, now) + 1 / rate, now + MAX_QUEUE_RETRY_S)
        return max(self._promised - now, MIN_QUEUE_RETRY_S)

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(now - self._time, 0.0) / _SPEED_MEMORY_S)


class RequestQueue:
    """The waiting requests.

    Args:
        shares: told who begins and who ends to wait.

    Attributes:
        capacity: most requests of one class.
    """

    def __init__(self, capacity: int, shares: TenantShares | None = None) -> None:
        self.capacity = capacity
        self._shares = TenantShares() if shares is None else shares
        self._requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        self._deadlines = Earliest(self._requests)
        self.speed = QueueSpeed()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._requests.values())

    def check_room(self, priority: int, now: float) -> None:
        """Refuses a request of a class whose queue is full.

        Raises:
            QueueFullError: `capacity` requests of the class wait already.
        """
        waiting = self._shares.waiting(priority)
        if waiting >= self.capacity:
            raise QueueFullError(waiting, self.speed.retry_after_s(now), CLASS_NAMES[priority])

    def push(self, request: QueuedRequest) -> None:
        """Appends a request, for which there is room."""
        self._requests[request.key] = request
        self._enter(request)

    def push_front(self, request: QueuedRequest) -> None:
        """Puts back a request that had been accepted and released: returned (rule S9), or its worker was lost."""
        request.ahead = True
        self._requests[request.key] = request
        self._requests.move_to_end(request.key, last=False)
        self._enter(request)

    def remove(self, key: int) -> QueuedRequest | None:
        """Takes a request out; None when it does not wait."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._shares.leave(request)
        return request

    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request, monotonic seconds."""
        top = self._deadlines.top()
        return None if top is None else top[0]

    def pop_expired(self, now: float) -> QueuedRequest | None:
        """Takes out the request with the earliest deadline, if that has passed.

        One by one: what is taken out is to leave its lane before the next one, which may be the last of its class.
        """
        top = self._deadlines.top()
        return self.remove(top[1]) if top is not None and top[0] <= now else None

    def _enter(self, request: QueuedRequest) -> None:
        self._shares.enter(request)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.key)
