"""Load of one worker: its last report, and the groups sent since that the report does not count yet.

Pure. Invariant: `unseen_tokens`, `unseen_seqs` and `unseen_work` are the sums over the groups whose serial number is
above the last `submit_seen`, so that no room is used twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.limits import HEARTBEAT_S, MISSED_HEARTBEATS
from router.scheduling.queued_request import QueuedRequest

STALE_REPORT_S = MISSED_HEARTBEATS * HEARTBEAT_S
# A measured speed loses its weight with this time constant until it is measured again.
_SPEED_MEMORY_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load at `time` (monotonic seconds at the router); fields as in the proto's Load."""

    time: float
    decoding_seqs: int = 0
    waiting_seqs: int = 0
    waiting_tokens: int = 0
    room_tokens: int = 0
    room_seqs: int = 0
    last_prompt_latency_s: float = 0.0
    prefill_rate: float = 0.0
    memory_rate: float = 0.0
    fleet_oldest_age_s: float = 0.0
    fleet_tokens: int = 0
    submit_seen: int = 0
    prefill_samples: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _UnseenGroup:
    serial: int
    tokens: int
    seqs: int
    work: int


class WorkerLoad:
    """The load of one worker.

    Attributes:
        report: the last report.
        unseen_tokens: prompt tokens on their way to the worker.
        unseen_seqs: sequences on their way.
        unseen_work: prompt tokens on their way that the worker must compute.
    """

    def __init__(self, report: LoadReport) -> None:
        self.report = report
        self.unseen_tokens = 0
        self.unseen_seqs = 0
        self.unseen_work = 0
        self._measured = report.time
        self._unseen: deque[_UnseenGroup] = deque()
        self._serial = 0

    def take(self, report: LoadReport) -> None:
        """Replaces the report and drops the groups that it counts."""
        if report.prefill_samples != self.report.prefill_samples:
            self._measured = report.time
        self.report = report
        while self._unseen and self._unseen[0].serial <= report.submit_seen:
            group = self._unseen.popleft()
            self.unseen_tokens -= group.tokens
            self.unseen_seqs -= group.seqs
            self.unseen_work -= group.work

    def send(self, group: Sequence[QueuedRequest]) -> int:
        """Counts a group as on its way; returns its serial number."""
        self._serial += 1
        sent = _UnseenGroup(self._serial, sum(r.tokens for r in group), len(group), sum(r.work for r in group))
        self._unseen.append(sent)
        self.unseen_tokens += sent.tokens
        self.unseen_seqs += sent.seqs
        self.unseen_work += sent.work
        return self._serial

    @property
    def has_unseen(self) -> bool:
        """True if a group is on its way to the worker."""
        return bool(self._unseen)

    @property
    def is_idle(self) -> bool:
        """True if the worker has no work and none is on its way."""
        report = self.report
        return not (report.decoding_seqs or report.waiting_seqs or report.waiting_tokens or self._unseen)

    @property
    def has_waiting(self) -> bool:
        """True if prompts wait at the worker or are on their way."""
        return self.report.waiting_seqs > 0 or self.unseen_seqs > 0

    @property
    def num_seqs(self) -> int:
        """Sequences at the worker and on their way."""
        return self.report.decoding_seqs + self.report.waiting_seqs + self.unseen_seqs

    @property
    def waiting_work(self) -> int:
        """Prompt tokens to compute at the worker and on their way."""
        return self.report.waiting_tokens + self.unseen_work

    def speed(self, prior: float, now: float) -> float:
        """Prompt tokens that the worker computes per second: its measured speed, which tends to `prior` as it ages.

        So a worker that once looked slow, and therefore gets few requests, is tried again.
        """
        own = self.report.prefill_rate
        if own <= 0:
            return prior
        return prior + (own - prior) * math.exp(-max(now - self._measured, 0.0) / _SPEED_MEMORY_S)

    def waits_s(self, speed: float, ahead: int) -> float:
        """Seconds until the worker starts on a request that has `ahead` tokens of work before it in the lane."""
        return (self.waiting_work + ahead) / speed
