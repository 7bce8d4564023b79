"""The order of service: by priority class, and within a class by the service of each tenant divided by its weight.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with tags for tenants instead of requests, so that a cancelled request
costs nothing and a request may change its lane. Invariants:
  * The requests of a tenant in a class are served in the order in which they arrived.
  * Retries (`is_retry`) are served before the other requests of their class, and are not charged again.
  * A tenant's service is the prompt tokens of its served requests, plus OUTPUT_TOKEN_COST for each output token (the
    Virtual Token Counter of Sheng et al., 2024). Answers to one prompt that share its tokens on a worker are charged
    for them once. Output is charged as it is delivered, because its length is not known before, and a refund would
    let a tenant's service decrease. Tokens that a client resends to resume a broken stream, or that an adopted
    sequence repeats, are not charged again.
  * Of two tenants of a class that both wait throughout, neither gets ahead of the other by more than one request, and
    by the output of its running requests, which is charged later:
    |had_a / weight_a - had_b / weight_b| <= most_a / weight_a + most_b / weight_b + running_a + running_b.
  * Higher classes go first without starving lower ones: a class whose oldest request has waited for PROMOTE_AFTER_S
    goes first until it has had PROMOTED_SHARE of the tokens served meanwhile, to within one request of each class.
  * Accounts of a class are dropped when no request of it waits. At most MAX_TENANTS tenants without waiting requests
    are remembered.
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
    """A heap of keys by value, with lazy deletion: only keys in `alive` count. O(log n) amortized.

    A key that leaves `alive` is forgotten. A key that returns must be added again, with the same value.

    Args:
        alive: the keys that count, kept by the owner.
    """

    def __init__(self, alive: Container[int]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int]] = []
        self._limit = _SPARE

    def __len__(self) -> int:
        """Number of entries, stale ones included."""
        return len(self._heap)

    def add(self, value: float, key: int) -> None:
        """Adds a key, which must be in `alive`."""
        heapq.heappush(self._heap, (value, key))
        if len(self._heap) > self._limit:
            self._heap = list({entry for entry in self._heap if entry[1] in self._alive})
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _SPARE

    def top(self) -> tuple[float, int] | None:
        """The least (value, key); None without keys."""
        while self._heap and self._heap[0][1] not in self._alive:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(slots=True)
class _Account:
    """Service of a tenant in a class, divided by its weight, and the number of its waiting requests."""

    start: float
    waiting: int = 0


@dataclass(slots=True)
class _ClassAccounts:
    virtual_time: float = 0.0
    waiting: int = 0
    tenants: dict[str, _Account] = field(default_factory=dict)
    # Number of tenants above which those without waiting requests are forgotten.
    limit: int = MAX_TENANTS

    def account(self, tenant: str) -> _Account:
        """A tenant's account; a new one starts at the virtual time, so that it has no lead and no debt."""
        account = self.tenants.get(tenant)
        if account is None:
            account = self.tenants[tenant] = _Account(self.virtual_time)
        return account

    def trim(self) -> None:
        """Keeps at most MAX_TENANTS accounts of tenants without waiting requests, in O(1) amortized."""
        if len(self.tenants) > self.limit:
            self.tenants = {name: account for name, account in self.tenants.items() if account.waiting}
            self.limit = len(self.tenants) + MAX_TENANTS


class TenantShares:
    """Service of each tenant, over all lanes of a router.

    Args:
        weights: weights of single tenants, > 0.
        default_weight: weight of all other tenants.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, default_weight: float = 1.0) -> None:
        self._weights = dict(weights or {})
        self._default = default_weight
        self._classes = {priority: _ClassAccounts() for priority in CLASSES}

    def __len__(self) -> int:
        """Number of accounts, over all classes."""
        return sum(len(accounts.tenants) for accounts in self._classes.values())

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replaces the weights; service counted so far stays."""
        self._weights = dict(weights)

    def waiting(self, priority: int) -> int:
        """Number of waiting requests of a class."""
        return self._classes[priority].waiting

    def enter(self, request: QueuedRequest) -> None:
        """Counts a request that starts waiting. A tenant saves up no service while it has no waiting request."""
        accounts = self._classes[request.priority]
        account = accounts.account(request.tenant)
        if not account.waiting:
            account.start = max(account.start, accounts.virtual_time)
        account.waiting += 1
        accounts.waiting += 1

    def leave(self, request: QueuedRequest) -> None:
        """Counts a request that stops waiting, served or not."""
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
        """Service of a tenant per weight, or what it would be if the tenant started waiting. The least goes first."""
        accounts = self._classes[priority]
        account = accounts.tenants.get(tenant)
        if account is None:
            return accounts.virtual_time
        return account.start if account.waiting else max(account.start, accounts.virtual_time)

    def charge(self, request: QueuedRequest) -> None:
        """Charges the tenant of a waiting request that is about to be served."""
        if request.is_retry:
            return
        accounts = self._classes[request.priority]
        account = accounts.tenants[request.tenant]
        accounts.virtual_time = max(accounts.virtual_time, account.start)
        account.start += request.charged_tokens / self.weight(request.tenant)

    def charge_output(self, request: QueuedRequest, output: int) -> None:
        """Charges a tenant for output, unless no other request of the class waits.

        Args:
            request: a served request, which may be charged before; no token is charged twice.
            output: all its output tokens since its arrival.
        """
        tokens, request.output = output - request.output, output
        accounts = self._classes[request.priority]
        if tokens and accounts.waiting:
            accounts.account(request.tenant).start += OUTPUT_TOKEN_COST * tokens / self.weight(request.tenant)
            accounts.trim()


