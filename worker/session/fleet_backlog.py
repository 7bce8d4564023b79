"""Sums over all Sessions of a worker: the backlog at its routers, and the memory of unfinished groups.

The backlog is echoed to each router, so that every gate sees the fleet's oldest request. Without the echo a delay
factor works for one router only (docs/explanation/determinism.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import MAX_ALL_ASSEMBLING_BYTES
from common.wire.peer_numbers import counted


class AssemblyRoom:
    """Bytes of unfinished groups, by Session. A bound per Session does not bound the process.

    Invariant: if every Session that `must_go` is closed, all Sessions hold less than 1.5 times MAX_ALL_ASSEMBLING_BYTES
    plus the bytes of one frame. This is so even if a large Session neither reads nor sends any more.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._num_bytes = 0

    def hold(self, session: int, num_bytes: int) -> None:
        """Sets the bytes that a Session holds now."""
        self._num_bytes += num_bytes - self._held.pop(session, 0)
        if num_bytes:
            self._held[session] = num_bytes

    def must_go(self, session: int) -> bool:
        """True if all Sessions hold too much together, and this one more than half of an equal share."""
        if self._num_bytes <= MAX_ALL_ASSEMBLING_BYTES:
            return False
        return 2 * self._held.get(session, 0) * len(self._held) > MAX_ALL_ASSEMBLING_BYTES


@dataclass(frozen=True, slots=True)
class _Lane:
    oldest_age_s: float
    num_tokens: int
    num_seqs: int
    reported: float


class FleetLanes:
    """The newest Lane record of every session. Times are monotonic seconds of this machine.

    Attributes:
        assembly: memory of the unfinished groups of all Sessions.
    """

    def __init__(self) -> None:
        self.assembly = AssemblyRoom()
        self._lanes: dict[int, _Lane] = {}

    def report(self, session: int, *, oldest_age_s: float, num_tokens: int, num_seqs: int, now: float) -> None:
        """Stores a session's Lane record; `num_seqs` 0 means that nothing waits there."""
        if num_seqs == 0:
            self.remove(session)
        else:
            self._lanes[session] = _Lane(oldest_age_s, num_tokens, num_seqs, now)

    def remove(self, session: int) -> None:
        """Removes a session that has ended."""
        self._lanes.pop(session, None)

    def oldest_age_s(self, now: float) -> float:
        """Age now of the oldest request that waits at any router; 0 if none waits."""
        return max((lane.oldest_age_s + now - lane.reported for lane in self._lanes.values()), default=0.0)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait at all routers."""
        return sum(counted(lane.num_tokens) for lane in self._lanes.values())
