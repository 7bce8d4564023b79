"""The queue of one worker at this router: which requests wait for it, and when and how many of them are released.

State, gate and room are those of docs/explanation/architecture.md; what the worker does is in its `WorkerLoad`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from common.delay_gate import DelayGate
from common.limits import PROMOTE_AFTER_S, PROMOTED_SHARE
from router.scheduling.fair_queue import FairQueue, TenantShares
from router.scheduling.lane_waits import LaneWaits
from router.scheduling.queued_request import HIGH, QueuedRequest
from router.scheduling.worker_load import STALE_REPORT_S, LoadReport, WorkerLoad

# Least time to the next look at a closed gate: with less, rounding could let a timer find it closed for ever.
_LEAST_WAIT_S = 1e-5
# The gate holds no request whose deadline is closer than its prefill plus this.
DEADLINE_MARGIN_S = 0.25


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """Summary of what waits for one worker at this router; the worker echoes those of all routers."""

    oldest_arrival: float | None
    tokens: int
    seqs: int


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A lane as operators see it; fields as in the admin proto's Worker and the worker proto's Load.

    `held`: requests wait in the lane because the delay gate is shut. `fleet_age_s`: age of the oldest request that
    waits for the worker, at any router. `elsewhere_tokens`: prompt tokens that wait for it at other routers.
    """

    queued: int
    decoding_seqs: int
    waiting_seqs: int
    outstanding_tokens: int
    prefill_rate: float
    report_age_ms: int
    free_blocks: int = 0
    total_blocks: int = 0
    held: bool = False
    fleet_age_s: float = 0.0
    elsewhere_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LaneKind:
    """The requests that a worker can serve; workers of one kind can serve the same ones.

    Attributes:
        numerics: its numerics class.
        max_model_len: most tokens of a sequence, prompt and answer.
        grammar_engine: library that compiles grammars there; "" for none.
        role: half of the work that it does: PREFILL_FEATURE, DECODE_FEATURE, or "" for both.
        kv_stores: KV tiers that it can share with other workers.
    """

    numerics: str = ""
    max_model_len: float = math.inf
    grammar_engine: str = ""
    role: str = ""
    kv_stores: frozenset[str] = frozenset()

    def can_serve(self, numerics: str | None, most_tokens: int, grammar_engine: str = "") -> bool:
        """True if the worker can run a sequence of up to `most_tokens` tokens to its end.

        Args:
            numerics: required numerics class, None for any.
            most_tokens: longest prompt and answer together.
            grammar_engine: library of the sequence's grammar, "" for none.
        """
        is_class, compiles = numerics in (None, self.numerics), grammar_engine in ("", self.grammar_engine)
        return is_class and compiles and most_tokens <= self.max_model_len

    def suits(self, request: QueuedRequest) -> bool:
        """True if the worker can run a request to its end."""
        return self.can_serve(request.numerics, request.most_tokens, request.grammar_engine)


