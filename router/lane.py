"""One worker as the dispatcher sees it: who waits for it, what it reported, and what it has not yet reported on.

State, gate and room are those of design-details section 5. Invariant: `unseen_tokens` and `unseen_seqs` are the sums
over the groups whose serial number is above the last `submit_seen`, so room is never given away twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.limits import HEARTBEAT_S, MISSED_HEARTBEATS, PROMOTE_AFTER_S, PROMOTED_SHARE
from router.fair_queue import HIGH, FairQueue, QueuedRequest, TenantShares

STALE_REPORT_S = MISSED_HEARTBEATS * HEARTBEAT_S
# A request whose deadline is closer than its prefill plus this is not held.
DEADLINE_MARGIN_S = 0.25


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The worker's load as of `time` (monotonic seconds at the router); fields as in the proto's Load."""

    time: float
    decoding_seqs: int = 0
    waiting_seqs: int = 0
    waiting_tokens: int = 0
    room_tokens: int = 0
    room_seqs: int = 0
    last_prompt_latency_s: float = 0.0
    prefill_rate: float = 0.0
    fleet_oldest_age_s: float = 0.0
    fleet_tokens: int = 0
    submit_seen: int = 0
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """What waits at this router for one worker; the worker echoes the fleet's to all routers."""

    oldest_arrival: float | None
    tokens: int
    seqs: int


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """A lane as operators see it; fields as in the admin proto's Worker."""

    queued: int
    decoding_seqs: int
    waiting_seqs: int
    outstanding_tokens: int
    prefill_rate: float
    report_age_ms: int


@dataclass(frozen=True, slots=True)
class _Group:
    serial: int
    tokens: int
    seqs: int
    work: int


