"""Late binding: now and then the first waiting requests move to workers that would serve them clearly sooner.

Pure. A pass takes as many decisions as it needs, so that none holds the event loop for long.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from common.limits import MAX_REPLACED_REQUESTS, REPLACE_IDLE_S, REPLACE_S
from router.scheduling.admission import AdmissionQueue
from router.scheduling.binding import Binding
from router.scheduling.lane import Lane, lane_of
from router.scheduling.queued_request import QueuedRequest

# Every so many waiting requests add REPLACE_S to the interval between two passes.
_REQUESTS_PER_INTERVAL = 16
# Waiting requests that one decision looks at: about 2 ms.
_PER_DECISION = 48


@dataclass(slots=True)
class _Pass:
    """A pass that has begun.

    Attributes:
        requests: those to come; one without a lane is parked, or has gone meanwhile.
        ahead: prompt tokens, by worker, of those that have been looked at.
        seen: how many that were.
    """

    requests: deque[QueuedRequest]
    ahead: dict[str, int] = field(default_factory=dict)
    seen: int = 0


class Rebalancing:
    """Passes over the waiting requests.

    Args:
        binding: moves them.
        queue: what waits, in order of service.
    """

    def __init__(self, binding: Binding, queue: AdmissionQueue) -> None:
        self._binding = binding
        self._queue = queue
        self._last = self._next = -math.inf
        self._pass: _Pass | None = None

    def is_due(self, now: float) -> bool:
        """True if a pass begins, or goes on."""
        return now >= self._next

    def begin(self, now: float) -> None:
        """Begins the next pass now: a lane has come."""
        self._next = now

    def begin_early(self) -> None:
        """Begins the next pass earlier: a worker has nothing to do."""
        self._next = min(self._next, self._last + REPLACE_IDLE_S)

    def run(self, now: float) -> None:
        """Moves those of some waiting requests that another worker would serve clearly sooner.

        Each sees what is before it on a lane. The more there are, the longer until the next pass, unless a worker has
        nothing to do.
        """
        if self._pass is None:
            self._pass = _Pass(deque(itertools.islice(self._queue, MAX_REPLACED_REQUESTS)))
        under_way = self._pass
        for _ in range(min(_PER_DECISION, len(under_way.requests))):
            request = under_way.requests.popleft()
            lane, is_free = lane_of(request), not request.alone and not request.only_worker
            if lane is not None and lane.ready and is_free:
                self._rebalance(request, lane, under_way.ahead, now)
                under_way.seen += 1
        if under_way.requests:
            return
        self._pass = None
        self._next = now + REPLACE_S * (1 + under_way.seen / _REQUESTS_PER_INTERVAL)
        self._last = now

    def _rebalance(self, request: QueuedRequest, lane: Lane, ahead: dict[str, int], now: float) -> None:
        better = self._binding.find_better_lane(request, lane, ahead, now)
        if better is not None:
            self._binding.move(request, better, now)
            lane = better.lane
        ahead[lane.worker] = ahead.get(lane.worker, 0) + request.work