class _TenantQueue:
    """The requests of one tenant in a lane, in order of arrival, even if some changed to this lane later."""

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
        # For each tenant at least one entry that is a lower bound of its current `_rank`.
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
                # A tenant that is ahead gets `lead` per weight less until the two are equal.
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
            # The tenant was served in another lane, or its first request has changed.
            heapq.heapreplace(self._heap, rank)
        return None

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self.retries.values()
        for own in self.tenants.values():
            yield from own.requests.values()

    def __bool__(self) -> bool:
        return bool(self.retries or self.tenants)

    def _trim(self) -> None:
        """Rebuilds the heap when most of its entries are stale."""
        if len(self._heap) > 2 * len(self.tenants) + _SPARE:
            self._heap = [self._rank(own.first()) for own in self.tenants.values()]
            heapq.heapify(self._heap)

    def _rank(self, request: QueuedRequest) -> tuple[float, int, str]:
        return self._shares.start(self._priority, request.tenant), request.key, request.tenant


class FairQueue:
    """The requests of one lane, in order of service. Each operation is O(log n), amortized.

    Attributes:
        tokens: tokens of all its requests.
        work: tokens that must be computed for them.
    """

    def __init__(self, shares: TenantShares) -> None:
        self.tokens = 0
        self.work = 0
        self._shares = shares
        self._classes = {priority: _ClassQueue(priority, shares) for priority in CLASSES}
        self._requests: dict[int, QueuedRequest] = {}
        self._arrivals = {priority: LazyMinHeap(self._requests) for priority in CLASSES}
        # Tokens that higher classes must be served before a class is promoted again.
        self._promotion_debt = 0.0
        self._deadlines = LazyMinHeap(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The requests: higher classes first, in no order of tenants."""
        for queue in self._classes.values():
            yield from queue

    def work_before(self, request: QueuedRequest) -> float:
        """Tokens that are computed before a new request, by the current order of service.

        Other tenants count with their share at most, and with less if they are ahead. O(number of tenants).
        """
        higher = sum(self._classes[priority].work for priority in CLASSES if priority > request.priority)
        return higher + self._classes[request.priority].work_before(request)

    def push(self, request: QueuedRequest, *, first: bool = False) -> None:
        """Adds a request that has entered the shares. `first`: ahead of other retries."""
        self.tokens += request.tokens
        self.work += request.work
        self._requests[request.key] = request
        self._classes[request.priority].push(request, first=first)
        self._arrivals[request.priority].add(request.arrival, request.key)
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.key)

    def get(self, key: int) -> QueuedRequest | None:
        """The request with this key; None if it is not in this queue."""
        return self._requests.get(key)

    def remove(self, request: QueuedRequest) -> None:
        """Removes a request that is in this queue."""
        self.tokens -= request.tokens
        self.work -= request.work
        del self._requests[request.key]
        self._classes[request.priority].remove(request)

    def work_before_in_class(self, request: QueuedRequest) -> float:
        """Tokens of the request's own class that are computed before it; see `work_before`."""
        return self._classes[request.priority].work_before(request)

    def head(self, now: float) -> QueuedRequest | None:
        """The request to serve next; None if the queue is empty."""
        priority = self._next_class(now)
        return None if priority is None else self._classes[priority].head()

    def pop(self, now: float) -> QueuedRequest:
        """Removes and returns the head, and charges its tenant."""
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
        """Monotonic seconds of the earliest arrival; None if the queue is empty."""
        return min(
            (top[0] for arrivals in self._arrivals.values() if (top := arrivals.top()) is not None), default=None
        )

    def earliest_deadline(self) -> float | None:
        """Monotonic seconds of the earliest deadline; None without one."""
        top = self._deadlines.top()
        return None if top is None else top[0]

    def has(self, priority: int) -> bool:
        """True if a request of this class waits."""
        return bool(self._classes[priority])

    def _highest(self) -> int | None:
        return next((priority for priority, queue in self._classes.items() if queue), None)

    def _next_class(self, now: float) -> int | None:
        """The class to serve next: the longest waiting one that is due for promotion, else the highest one."""
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
