"""Lanes that the next decision looks at: those that have changed, and those whose time has come. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable

from router.scheduling.lane import Lane

_SPARE = 64


class LaneAgenda:
    """Lanes to look at, and when; times are kept in a heap with lazy deletion."""

    def __init__(self) -> None:
        self._changed: dict[Lane, None] = {}
        self._at: dict[Lane, float] = {}
        self._heap: list[tuple[float, int, Lane]] = []
        self._serials = itertools.count()

    def add(self, lanes: Iterable[Lane]) -> None:
        """Has lanes looked at in the next decision."""
        self._changed.update(dict.fromkeys(lanes))

    def touch(self, lane: Lane) -> None:
        """Has one lane looked at in the next decision."""
        self._changed[lane] = None

    def forget(self, lane: Lane) -> None:
        """Has a lane looked at no more."""
        self._changed.pop(lane, None)
        self._at.pop(lane, None)

    def set_time(self, lane: Lane, at: float | None) -> None:
        """Sets when a lane is looked at though nothing has changed; None for never."""
        if at is None:
            self._at.pop(lane, None)
        elif self._at.get(lane) != at:
            self._at[lane] = at
            heapq.heappush(self._heap, (at, next(self._serials), lane))
            if len(self._heap) > 2 * len(self._at) + _SPARE:
                self._heap = [(due, next(self._serials), each) for each, due in self._at.items()]
                heapq.heapify(self._heap)

    def next_time(self) -> float | None:
        """The earliest time; None when there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> deque[Lane]:
        """The lanes to look at now: first those whose time has come, which have none any more."""
        due: dict[Lane, None] = {}
        while (at := self.next_time()) is not None and at <= now:
            lane = heapq.heappop(self._heap)[2]
            del self._at[lane]
            due[lane] = None
        lanes = deque({**due, **self._changed})
        self._changed.clear()
        return lanes