class Lane:
    """The queue of one worker at this router, and the worker's load.

    Attributes:
        kind: what the worker can serve.
        caches_prefixes: True if the worker shares the KV of equal prefixes and reports what it holds.
        load: the worker's load.
        ready: True if the worker accepts new work.
        limit: most sequences at a time, None for as many as the worker reports room for.
        waits: why its requests wait.

    Args:
        worker: the worker's address or id, unique in the fleet.
        model: identity of the model it serves.
        report: its load when it said Welcome.
        shares: service that each tenant has received; a request enters it before it is bound.
        kind: as the attribute.
        caches_prefixes: as the attribute.
    """

    def __init__(
        self,
        worker: str,
        model: str,
        report: LoadReport,
        shares: TenantShares,
        kind: LaneKind,
        *,
        caches_prefixes: bool,
    ) -> None:
        self.worker = worker
        self.model = model
        self.kind = kind
        self.caches_prefixes = caches_prefixes
        self.load = WorkerLoad(report)
        self.ready = True
        self.limit: int | None = None
        self.waits = LaneWaits()
        # Key of the request that the worker is reserved for; it waits here, or runs on the worker.
        self._alone: int | None = None
        self._bound = FairQueue(shares)

    def __len__(self) -> int:
        return len(self._bound)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._bound)

    @property
    def bound_tokens(self) -> int:
        """Tokens of the requests in this lane."""
        return self._bound.tokens

    @property
    def is_taken(self) -> bool:
        """True if the worker is reserved for one request."""
        return self._alone is not None

    @property
    def is_full(self) -> bool:
        """True if the limit is reached by the sequences at the worker, on their way, and in this lane."""
        return self.limit is not None and len(self._bound) + self.load.num_seqs >= self.limit

    @property
    def is_blocked(self) -> bool:
        """True if a request in this lane must wait for others to end, whatever room the worker reports.

        The worker is reserved for one request, or the limit is exceeded.
        """
        return self.is_taken or (self.limit is not None and len(self._bound) + self.load.num_seqs > self.limit)

    def has_place(self, num_tokens: int, block_size: int) -> bool:
        """True if a sequence can run at the worker without waiting for another one to end.

        Args:
            num_tokens: of the sequence.
            block_size: tokens of a KV block.
        """
        load = self.load
        # The report counts no blocks of sequences in this lane, on their way, or in the worker's own queue.
        tokens = num_tokens + self.bound_tokens + load.unseen_tokens + load.report.waiting_tokens
        num_seqs = 1 + len(self._bound) + load.unseen_seqs + load.report.waiting_seqs
        # Each sequence fills its last block partly.
        most_blocks = tokens // block_size + num_seqs
        return not (self.is_taken or self.is_full) and self.places > 0 and load.report.free_blocks >= most_blocks

    @property
    def places(self) -> int:
        """Sequences that the worker can run besides those on their way and in this lane; may be negative."""
        return self.load.report.room_seqs - self.load.unseen_seqs - len(self._bound)

    def share(self, key: int) -> None:
        """Ends the exclusive use of this worker by request `key`; a no-op if it has none.

        The next waiting request that needs the worker to itself gets it.
        """
        if self._alone == key:
            self._alone = next((request.key for request in self._bound if request.alone), None)

    def bind(self, request: QueuedRequest, *, first: bool = False) -> None:
        """Adds a request to this lane. `first`: ahead of the lane's other retries."""
        request.lane = self
        request.worker = self.worker
        if request.alone and self._alone is None:
            self._alone = request.key
        self._bound.push(request, first=first)

    def unbind(self, request: QueuedRequest) -> None:
        """Removes a request from this lane."""
        self._bound.remove(request)
        request.lane = None
        self.share(request.key)

    def seconds_to_serve(self, request: QueuedRequest) -> float:
        """Least seconds until the prompt of a new request is computed, if it waits in this lane.

        0 when nothing is ahead of it, and at an unknown speed: a wrong measurement must not keep out the request that
        would correct it.
        """
        on_its_way, rate = self.load.waiting_work, self.load.report.prefill_rate
        before = on_its_way + self._bound.work_before(request)
        if not before or rate <= 0:
            return 0.0
        own = self._bound.work_before_in_class(request) + request.work
        # Behind all higher classes, or by promotion.
        promoted_s = PROMOTE_AFTER_S + (on_its_way + own / PROMOTED_SHARE) / rate
        return min((before + request.work) / rate, promoted_s)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens to compute: at the worker, on their way to it, and in this lane."""
        load = self.load
        return load.report.waiting_tokens + load.unseen_work + self._bound.work

    def record(self) -> LaneRecord:
        """Summary of what waits in this lane at this router; the worker echoes it to all routers."""
        return LaneRecord(self._bound.oldest_arrival(), self.bound_tokens, len(self._bound))

    def status(self, now: float, gate: DelayGate) -> LaneStatus:
        """Requests in this lane and at the worker, for operators."""
        report = self.load.report
        return LaneStatus(
            queued=len(self._bound),
            decoding_seqs=report.decoding_seqs,
            waiting_seqs=report.waiting_seqs,
            outstanding_tokens=self.outstanding_tokens,
            prefill_rate=report.prefill_rate,
            report_age_ms=max(0, round(1000 * (now - report.time))),
            free_blocks=min(report.free_blocks, report.total_blocks),
            total_blocks=report.total_blocks,
            held=len(self._bound) > 0 and not self.is_open(now, gate),
            fleet_age_s=self._age_s(now),
            elsewhere_tokens=max(0, report.fleet_tokens - self.bound_tokens),
        )

    def is_open(self, now: float, gate: DelayGate) -> bool:
        """True if the gate is open, so that requests may go while there is room (docs/explanation/architecture.md)."""
        if self._alone is not None:
            return self._lone() is not None and not self.load.has_unseen
        report = self.load.report
        return (
            not self._gate_opens_in(now, gate)
            or self.bound_tokens >= report.room_tokens - self.load.unseen_tokens
            or now - report.time > STALE_REPORT_S
            or self._bound.has(HIGH)
            or self._holdable_s(now) <= 0
        )

    def opens_in(self, now: float, gate: DelayGate) -> float:
        """Seconds until the gate opens without a new report; 0 when it is open, or only an event can open it."""
        if self._alone is not None or self.is_open(now, gate):
            return 0.0
        by_staleness = self.load.report.time + STALE_REPORT_S - now
        return max(_LEAST_WAIT_S, min(self._gate_opens_in(now, gate), by_staleness, self._holdable_s(now)))

    def release(self, now: float) -> tuple[list[QueuedRequest], int]:
        """Removes the longest prefix of the queue that fits the worker's room.

        The first request always goes if there is any room, because the worker chunks it, and if the worker is idle, so
        that no report can starve a lane.

        Returns:
            The requests, and the serial number of their group; ([], 0) when nothing fits.
        """
        if self._alone is not None:
            return self._release_alone()
        tokens, seqs = self._room()
        group: list[QueuedRequest] = []
        used = 0
        while (request := self._bound.head(now)) is not None:
            fits = len(group) < seqs and (used + request.tokens <= tokens or (not group and tokens > 0))
            if not fits and (group or not self.load.is_idle):
                break
            group.append(self._bound.pop(now))
            request.lane = None
            used += request.tokens
        return (group, self.load.send(group)) if group else ([], 0)

    def _lone(self) -> QueuedRequest | None:
        """The request in this lane that the worker is reserved for; None if there is none, or it has been released."""
        return None if self._alone is None else self._bound.get(self._alone)

    def _release_alone(self) -> tuple[list[QueuedRequest], int]:
        """Removes the request that the worker is reserved for, once no other request is on its way there."""
        request = self._lone()
        tokens, seqs = self._room()
        if request is None or self.load.has_unseen or not (self.load.is_idle or (tokens > 0 and seqs > 0)):
            return [], 0
        self._bound.remove(request)
        request.lane = None
        return [request], self.load.send([request])

    def _room(self) -> tuple[float, int]:
        """Room in tokens and sequences: this router's share of the reported room, less the requests on their way."""
        load, report = self.load, self.load.report
        share = self.bound_tokens / max(report.fleet_tokens, self.bound_tokens, 1)
        seqs = report.room_seqs - load.unseen_seqs
        if self.limit is not None:
            seqs = min(seqs, self.limit - load.num_seqs)
        return (report.room_tokens - load.unseen_tokens) * share, seqs

    def _gate_opens_in(self, now: float, gate: DelayGate) -> float:
        """Seconds until the gate opens by age alone; 0 when it is open."""
        report = self.load.report
        return gate.opens_in(
            age_s=self._age_s(now),
            last_prompt_latency_s=report.last_prompt_latency_s,
            decoding=report.decoding_seqs > 0,
            waiting_at_worker=self.load.has_waiting,
        )

    def _age_s(self, now: float) -> float:
        """Age of the oldest request for this worker, at this router or as the worker echoes it."""
        report = self.load.report
        oldest = self._bound.oldest_arrival()
        own = 0.0 if oldest is None else now - oldest
        echoed = report.fleet_oldest_age_s + now - report.time if report.fleet_oldest_age_s else 0.0
        return max(own, echoed)

    def _holdable_s(self, now: float) -> float:
        """Seconds for which the gate may hold the lane, so that its first deadline leaves time for the prefill."""
        deadline = self._bound.earliest_deadline()
        if deadline is None:
            return math.inf
        rate = self.load.report.prefill_rate
        prefill_s = self.outstanding_tokens / rate if rate > 0 else 0.0
        return deadline - now - DEADLINE_MARGIN_S - prefill_s


def lane_of(request: QueuedRequest) -> Lane | None:
    """The lane that a request waits in; None when it is parked or no longer waits."""
    # `Lane.bind` alone sets it.
    return cast("Lane | None", request.lane)
