"""Queue of texts to tokenize: bounds their bytes and chooses the next one fairly among tenants. Pure.

A job runs in bounded steps and returns to the queue after each step. The order is start-time fair queueing, with one
step as the unit of service. Invariants:
  * Waiting and running jobs together have at most `most_bytes` bytes, and their number is at most `most_jobs`.
  * Within a pool and tenant, jobs run in order of arrival: one ends before the next begins, unless threads are idle.
  * Of two tenants that both wait in a pool, neither gets ahead of the other by more than one step each.
  * If the queue is full, the newest jobs of the tenant that holds most are removed, and only for other tenants.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from common.errors import QueueFullError
from common.limits import MAX_QUEUED_REQUESTS, MAX_QUEUED_TEXT_BYTES
from common.telemetry.ledger import Blame, Ledger
from router.scheduling.admission import QUEUE_RETRY_S

_SPARE = 8
# Turns of threads that may be blamed: the newest ones of a pool.
_MOST_BLAMED = 32


class TextPool(Enum):
    """Kinds of threads that run jobs."""

    SHORT = "short"
    LONG = "long"


@dataclass(slots=True, eq=False)
class TextJob:
    """Text that waits for a thread.

    Attributes:
        tenant: tenant whose share it uses; "" for calls without a tenant.
        size: bytes that it holds.
        pool: threads that run it.
    """

    tenant: str
    size: int
    pool: TextPool


@dataclass(slots=True, eq=False)
class ThreadTurn:
    """Turn of a call on a thread; without its text, which may be large.

    Attributes:
        request_id: id of its request.
        tenant: its tenant.
        began: monotonic seconds.
        ended: infinite while it runs.
    """

    request_id: str
    tenant: str
    began: float
    ended: float = math.inf


class ThreadTurns:
    """The newest turns on the threads of one pool: a call that waited was behind them."""

    def __init__(self) -> None:
        self._turns: deque[ThreadTurn] = deque(maxlen=_MOST_BLAMED)

    def add(self, turn: ThreadTurn) -> None:
        """Adds a turn that begins."""
        self._turns.append(turn)

    def longest(self, ledger: Ledger, now: float, request_id: str) -> Blame | None:
        """The request that had threads longest since `ledger` was last accounted for; never `request_id` itself."""
        seconds: dict[tuple[str, str], float] = {}
        for turn in self._turns:
            overlap = min(turn.ended, now) - max(turn.began, ledger.since)
            if overlap > 0 and turn.request_id != request_id:
                name = turn.request_id, turn.tenant
                seconds[name] = seconds.get(name, 0.0) + overlap
        if not seconds:
            return None
        name = max(seconds, key=seconds.__getitem__)
        return Blame(*name, min(seconds[name], now - ledger.since))


@dataclass(slots=True)
class _PoolQueue:
    virtual_time: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, deque[TextJob]] = field(default_factory=dict)


@dataclass(slots=True)
class _Tenant:
    """All jobs of a tenant, in order of arrival."""

    jobs: OrderedDict[TextJob, None] = field(default_factory=OrderedDict)
    bytes: int = 0


class TextQueue:
    """Holds the jobs of all pools from arrival to end, waiting and running.

    Args:
        most_bytes: most bytes of all jobs together.
        most_jobs: most jobs.
    """

    def __init__(self, most_bytes: int = MAX_QUEUED_TEXT_BYTES, most_jobs: int = MAX_QUEUED_REQUESTS) -> None:
        self._most_bytes = most_bytes
        self._most_jobs = most_jobs
        self._weights: Mapping[str, float] = {}
        self._pools = {pool: _PoolQueue() for pool in TextPool}
        self._tenants: dict[str, _Tenant] = {}
        self._count = 0
        self.bytes = 0

    def __len__(self) -> int:
        """Number of jobs that have not ended."""
        return self._count

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Sets the weights of tenants. Tenants that are not named have weight 1."""
        self._weights = dict(weights)

    def add(self, job: TextJob) -> list[TextJob]:
        """Adds a new job. Returns waiting jobs of another tenant that were removed to make room.

        Raises:
            QueueFullError: there is no room, and no other tenant holds more than this tenant would.
        """
        made_room: list[TextJob] = []
        mine = self._held(job.tenant, 1, job.size)
        more = job.size
        while self.bytes + more > self._most_bytes or self._count - len(made_room) >= self._most_jobs:
            out = self._newest_of_largest(mine, made_room)
            if out is None:
                raise QueueFullError(self._count, QUEUE_RETRY_S)
            made_room.append(out)
            more -= out.size
        for out in made_room:
            self.end(out)
        tenant = self._tenants.setdefault(job.tenant, _Tenant())
        tenant.jobs[job] = None
        tenant.bytes += job.size
        self._count += 1
        self.bytes += job.size
        self._wait(job, first=False)
        return made_room

    def next(self, pool: TextPool) -> TextJob | None:
        """Removes the next job to run from the waiting ones and charges its tenant one step; None if no job waits."""
        queue = self._pools[pool]
        if not queue.waiting:
            return None
        tenant = min(queue.waiting, key=queue.starts.__getitem__)
        waiting = queue.waiting[tenant]
        job = waiting.popleft()
        queue.virtual_time = max(queue.virtual_time, queue.starts[tenant])
        queue.starts[tenant] += 1 / self._weights.get(tenant, 1.0)
        if not waiting:
            del queue.waiting[tenant]
        return job

    def again(self, job: TextJob) -> None:
        """Puts a job back after a step, in front of the other jobs of its tenant."""
        self._wait(job, first=True)

    def abandon(self, job: TextJob) -> None:
        """Ends a job whose caller left, if it waits. A running job ends after its step. No-op for an ended job."""
        if self._waits(job):
            self.end(job)

    def end(self, job: TextJob) -> None:
        """Removes a job, waiting or running, from the queue."""
        if self._waits(job):
            self._unwait(job)
        tenant = self._tenants[job.tenant]
        del tenant.jobs[job]
        tenant.bytes -= job.size
        if not tenant.jobs:
            del self._tenants[job.tenant]
        self._count -= 1
        self.bytes -= job.size
        for queue in self._pools.values():
            self._forget(queue)

    def _wait(self, job: TextJob, *, first: bool) -> None:
        queue = self._pools[job.pool]
        if job.tenant not in queue.waiting:
            # A tenant saves up no service while it has no job here.
            queue.starts[job.tenant] = max(queue.starts.get(job.tenant, 0.0), queue.virtual_time)
            queue.waiting[job.tenant] = deque()
        if first:
            queue.waiting[job.tenant].appendleft(job)
        else:
            queue.waiting[job.tenant].append(job)

    def _waits(self, job: TextJob) -> bool:
        return job in self._pools[job.pool].waiting.get(job.tenant, ())

    def _unwait(self, job: TextJob) -> None:
        queue = self._pools[job.pool]
        queue.waiting[job.tenant].remove(job)
        if not queue.waiting[job.tenant]:
            del queue.waiting[job.tenant]

    def _forget(self, queue: _PoolQueue) -> None:
        """Drops the records of tenants without a job, once they outnumber those of tenants with jobs."""
        if len(queue.starts) > 2 * len(self._tenants) + _SPARE:
            queue.starts = {tenant: start for tenant, start in queue.starts.items() if tenant in self._tenants}

    def _newest_of_largest(self, more_than: float, gone: list[TextJob]) -> TextJob | None:
        """Newest waiting job, without `gone`, of the tenant that holds most; None if none holds over `more_than`."""
        held = {tenant: self._held(tenant) for tenant in self._tenants}
        for tenant in {job.tenant for job in gone}:
            mine = [job.size for job in gone if job.tenant == tenant]
            held[tenant] = self._held(tenant, -len(mine), -sum(mine))
        for tenant in sorted(held, key=held.__getitem__, reverse=True):
            if held[tenant] <= more_than:
                return None
            waiting = {job for queue in self._pools.values() for job in queue.waiting.get(tenant, ())}.difference(gone)
            newest = next((job for job in reversed(self._tenants[tenant].jobs) if job in waiting), None)
            if newest is not None:
                return newest
        return None

    def _held(self, tenant: str, more_jobs: int = 0, more_bytes: int = 0) -> float:
        """Part of the queue that a tenant holds, with `more_jobs` and `more_bytes` added, divided by its weight."""
        has = self._tenants.get(tenant, _Tenant())
        parts = (has.bytes + more_bytes) / self._most_bytes + (len(has.jobs) + more_jobs) / self._most_jobs
        return parts / self._weights.get(tenant, 1.0)
