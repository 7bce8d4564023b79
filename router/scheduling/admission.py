"""Requests that no worker has yet, all lanes together: the bound, the deadlines, and how fast they go.

Tenants share the capacity of a class as they share the service: a request for which there is no place gets that of the
newest one of the tenant with the most, for its weight (longest queue drop; Suter, Lakshman, Stiliadis, Choudhury 1998).
A fixed part of the capacity for each tenant would leave places unused that others want, and could be kept to only above
the capacity, because who is there first has taken all of it before the next tenant asks. Invariants:
  * A key is in the queue at most once.
  * The number of waiting requests of a class never exceeds `capacity`, except by requests that have come back from a
    worker, because those were accepted before. Those are never dropped either.
  * A tenant that has no more than capacity * weight / (sum of the weights of those that wait) requests there is not
    refused, and none of them is dropped; `capacity` less what has come back.
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

# Retry delay for a refused client while no speed is known.
QUEUE_RETRY_S = 1.0
_SPARE = 64
# Departures are forgotten with this time constant, seconds.
_SPEED_MEMORY_S = 5.0


class DrainRateEstimator:
    """Estimate of the requests that leave the queue per second, and of when refused ones should ask again.

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


class _ClassRequests:
    """The waiting requests of one class, and which tenant has the most of them for its weight."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()
        # By tenant, in order of arrival: those that have not been with a worker, and may be dropped.
        self._tenants: dict[str, OrderedDict[int, QueuedRequest]] = {}
        # For each tenant an entry with its share, or with more than that: the share, negative, and the tenant.
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
        """Requests of a tenant that may be dropped, and `more`, per weight."""
        return (len(self._tenants.get(tenant, ())) + more) / self._shares.weight(tenant)

    def largest(self) -> str | None:
        """The tenant with the largest share; None when nothing may be dropped."""
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
        """The one of a tenant that came last."""
        return next(reversed(self._tenants[tenant].values()))

    def reweigh(self) -> None:
        """The weights are other ones, or most entries are old."""
        self._heap = [(-self.share(tenant), tenant) for tenant in self._tenants]
        heapq.heapify(self._heap)


class AdmissionQueue:
    """The waiting requests.

    Args:
        capacity: most requests of one class.
        shares: told who begins and who ends to wait.
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
        """Higher classes first; in a class those that have come back, then by arrival."""
        for waiting in self._classes.values():
            yield from waiting.requests.values()

    def configure(self, capacity: int, weights: Mapping[str, float]) -> None:
        """Another capacity and other weights from now on; those that wait already stay."""
        self._capacity = capacity
        self._shares.set_weights(weights)
        for waiting in self._classes.values():
            waiting.reweigh()

    def is_full(self, priority: int) -> bool:
        """True if a class has no place for another request."""
        return self._shares.waiting(priority) >= self._capacity

    def place_for(self, priority: int, tenant: str, now: float) -> QueuedRequest | None:
        """The waiting request that a new one takes the place of; None where there is a free place.

        Raises:
            QueueFullError: the class is full, and no tenant has more of it for its weight.
        """
        if not self.is_full(priority):
            return None
        waiting = self._classes[priority]
        largest = waiting.largest()
        # Also false for the tenant itself: dropping its newest to keep one that is newer still gains nothing.
        if largest is not None and waiting.share(tenant, more=1) <= waiting.share(largest):
            return waiting.newest(largest)
        raise self.full(priority, tenant, now)

    def full(self, priority: int, tenant: str, now: float) -> QueueFullError:
        """The error of a request that gets no place, or has lost its own."""
        waiting = self._shares.waiting(priority)
        return QueueFullError(waiting, self.speed.retry_after_s(now), CLASS_NAMES[priority], tenant)

    def push(self, request: QueuedRequest) -> None:
        """Appends a request, for which there is room."""
        self._enter(request)

    def push_front(self, request: QueuedRequest) -> None:
        """Puts back a request that had been accepted and released: returned (rule S9), or its worker was lost."""
        request.is_retry = True
        self._enter(request)

    def remove(self, key: int) -> QueuedRequest | None:
        """Takes a request out; None when it does not wait."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._classes[request.priority].remove(request)
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
        self._requests[request.key] = request
        self._classes[request.priority].push(request)
        self._shares.enter(request)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.key)
