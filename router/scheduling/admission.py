"""All waiting requests of a router: their bound, their deadlines, and the rate at which they leave.

Tenants share the capacity of a class as they share the service. If a class is full, a new request replaces the newest
request of the tenant with the most requests for its weight (longest queue drop; Suter, Lakshman, Stiliadis, Choudhury
1998). A fixed quota for each tenant would leave places unused, and would come too late for a tenant that asks after
another one has filled the queue. Invariants:
  * A key is in the queue at most once.
  * A class has at most `capacity` waiting requests, apart from retries. Retries were accepted before, and are never
    dropped.
  * A tenant with at most (capacity - retries) * weight / (sum of the weights of waiting tenants) requests is not
    refused, and none of its requests is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from common.errors import QueueFullError
from common.limits import MAX_QUEUE_RETRY_S, MIN_QUEUE_RETRY_S
from router.scheduling.fair_queue import LazyMinHeap, TenantShares
from router.scheduling.queued_request import CLASS_NAMES, CLASSES, QueuedRequest

# Retry delay for a refused client while no rate is known.
QUEUE_RETRY_S = 1.0
_SPARE = 64
# Time constant with which departures lose their weight, seconds.
_SPEED_MEMORY_S = 5.0


class DrainRateEstimator:
    """Estimates how many requests leave the queue per second, and when refused clients should retry.

    Each refused client gets the time of another expected departure, so that they do not all return at once for the
    one place that is free by then.
    """

    def __init__(self) -> None:
        self._count = 0.0
        self._time = 0.0
        self._began: float | None = None
        self._promised = -math.inf

    def departed(self, number: int, now: float) -> None:
        """Counts `number` requests that have left the queue."""
        self._began = now if self._began is None else self._began
        self._count = self._decayed(now) + number
        self._time = now

    def rate(self, now: float) -> float:
        """Departures per second; 0 if unknown."""
        if self._began is None:
            return 0.0
        # Until the memory is full, only the time seen so far counts.
        seen = _SPEED_MEMORY_S * -math.expm1(-max(now - self._began, 0.1) / _SPEED_MEMORY_S)
        return self._decayed(now) / seen

    def retry_after_s(self, now: float) -> float:
        """Seconds after which one more refused client should retry."""
        rate = self.rate(now)
        if rate <= 0:
            return QUEUE_RETRY_S
        self._promised = min(max(self._promised, now) + 1 / rate, now + MAX_QUEUE_RETRY_S)
        return max(self._promised - now, MIN_QUEUE_RETRY_S)

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(now - self._time, 0.0) / _SPEED_MEMORY_S)


class _ClassRequests:
    """The waiting requests of one class, with the tenant that has the most of them for its weight."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        # By tenant, in order of arrival: the requests that may be dropped, which are all but retries.
        self._tenants: dict[str, OrderedDict[int, QueuedRequest]] = {}
        # At least one entry (-share, tenant) for each tenant; the share of an entry may be too large, never too small.
        self._heap: list[tuple[float, str]] = []

    def push(self, request: QueuedRequest) -> None:
        self.requests[request.key] = request
        if request.is_retry:
            self.requests.move_to_end(request.key, last=False)
            return
        self._tenants.setdefault(request.tenant, OrderedDict())[request.key] = request
        heapq.heappush(self._heap, (-self.share(request.tenant), request.tenant))
        if len(self._heap) > 2 * len(self._tenants) + _SPARE:
            self.reweigh()

    def remove(self, request: QueuedRequest) -> None:
        del self.requests[request.key]
        if request.is_retry:
            return
        own = self._tenants[request.tenant]
        del own[request.key]
        if not own:
            del self._tenants[request.tenant]

    def share(self, tenant: str, more: int = 0) -> float:
        """Number of a tenant's droppable requests plus `more`, divided by its weight."""
        return (len(self._tenants.get(tenant, ())) + more) / self._shares.weight(tenant)

    def largest(self) -> str | None:
        """The tenant with the largest share; None if no request may be dropped."""
        while self._heap:
            entry = self._heap[0]
            if entry[1] not in self._tenants:
                heapq.heappop(self._heap)
            elif (now := (-self.share(entry[1]), entry[1])) == entry:
                return entry[1]
            else:
                heapq.heapreplace(self._heap, now)
        return None

    def newest(self, tenant: str) -> QueuedRequest:
        """The newest droppable request of a tenant."""
        return next(reversed(self._tenants[tenant].values()))

    def reweigh(self) -> None:
        """Rebuilds the heap, because weights have changed or most entries are stale."""
        self._heap = [(-self.share(tenant), tenant) for tenant in self._tenants]
        heapq.heapify(self._heap)


