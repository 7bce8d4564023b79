"""The order of service: classes by rank, and within a class the tenants by what they have had, divided by their weight.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with the tags at the tenants instead of at the requests, so that what
is cancelled costs nothing and a request may change its lane. Invariants:
  * Within a class and tenant requests go in the order in which they came to the queue.
  * A request that has come back from a worker (`is_retry`) goes before the others of its class, uncharged.
  * A tenant has had the prompt tokens of its requests that were served, those of a prompt with several answers once
    where they go to one worker that shares them, and OUTPUT_TOKEN_COST for each output token
    that has come (the Virtual Token Counter of Sheng et al., 2024). Output is charged as it comes: nobody knows its
    length before, and what a tenant has had never becomes less, as a refund would make it. Tokens that a client of a
    broken stream brings with it, or that come once more with an adopted sequence, are not charged again.
  * Of two tenants of one class that both wait throughout, neither gets ahead of the other by more than one request, and
    by the output of what it has running, which is charged later:
    |had_a / weight_a - had_b / weight_b| <= most_a / weight_a + most_b / weight_b + running_a + running_b.
  * Higher classes go first, and starve nobody: a class whose oldest request has waited for PROMOTE_AFTER_S goes before
    higher ones, until it has had PROMOTED_SHARE of the tokens served meanwhile, to within one request of each.
  * Nothing is kept of a class in which nothing waits, nor of more than MAX_TENANTS tenants that wait for nothing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from common.limits import MAX_TENANTS, OUTPUT_TOKEN_COST, PROMOTE_AFTER_S, PROMOTED_SHARE
from router.scheduling.queued_request import CLASSES, QueuedRequest

# Heaps with lazy deletion keep stale entries until this many more than half of all entries are stale.
_SPARE = 64


class LazyMinHeap:
    """The least value of the keys that are in `alive`; each operation is O(log n), amortized.

    A key that leaves `alive` is forgotten. One that comes back must be added again, with the value it had.

    Args:
        alive: the keys that count, kept by the owner.
    """

    def __init__(self, alive: Container[int]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int]] = []
        self._limit = _SPARE

    def __len__(self) -> int:
        """Number of entries, those of keys that are gone included."""
        return len(self._heap)

    def add(self, value: float, key: int) -> None:
        """Counts `key`, which is in `alive`, with its value."""
        heapq.heappush(self._heap, (value, key))
        if len(self._heap) > self._limit:
            self._heap = list({entry for entry in self._heap if entry[1] in self._alive})
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SPARE

    def top(self) -> tuple[float, int] | None:
        """The least (value, key); None when there is none."""
        while self._heap and self._heap[0][1] not in self._alive:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(slots=True)
class _Account:
    """Service that a tenant has had in a class, per weight, and the number of its waiting requests."""

    start: float
    waiting: int = 0


@dataclass(slots=True)
class _ClassAccounts:
    virtual_time: float = 0.0
    waiting: int = 0
    tenants: dict[str, _Account] = field(default_factory=dict)
    # Tenants beyond which those that wait for nothing are forgotten.
    limit: int = MAX_TENANTS

    def account(self, tenant: str) -> _Account:
        """Account of a tenant; a new one starts at what the last served tenant had before."""
        account = self.tenants.get(tenant)
        if account is None:
            account = self.tenants[tenant] = _Account(self.virtual_time)
        return account

    def trim(self) -> None:
        """Bounds the accounts of those that wait for nothing by MAX_TENANTS, in O(1) amortized."""
        if len(self.tenants) > self.limit:
            self.tenants = {name: account for name, account in self.tenants.items() if account.waiting}
            self.limit = len(self.tenants) + MAX_TENANTS


class TenantShares:
    """Service that each tenant has had, over all lanes of a router.

    Args:
        weights: of tenants that are not like the others, > 0.
        default_weight: of the others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, default_weight: float = 1.0) -> None:
        self._weights = dict(weights or {})
        self._default = default_weight
        self._classes = {priority: _ClassAccounts() for priority in CLASSES}

    def __len__(self) -> int:
        """Number of tenants of which something is kept, in each class."""
        return sum(len(accounts.tenants) for accounts in self._classes.values())

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Other weights from now on; what tenants have had stays as it was counted."""
        self._weights = dict(weights)

    def waiting(self, priority: int) -> int:
        """Number of requests of a class that wait."""
        return self._classes[priority].waiting

    def enter(self, request: QueuedRequest) -> None:
        """A request begins to wait. Nobody saves up service while he asks for none."""
        accounts = self._classes[request.priority]
        account = accounts.account(request.tenant)
        if not account.waiting:
            account.start = max(account.start, accounts.virtual_time)
        account.waiting += 1
        accounts.waiting += 1

    def leave(self, request: QueuedRequest) -> None:
        """A request waits no more, served or not."""
        accounts = self._classes[request.priority]
        accounts.tenants[request.tenant].waiting -= 1
        accounts.waiting -= 1
        if not accounts.waiting:
            self._classes[request.priority] = _ClassAccounts()
        else:
            accounts.trim()

    def weight(self, tenant: str) -> float:
        """Weight of a tenant."""
        return self._weights.get(tenant, self._default)

    def start(self, priority: int, tenant: str) -> float:
        """Service that a tenant has had, or would have if it began to wait; the one with the least goes first."""
        accounts = self._classes[priority]
        account = accounts.tenants.get(tenant)
        if account is None:
            return accounts.virtual_time
        return account.start if account.waiting else max(account.start, accounts.virtual_time)

    def charge(self, request: QueuedRequest) -> None:
        """A request that waits is about to be served."""
        if request.is_retry:
            return
        accounts = self._classes[request.priority]
        account = accounts.tenants[request.tenant]
        accounts.virtual_time = max(accounts.virtual_time, account.start)
        account.start += request.charged_tokens / self.weight(request.tenant)

    def charge_output(self, request: QueuedRequest, output: int) -> None:
        """A request has had `output` tokens in all; costs its tenant something only while others could have had them.

        Args:
            request: one that was served, and may be served again: no token is charged twice.
            output: tokens that have come since its arrival.
        """
        tokens, request.output = output - request.output, output
        accounts = self._classes[request.priority]
        if tokens and accounts.waiting:
            accounts.account(request.tenant).start += OUTPUT_TOKEN_COST * tokens / self.weight(request.tenant)
            accounts.trim()


class _TenantQueue:
    """The requests of one tenant, in the order in which they came to the queue; to this lane some may come later."""

    def __init__(self) -> None:
        self.requests: dict[int, QueuedRequest] = {}
        self._order = LazyMinHeap(self.requests)

    def push(self, request: QueuedRequest) -> None:
        self.requests[request.key] = request
        self._order.add(request.key, request.key)

    def first(self) -> QueuedRequest:
        top = self._order.top()
        assert top is not None
        return self.requests[top[1]]


class _ClassQueue:
    """The requests of one class in one lane."""

    def __init__(self, priority: int, shares: TenantShares) -> None:
        self._priority = priority
        self._shares = shares
        self.retries: OrderedDict[int, QueuedRequest] = OrderedDict()
        self.tenants: dict[str, _TenantQueue] = {}
        self.work = 0
        self._tenant_work: dict[str, int] = {}
        # A lower bound of (what the tenant has had, its first request) for each tenant here.
        self._heap: list[tuple[float, int, str]] = []

    def push(self, request: QueuedRequest, *, first: bool) -> None:
        self.work += request.work
        if request.is_retry:
            self.retries[request.key] = request
            if first:
                self.retries.move_to_end(request.key, last=False)
            return
        own = self.tenants.setdefault(request.tenant, _TenantQueue())
        own.push(request)
        self._tenant_work[request.tenant] = self._tenant_work.get(request.tenant, 0) + request.work
        if own.first() is request:
            heapq.heappush(self._heap, self._rank(request))
            self._trim()

    def remove(self, request: QueuedRequest) -> None:
        self.work -= request.work
        if request.is_retry:
            del self.retries[request.key]
            return
        own = self.tenants[request.tenant]
        was_first = own.first() is request
        del own.requests[request.key]
        self._tenant_work[request.tenant] -= request.work
        if not own.requests:
            del self.tenants[request.tenant], self._tenant_work[request.tenant]
        elif was_first:
            heapq.heappush(self._heap, self._rank(own.first()))
            self._trim()

    def work_before(self, request: QueuedRequest) -> float:
        own = self._tenant_work.get(request.tenant, 0)
        per_weight = (own + request.work) / self._shares.weight(request.tenant)
        had = self._shares.start(self._priority, request.tenant)
        others = 0.0
        for other, waiting in self._tenant_work.items():
            if other != request.tenant:
                # One that has had more gets so much less before their shares are equal.
                lead = max(0.0, self._shares.start(self._priority, other) - had)
                others += min(waiting, max(0.0, per_weight - lead) * self._shares.weight(other))
        return sum(retry.work for retry in self.retries.values()) + own + others

    def head(self) -> QueuedRequest | None:
        if self.retries:
            return next(iter(self.retries.values()))
        while self._heap:
            entry = self._heap[0]
            own = self.tenants.get(entry[2])
            if own is None:
                heapq.heappop(self._heap)
                continue
            request = own.first()
            if (rank := self._rank(request)) == entry:
                return request
            # The tenant has been served elsewhere, or its first request is another one by now.
            heapq.heapreplace(self._heap, rank)
        return None

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self.retries.values()
        for own in self.tenants.values():
            yield from own.requests.values()

    def __bool__(self) -> bool:
        return bool(self.retries or self.tenants)

    def _trim(self) -> None:
        """Entries that are too low stay until they come up; here they are dropped when most are such."""
        if len(self._heap) > 2 * len(self.tenants) + _SPARE:
            self._heap = [self._rank(own.first()) for own in self.tenants.values()]
            heapq.heapify(self._heap)

    def _rank(self, request: QueuedRequest) -> tuple[float, int, str]:
        return self._shares.start(self._priority, request.tenant), request.key, request.tenant


class FairQueue:
    """The requests that wait for one worker, in order of service. Each operation is O(log n), amortized.

    Attributes:
        tokens: of all requests here.
        work: tokens to compute of all requests here.
    """

    def __init__(self, shares: TenantShares) -> None:
        self.tokens = 0
        self.work = 0
        self._shares = shares
        self._classes = {priority: _ClassQueue(priority, shares) for priority in CLASSES}
        self._requests: dict[int, QueuedRequest] = {}
        self._arrivals = {priority: LazyMinHeap(self._requests) for priority in CLASSES}
        # Tokens that others are to have before a class is promoted again.
        self._promotion_debt = 0.0
        self._deadlines = LazyMinHeap(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The requests: classes in order, tenants in none."""
        for queue in self._classes.values():
            yield from queue

    def work_before(self, request: QueuedRequest) -> float:
        """Tokens that would be computed before a new request, by the order of service as it is now.

        Other tenants get no more than their share meanwhile, and less if they have had more so far. O(tenants here).
        """
        higher = sum(self._classes[priority].work for priority in CLASSES if priority > request.priority)
        return higher + self._classes[request.priority].work_before(request)

    def push(self, request: QueuedRequest, *, first: bool = False) -> None:
        """Adds a request that has entered the shares; `first`: before others that have come back too."""
        self.tokens += request.tokens
        self.work += request.work
        self._requests[request.key] = request
        self._classes[request.priority].push(request, first=first)
        self._arrivals[request.priority].add(request.arrival, request.key)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.key)

    def get(self, key: int) -> QueuedRequest | None:
        """A request that is here; None when it is not."""
        return self._requests.get(key)

    def remove(self, request: QueuedRequest) -> None:
        """Takes out a request that is here."""
        self.tokens -= request.tokens
        self.work -= request.work
        del self._requests[request.key]
        self._classes[request.priority].remove(request)

    def work_before_in_class(self, request: QueuedRequest) -> float:
        """As `work_before`, of the request's own class alone."""
        return self._classes[request.priority].work_before(request)

    def head(self, now: float) -> QueuedRequest | None:
        """The request that goes next; None when there is none."""
        priority = self._next_class(now)
        return None if priority is None else self._classes[priority].head()

    def pop(self, now: float) -> QueuedRequest:
        """Takes out the head and charges its tenant."""
        request = self.head(now)
        assert request is not None
        if request.priority != self._highest():
            self._promotion_debt = request.charged_tokens * (1 / PROMOTED_SHARE - 1)
        else:
            self._promotion_debt = max(0.0, self._promotion_debt - request.charged_tokens)
        self.remove(request)
        self._shares.charge(request)
        return request

    def oldest_arrival(self) -> float | None:
        """Monotonic seconds of the earliest arrival; None when nothing waits."""
        return min(
            (top[0] for arrivals in self._arrivals.values() if (top := arrivals.top()) is not None), default=None
        )

    def earliest_deadline(self) -> float | None:
        """Monotonic seconds; None when no request has a deadline."""
        top = self._deadlines.top()
        return None if top is None else top[0]

    def has(self, priority: int) -> bool:
        """True if a request of this class waits."""
        return bool(self._classes[priority])

    def _highest(self) -> int | None:
        return next((priority for priority, queue in self._classes.items() if queue), None)

    def _next_class(self, now: float) -> int | None:
        """The highest class in which something waits, or the one that has waited longest for it, and too long."""
        highest = self._highest()
        if highest is None or self._promotion_debt > 0:
            return highest
        aged = now - PROMOTE_AFTER_S
        lower = [
            (top[0], priority)
            for priority in CLASSES
            if priority < highest and (top := self._arrivals[priority].top()) is not None and top[0] < aged
        ]
        return min(lower)[1] if lower else highest
