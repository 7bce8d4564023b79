"""Memory of unfinished groups of all Sessions of a worker: a bound of each Session is none of the process.

Invariant: with every Session that `must_go` closed, all together hold less than 1.5 times MAX_ALL_ASSEMBLING_BYTES and
what one frame adds, also where a Session that holds much neither reads nor sends any more.
"""

from __future__ import annotations

from common.limits import MAX_ALL_ASSEMBLING_BYTES


class AssemblyRoom:
    """Bytes that each Session holds of groups that have not come whole."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._num_bytes = 0

    def hold(self, session: int, num_bytes: int) -> None:
        """A Session holds `num_bytes` now."""
        self._num_bytes += num_bytes - self._held.pop(session, 0)
        if num_bytes:
            self._held[session] = num_bytes

    def must_go(self, session: int) -> bool:
        """True if all Sessions together hold too much, and this one more than half of its share."""
        if self._num_bytes <= MAX_ALL_ASSEMBLING_BYTES:
            return False
        return 2 * self._held.get(session, 0) * len(self._held) > MAX_ALL_ASSEMBLING_BYTES
