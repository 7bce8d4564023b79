"""Requests that are to be bound anew because lanes have come or gone, or many have come back: worked off in pieces.

Pure. Until it is worked off, a request may be bound to a lane that is not ready, from which nothing is released, or
parked with one there. What would gain from a lane that has come, and can be served without it, is `rebalancing`'s.
"""

from __future__ import annotations

import itertools
from collections import deque

from router.scheduling.admission import AdmissionQueue
from router.scheduling.binding import Binding
from router.scheduling.lane import Lane, lane_of
from router.scheduling.queued_request import QueuedRequest

# Waiting requests that one call looks at: about 2 ms.
_AT_ONCE = 48


class Rebinding:
    """Requests to bind anew.

    Args:
        binding: binds it.
        queue: what waits; whatever has left it since is nobody's.
    """

    def __init__(self, binding: Binding, queue: AdmissionQueue) -> None:
        self._binding = binding
        self._queue = queue
        # Lanes that take no more, parked requests that may be served, what is to be placed anew.
        self._vacating: deque[Lane] = deque()
        self._waking: deque[int] = deque()
        self._placing: deque[QueuedRequest] = deque()
        # Returned requests beyond those that are bound at once, and the number that came since the last decision.
        self._returning: deque[QueuedRequest] = deque()
        self._num_returned = 0

    def __bool__(self) -> bool:
        """True while something is left."""
        return bool(self._returning or self._vacating or self._waking or self._placing)

    def add_returned(self, request: QueuedRequest, now: float) -> None:
        """Binds a request that has come back: at once, or behind the many that have come with it."""
        self._num_returned += 1
        if self._returning or self._num_returned > _AT_ONCE:
            self._returning.append(request)
        else:
            self._binding.place(request, now, first=True)

    def vacate(self, lane: Lane) -> None:
        """Binds what waits for a lane to others: it takes no more work."""
        if len(lane) and lane not in self._vacating:
            self._vacating.append(lane)

    def refill(self, lane: Lane) -> None:
        """Binds to a lane that takes work what nobody could serve; of the rest, what late binding does not move."""
        if lane in self._vacating:
            self._vacating.remove(lane)
        # In the order of service, which is not the one in which they were parked: those that came back go first.
        self._waking = deque(request.key for request in self._queue if request.key in self._binding.parked)
        # Late binding moves no suspects, and they are to find the lane empty.
        self._placing = deque(request for request in self._queue if request.alone)
        if not self._binding.placement.moves_waiting:
            self._placing.extend(request for request in self._queue if not request.alone)

    def work_off(self, now: float, *, is_decision: bool = False) -> bool:
        """Binds some of it; False when there was nothing to do."""
        if is_decision:
            self._num_returned = 0
        room = _AT_ONCE
        while room and self._returning:
            returned = self._returning.popleft()
            if returned.key in self._queue and returned.lane is None and returned.key not in self._binding.parked:
                self._binding.place(returned, now, first=True)
            room -= 1
        while room and self._vacating:
            lane = self._vacating[0]
            for request in list(itertools.islice(lane, room)):
                self._binding.rebind(request, now)
                room -= 1
            if not len(lane):
                self._vacating.popleft()
        while room and self._waking:
            parked = self._binding.parked.get(self._waking.popleft())
            if parked is not None and (chosen := self._binding.choose(parked, now)) is not None:
                self._binding.unbind(parked)
                self._binding.bind(parked, now, chosen)
            room -= 1
        while room and self._placing:
            request = self._placing.popleft()
            if (bound := lane_of(request)) is not None and bound.ready:
                self._binding.rebind(request, now)
            room -= 1
        return room < _AT_ONCE
