"""Memory of unfinished groups of all Sessions of a worker. A bound per Session does not bound the process.

Invariant: if every Session that `must_go` is closed, all Sessions hold less than 1.5 times MAX_ALL_ASSEMBLING_BYTES
plus the bytes of one frame. This is so even if a large Session neither reads nor sends any more.
"""

from __future__ import annotations

from common.limits import MAX_ALL_ASSEMBLING_BYTES


class AssemblyRoom:
    """Bytes of unfinished groups, by Session."""

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