class Lane:
    """The lane of one worker.

    Args:
        worker: the worker's address or id, unique in the fleet.
        model: identity of the model it serves.
        report: its load when it said Welcome.
        numerics: its numerics class.
        shares: what the tenants have had; every request that is bound has entered it.
    """

    def __init__(
        self,
        worker: str,
        model: str,
        report: LoadReport,
        numerics: str = "",
        shares: TenantShares | None = None,
    ) -> None:
        self.worker = worker
        self.model = model
        self.numerics = numerics
        self.ready = True
        self.last_report = report
        self.unseen_tokens = 0
        self.unseen_seqs = 0
        # Prompt tokens to compute of what is bound, and of what is on its way.
        self._work = 0
        self._bound = FairQueue(TenantShares() if shares is None else shares)
        self._unseen: deque[_Group] = deque()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._bound)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._bound)

    @property
    def bound_tokens(self) -> int:
        """Tokens of the requests that wait for this worker."""
        return self._bound.tokens

    def bind(self, request: QueuedRequest, *, first: bool = False) -> None:
        """Lets `request` wait for this worker; `first`: before others that have been with a worker."""
        request.lane = self.worker
        self._work += request.work
        self._bound.push(request, first=first)

    def unbind(self, request: QueuedRequest) -> None:
        """Forgets a request that waits for this worker."""
        self._bound.remove(request)
        self._work -= request.work
        request.lane = None

    def seconds_to_serve(self, request: QueuedRequest) -> float:
        """Least seconds until the prompt of a new request is computed, if it waits here.

        0 when nothing is before it, and at an unknown speed: a measurement that is wrong must not keep out the request
        that would correct it.
        """
        on_its_way = self.last_report.waiting_tokens + self._work - self._bound.work
        before = on_its_way + self._bound.work_before(request)
        rate = self.last_report.prefill_rate
        if not before or rate <= 0:
            return 0.0
        own = self._bound.work_before_in_class(request) + request.work
        # Behind all higher classes, or by promotion.
        promoted_s = PROMOTE_AFTER_S + (on_its_way + own / PROMOTED_SHARE) / rate
        return min((before + request.work) / rate, promoted_s)

    def take_report(self, report: LoadReport) -> None:
        """Replaces the load and drops the groups that it accounts for."""
        self.last_report = report
        while self._unseen and self._unseen[0].serial <= report.submit_seen:
            group = self._unseen.popleft()
            self.unseen_tokens -= group.tokens
            self.unseen_seqs -= group.seqs
            self._work -= group.work

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens to compute that wait at the worker, are on their way to it, or wait for it here."""
        return self.last_report.waiting_tokens + self._work

    def seconds_for(self, tokens: int) -> float:
        """Seconds until `tokens` more prompt tokens would be computed, behind all others; 0 at an unknown speed."""
        rate = self.last_report.prefill_rate
        return (self.outstanding_tokens + tokens) / rate if rate > 0 else 0.0

    @property
    def idle(self) -> bool:
        """Whether the worker has nothing to do and nothing is on its way to it."""
        report = self.last_report
        return not (report.decoding_seqs or report.waiting_seqs or report.waiting_tokens or self._unseen)

    def record(self) -> LaneRecord:
        """What waits here, for the worker's echo."""
        return LaneRecord(self._bound.oldest_arrival(), self.bound_tokens, len(self._bound))

    def load(self, now: float) -> LaneLoad:
        """What waits here and at the worker, for operators."""
        report = self.last_report
        return LaneLoad(
            queued=len(self._bound),
            decoding_seqs=report.decoding_seqs,
            waiting_seqs=report.waiting_seqs,
            outstanding_tokens=self.outstanding_tokens,
            prefill_rate=report.prefill_rate,
            report_age_ms=max(0, round(1000 * (now - report.time))),
        )

    def is_open(self, now: float, gate: DelayGate) -> bool:
        """Whether what waits here may go now, room aside (design-details section 5)."""
        report = self.last_report
        return (
            self._gate_open(now, gate)
            or self.bound_tokens >= report.room_tokens - self.unseen_tokens
            or now - report.time > STALE_REPORT_S
            or self._bound.has(HIGH)
            or self._deadline_in(now) <= self._hold_margin_s()
        )

    def opens_in(self, now: float, gate: DelayGate) -> float:
        """Seconds until the gate opens if nothing is reported meanwhile; 0 when it is open."""
        if self.is_open(now, gate):
            return 0.0
        report = self.last_report
        by_age = gate.opens_in(
            age_s=self._age_s(now),
            last_prompt_latency_s=report.last_prompt_latency_s,
            decoding=report.decoding_seqs > 0,
            waiting_at_worker=self._work_waits(),
        )
        by_staleness = report.time + STALE_REPORT_S - now
        by_deadline = self._deadline_in(now) - self._hold_margin_s()
        return max(0.0, min(by_age, by_staleness, by_deadline))

    def release(self, now: float) -> tuple[list[QueuedRequest], int]:
        """Takes the longest prefix of what waits that fits the worker's room.

        The first request always goes when there is any room, because the worker chunks it, and when the worker is
        idle, so that no report can starve a lane.

        Returns:
            The requests, and the serial number of their group; ([], 0) when nothing fits.
        """
        tokens, seqs = self._room()
        group: list[QueuedRequest] = []
        used = 0
        while (request := self._bound.head(now)) is not None:
            fits = len(group) < seqs and (used + request.tokens <= tokens or (not group and tokens > 0))
            if not fits and (group or not self.idle):
                break
            group.append(self._bound.pop(now))
            request.lane = None
            used += request.tokens
        return (group, self._send(group, used)) if group else ([], 0)

    def _send(self, group: list[QueuedRequest], tokens: int) -> int:
        self._serial += 1
        self._unseen.append(_Group(self._serial, tokens, len(group), sum(request.work for request in group)))
        self.unseen_tokens += tokens
        self.unseen_seqs += len(group)
        return self._serial

    def _room(self) -> tuple[float, int]:
        """Room in tokens and sequences: what was reported less what is on its way, and of that this router's share."""
        report = self.last_report
        share = self.bound_tokens / max(report.fleet_tokens, self.bound_tokens, 1)
        return (report.room_tokens - self.unseen_tokens) * share, report.room_seqs - self.unseen_seqs

    def _gate_open(self, now: float, gate: DelayGate) -> bool:
        report = self.last_report
        return gate.is_open(
            age_s=self._age_s(now),
            last_prompt_latency_s=report.last_prompt_latency_s,
            decoding=report.decoding_seqs > 0,
            waiting_at_worker=self._work_waits(),
        )

    def _work_waits(self) -> bool:
        return self.last_report.waiting_seqs > 0 or self.unseen_seqs > 0

    def _age_s(self, now: float) -> float:
        """Age of the fleet's oldest request for this worker: this router's, or the one that the worker echoes."""
        report = self.last_report
        oldest = self._bound.oldest_arrival()
        own = 0.0 if oldest is None else now - oldest
        echoed = report.fleet_oldest_age_s + now - report.time if report.fleet_oldest_age_s else 0.0
        return max(own, echoed)

    def _deadline_in(self, now: float) -> float:
        """Seconds until the first deadline of what waits here; infinite when there is none."""
        deadline = self._bound.earliest_deadline()
        return math.inf if deadline is None else deadline - now

    def _hold_margin_s(self) -> float:
        """How long before its deadline a request is no longer held: its prefill here, and a margin."""
        return DEADLINE_MARGIN_S + self.seconds_for(0)