class AdmissionQueue:
    """All waiting requests of a router, with a bound for each priority class.

    Args:
        capacity: most requests of one class.
        shares: told of every request that starts or stops waiting.
    """

    def __init__(self, capacity: int, shares: TenantShares) -> None:
        self._capacity = capacity
        self._shares = shares
        self._requests: dict[int, QueuedRequest] = {}
        self._classes = {priority: _ClassRequests(self._shares) for priority in CLASSES}
        self._deadlines = LazyMinHeap(self._requests)
        self.speed = DrainRateEstimator()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The requests: higher classes first, and in a class retries first, then by arrival."""
        for waiting in self._classes.values():
            yield from waiting.requests.values()

    def configure(self, capacity: int, weights: Mapping[str, float]) -> None:
        """Sets the capacity and the tenants' weights; requests that wait already stay."""
        self._capacity = capacity
        self._shares.set_weights(weights)
        for waiting in self._classes.values():
            waiting.reweigh()

    def is_full(self, priority: int) -> bool:
        """True if a class has no free place."""
        return self._shares.waiting(priority) >= self._capacity

    def place_for(self, priority: int, tenant: str, now: float) -> QueuedRequest | None:
        """The waiting request that a new one must replace; None if there is a free place.

        Raises:
            QueueFullError: the class is full, and no other tenant has a larger share of it.
        """
        if not self.is_full(priority):
            return None
        waiting = self._classes[priority]
        largest = waiting.largest()
        # A tenant never replaces its own request: dropping its newest one for an even newer one gains nothing.
        if largest is not None and waiting.share(tenant, more=1) <= waiting.share(largest):
            return waiting.newest(largest)
        raise self.full(priority, tenant, now)

    def full(self, priority: int, tenant: str, now: float) -> QueueFullError:
        """The error for a request that gets no place, or has lost its place."""
        waiting = self._shares.waiting(priority)
        return QueueFullError(waiting, self.speed.retry_after_s(now), CLASS_NAMES[priority], tenant)

    def push(self, request: QueuedRequest) -> None:
        """Appends a request; `place_for` must have found a place."""
        self._enter(request)

    def push_front(self, request: QueuedRequest) -> None:
        """Puts a released request back: its worker returned it (rule S9) or was lost."""
        request.is_retry = True
        self._enter(request)

    def remove(self, key: int) -> QueuedRequest | None:
        """Removes and returns a request; None if it is not waiting."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._classes[request.priority].remove(request)
            self._shares.leave(request)
        return request

    def next_deadline(self) -> float | None:
        """The earliest deadline of a waiting request, monotonic seconds; None without one."""
        top = self._deadlines.top()
        return None if top is None else top[0]

    def pop_expired(self, now: float) -> QueuedRequest | None:
        """Removes and returns the request with the earliest deadline, if that has passed.

        One at a time, because each must leave its lane before the next one, which may be the last of its class.
        """
        top = self._deadlines.top()
        return self.remove(top[1]) if top is not None and top[0] <= now else None

    def _enter(self, request: QueuedRequest) -> None:
        self._requests[request.key] = request
        self._classes[request.priority].push(request)
        self._shares.enter(request)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.key)
