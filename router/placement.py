"""Which worker a request goes to. Later policies (cost, prefix affinity) implement the same protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.lane import Lane
from router.queue import QueuedRequest


class Placement(Protocol):
    """A policy."""

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The lane for `request` among `lanes`, which all serve its model, take work, and are at least one."""
        ...


class RoundRobin:
    """One lane after the other, per model."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def choose(self, request: QueuedRequest, lanes: Sequence[Lane]) -> Lane:
        """The next lane in turn."""
        turn = self._turns.get(request.model, 0)
        self._turns[request.model] = turn + 1
        return lanes[turn % len(lanes)]


PLACEMENTS: dict[str, Callable[[], Placement]] = {"round_robin": RoundRobin}
