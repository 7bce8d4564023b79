"""Texts that wait to be tokenized: whose goes next, and how many bytes of them there may be.

Pure. A job runs in steps, each a bounded amount of work, and comes back after each. Start-time fair queueing, one step
being one unit of service. Invariants:
  * The jobs here, those that run too, have at most `most_bytes` bytes and are at most `most_jobs`.
  * Within a pool and tenant, jobs end their steps in the order in which they came: one runs to its end before the next
    begins, unless threads are idle.
  * Of two tenants that both wait throughout in a pool, neither gets ahead of the other by more than one step each.
  * A tenant that fills the queue refuses itself: for others the newest jobs of the tenant that holds most make room.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from common.errors import QueueFullError
from common.limits import MAX_QUEUED_REQUESTS, MAX_QUEUED_TEXT_BYTES
from router.scheduling.admission import QUEUE_RETRY_S

_SPARE = 8


class TextPool(Enum):
    """Threads that run a job."""

    SHORT = "short"
    LONG = "long"


@dataclass(slots=True, eq=False)
class TextJob:
    """Text that waits for a thread.

    Attributes:
        tenant: who pays for it; "" for nobody in particular.
        size: bytes that it holds.
        pool: which threads run it.
    """

    tenant: str
    size: int
    pool: TextPool


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
    """The jobs of all pools, from their arrival to their end.

    Args:
        most_bytes: of all jobs together.
        most_jobs: number of jobs.
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
        """Other shares from now on, of tenants that are not like the others, which have 1."""
        self._weights = dict(weights)

    def add(self, job: TextJob) -> list[TextJob]:
        """Takes a new job. Returns those that have been taken out to make room; none of them runs.

        Raises:
            QueueFullError: there is no room, and no other tenant holds more than the job's own would.
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
        """Takes out the job that runs next, and charges its tenant with a step; None when none waits."""
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
        """A job has had a step and needs more; it goes before the others of its tenant."""
        self._wait(job, first=True)

    def abandon(self, job: TextJob) -> None:
        """Nobody wants a job any more: one that waits ends, one that runs is left to come back. Others are unknown."""
        if self._waits(job):
            self.end(job)

    def end(self, job: TextJob) -> None:
        """A job is done, or makes room; whether it waits or runs."""
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
            # Nobody saves up service while he asks for none.
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
        """Drops what tenants without any job have had, when there are more of them than of the others."""
        if len(queue.starts) > 2 * len(self._tenants) + _SPARE:
            queue.starts = {tenant: start for tenant, start in queue.starts.items() if tenant in self._tenants}

    def _newest_of_largest(self, more_than: float, gone: list[TextJob]) -> TextJob | None:
        """The newest job that waits, of the tenant that holds most without `gone`; None when nobody holds more."""
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
        """A tenant's part of the queue, with so much more, per weight."""
        has = self._tenants.get(tenant, _Tenant())
        parts = (has.bytes + more_bytes) / self._most_bytes + (len(has.jobs) + more_jobs) / self._most_jobs
        return parts / self._weights.get(tenant, 1.0)
