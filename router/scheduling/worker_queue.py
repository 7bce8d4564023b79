"""One worker as the dispatcher sees it: who waits for it, what it reported, and what it has not yet reported on.

State, gate and room are those of docs/architecture.md. Invariant: `unseen_tokens` and `unseen_seqs` are the sums
over the groups whose serial number is above the last `submit_seen`, so room is never given away twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from common.delay_gate import DelayGate
from common.limits import HEARTBEAT_S, MISSED_HEARTBEATS, PROMOTE_AFTER_S, PROMOTED_SHARE
from router.scheduling.fair_queue import HIGH, FairQueue, QueuedRequest, TenantShares

STALE_REPORT_S = MISSED_HEARTBEATS * HEARTBEAT_S
# A speed that has not been measured again loses its weight with this time constant.
_SPEED_MEMORY_S = 10.0
# A lane that is not open is looked at again after no less, so that rounding lets no timer find it shut for ever.
_LEAST_WAIT_S = 1e-5
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
    prefill_samples: int = 0


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """Summary of what waits at this router for one worker; the worker echoes the fleet's to all routers."""

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
        max_model_len: most tokens of a sequence there, prompt and answer.
        caches_prefixes: whether it shares the KV of equal prefixes and says what it holds.
        shares: what the tenants have had; every request that is bound has entered it.
    """

    def __init__(
        self,
        worker: str,
        model: str,
        report: LoadReport,
        numerics: str = "",
        shares: TenantShares | None = None,
        *,
        max_model_len: float = math.inf,
        caches_prefixes: bool = True,
    ) -> None:
        self.caches_prefixes = caches_prefixes
        self.max_model_len = max_model_len
        self.worker = worker
        self.model = model
        self.numerics = numerics
        self.ready = True
        # Most sequences at a time, None for as many as it reports room for.
        self.limit: int | None = None
        # It has a request for itself: key of the one that waits here, or has gone to the worker.
        self._alone: int | None = None
        self.last_report = report
        self._measured = report.time
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

    def can_serve(self, numerics: str | None, most_tokens: int) -> bool:
        """True if the worker can run a sequence of so many tokens in a numerics class (None: in any) to its end."""
        return numerics in (None, self.numerics) and most_tokens <= self.max_model_len

    @property
    def bound_tokens(self) -> int:
        """Tokens of the requests that wait for this worker."""
        return self._bound.tokens

    @property
    def is_taken(self) -> bool:
        """True if one request has this worker for itself, and others have to wait."""
        return self._alone is not None

    @property
    def is_full(self) -> bool:
        """True if the worker has a limit, and has as many sequences, those that wait here and on their way included."""
        return self.limit is not None and len(self._bound) + self._present >= self.limit

    @property
    def is_blocked(self) -> bool:
        """True if something that waits here waits for others to end, whatever room the worker reports.

        One request has the worker for itself, or there are more than its limit.
        """
        return self.is_taken or (self.limit is not None and len(self._bound) + self._present > self.limit)

    def share(self, key: int) -> None:
        """The request that had this worker for itself does not need it any more, or has gone; a no-op for any other.

        The next one that waits here for the same takes its place.
        """
        if self._alone == key:
            self._alone = next((request.key for request in self._bound if request.alone), None)

    def bind(self, request: QueuedRequest, *, first: bool = False) -> None:
        """Lets `request` wait for this worker; `first`: before others that have been with a worker."""
        request.lane = self
        if request.alone and self._alone is None:
            self._alone = request.key
        self._work += request.work
        self._bound.push(request, first=first)

    def unbind(self, request: QueuedRequest) -> None:
        """Forgets a request that waits for this worker."""
        self._bound.remove(request)
        self._work -= request.work
        request.lane = None
        self.share(request.key)

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
        if report.prefill_samples != self.last_report.prefill_samples:
            self._measured = report.time
        self.last_report = report
        while self._unseen and self._unseen[0].serial <= report.submit_seen:
            group = self._unseen.popleft()
            self.unseen_tokens -= group.tokens
            self.unseen_seqs -= group.seqs
            self._work -= group.work

    def speed(self, prior: float, now: float) -> float:
        """Prompt tokens that the worker computes per second: its measured speed, drawn to `prior` with the time
        since then. So a worker that once looked slow and therefore gets little is tried again."""
        own = self.last_report.prefill_rate
        if own <= 0:
            return prior
        return prior + (own - prior) * math.exp(-max(now - self._measured, 0.0) / _SPEED_MEMORY_S)

    def waits_s(self, speed: float, ahead: int) -> float:
        """Seconds until the worker begins with a request that waits here with `ahead` tokens of work before it."""
        return (self.last_report.waiting_tokens + self._work - self._bound.work + ahead) / speed

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
        """True if the worker has nothing to do and nothing is on its way to it."""
        report = self.last_report
        return not (report.decoding_seqs or report.waiting_seqs or report.waiting_tokens or self._unseen)

    def record(self) -> LaneRecord:
        """Summary of what waits here, for the worker's echo."""
        return LaneRecord(self._bound.oldest_arrival(), self.bound_tokens, len(self._bound))

    def load(self, now: float) -> LaneLoad:
        """Load that waits here and at the worker, for operators."""
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
        """True if what waits here may go now, room aside (docs/architecture.md)."""
        if self._alone is not None:
            return self._lone() is not None and not self._unseen
        report = self.last_report
        return (
            self._gate_open(now, gate)
            or self.bound_tokens >= report.room_tokens - self.unseen_tokens
            or now - report.time > STALE_REPORT_S
            or self._bound.has(HIGH)
            or self._deadline_in(now) <= self._hold_margin_s()
        )

    def opens_in(self, now: float, gate: DelayGate) -> float:
        """Seconds until the gate opens if nothing is reported meanwhile; 0 when it is open, or waits for an event."""
        if self._alone is not None or self.is_open(now, gate):
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
        return max(_LEAST_WAIT_S, min(by_age, by_staleness, by_deadline))

    def release(self, now: float) -> tuple[list[QueuedRequest], int]:
        """Takes the longest prefix of what waits that fits the worker's room.

        The first request always goes when there is any room, because the worker chunks it, and when the worker is
        idle, so that no report can starve a lane.

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
            if not fits and (group or not self.idle):
                break
            group.append(self._bound.pop(now))
            request.lane = None
            used += request.tokens
        return (group, self._send(group, used)) if group else ([], 0)

    def _lone(self) -> QueuedRequest | None:
        """The request that waits here to have the worker for itself."""
        return None if self._alone is None else self._bound.get(self._alone)

    def _release_alone(self) -> tuple[list[QueuedRequest], int]:
        """Takes the request that has the worker for itself, when nothing else of this router is on its way there."""
        request = self._lone()
        tokens, seqs = self._room()
        if request is None or self._unseen or not (self.idle or (tokens > 0 and seqs > 0)):
            return [], 0
        self._bound.remove(request)
        request.lane = None
        return [request], self._send([request], request.tokens)

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
        seqs = report.room_seqs - self.unseen_seqs
        if self.limit is not None:
            seqs = min(seqs, self.limit - self._present)
        return (report.room_tokens - self.unseen_tokens) * share, seqs

    @property
    def _present(self) -> int:
        """Sequences at the worker, or on their way to it."""
        return self.last_report.decoding_seqs + self.last_report.waiting_seqs + self.unseen_seqs

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
        """Time before its deadline at which a request is no longer held: its prefill here, and a margin."""
        return DEADLINE_MARGIN_S + self.seconds_for(0)
